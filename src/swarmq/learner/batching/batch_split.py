"""Division of a batch's groups among several optimizer steps, and combination of the steps' metrics. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from swarmq.learner.methods.credit import group_by_slot
from swarmq.messages import Rollout

SUMMED = frozenset(
    {
        *("tokens_trained", "tokens_compared", "same_weights_tokens", "calls_left_out", "tokens_left_out"),
        *("episodes_left_out", "passes", "tokens_computed", "flops"),
    }
)
"""Metrics that add up over the steps of a batch. Other metrics are averaged, weighted by trained tokens."""
AVERAGED_BEFORE_FILTERS = frozenset(
    {"kl_k3", "gap_p99", "same_weights_gap", "effective_samples", "filtered_positive", "filtered_negative"}
)
"""Averaged metrics that are weighted by the number of tokens before filters."""


def split_groups(episodes: Sequence[Rollout], steps: int) -> list[tuple[Rollout, ...]]:
    """Split the batch into at most `steps` parts of whole groups, as even as possible, in the batch's order.

    Every episode is in exactly one part.
    """
    groups = group_by_slot(episodes)
    steps = min(steps, len(groups))
    edges = [round(i * len(groups) / steps) for i in range(steps + 1)] if steps else []
    return [tuple(episode for group in groups[a:b] for episode in group) for a, b in pairwise(edges)]


def merge_metrics(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Combine the metrics of a batch's steps. A step without tokens for the critic has no `value_loss`."""
    if len(steps) == 1:
        return steps[0]
    whole: dict[str, Any] = {}
    for step in steps:
        whole |= step
    for name, last in whole.items():
        having = [step for step in steps if name in step]
        if name in SUMMED:
            whole[name] = sum(step[name] for step in having)
        elif isinstance(last, float):
            tokens = "tokens_compared" if name in AVERAGED_BEFORE_FILTERS else "tokens_trained"
            weights = [max(step[tokens], 1) for step in having]
            whole[name] = sum(w * step[name] for w, step in zip(weights, having, strict=True)) / sum(weights)
    if skipped := {step["skipped"] for step in steps if "skipped" in step}:
        whole["skipped"] = " ".join(sorted(skipped))
    return whole | {"optimizer_steps": len(steps)}
