"""Warning signs of a failing training, with their limits, computed from the metrics of its steps. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from swarmq.learner.health.findings import Finding, Level
from swarmq.learner.health.trends import MAX_STEPS, find_trends, reward_rises

WINDOW = 10
"""Number of steps at the beginning and at the end that are compared."""
FILTERED = 0.1
"""Largest share of tokens that a filter should remove. If log rho is normal with k3 = variance / 2, a band of [0.5, 2] removes 3
% at the limit of the mismatch (0.05), 13 % at twice the limit, and 50 % at ten times the limit."""

Steps = Sequence[Mapping[str, Any]]


class Sign(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    """Name of the problem."""
    measured: str
    word: str
    """Word for a value beyond the limit in texts, e.g. "collapse" or "many"."""
    measure: Callable[[Steps], float | None]
    """Function that returns the measured value of the steps; None if their metrics lack it."""
    limit: float
    below: bool = False
    """Whether values below the limit are a warning sign; if false, values above it are."""
    level: Level = "warning"
    alone: bool = True
    """Whether a value beyond the limit is a warning sign even while the reward rises."""
    advice: str


def last(name: str) -> Callable[[Steps], float | None]:
    """Return a measure: the mean of a metric over the newest steps."""
    return lambda steps: _mean(steps[-WINDOW:], name)


def over_first(name: str) -> Callable[[Steps], float | None]:
    """Return a measure: the mean over the newest steps divided by that over the first steps."""

    def ratio(steps: Steps) -> float | None:
        if len(steps) < 2 * WINDOW:
            return None
        now, then = _mean(steps[-WINDOW:], name), _mean(steps[:WINDOW], name)
        return None if now is None or not then else now / then

    return ratio


def at_bound(steps: Steps) -> float | None:
    """Return the share of rollouts that were dropped as stale, among those trained or dropped as stale."""
    stale = sum(step.get("dropped", {}).get("stale", 0) for step in steps[-WINDOW:])
    total = stale + sum(step.get("episodes", 0) for step in steps[-WINDOW:])
    return stale / total if total else None


def cut(sign: str) -> Callable[[Steps], float | None]:
    """Return a measure: the share of masked or clipped tokens among those with advantages of one sign, `positive` or `negative`."""

    def share(steps: Steps) -> float | None:
        clipped = _mean(steps[-WINDOW:], f"clipped_{sign}")
        return None if clipped is None else clipped + (_mean(steps[-WINDOW:], f"masked_{sign}") or 0.0)

    return share


def near_bound(steps: Steps) -> float | None:
    """Return a measure: the mean staleness of the episodes' oldest tokens, as a share of `groups.max_staleness`."""
    counts = [item for step in steps[-WINDOW:] for item in step.get("staleness", {}).items()]
    episodes, bound = sum(count for _, count in counts), steps[-1]["max_staleness"]
    return sum(int(lag) * count for lag, count in counts) / (episodes * bound) if episodes and bound else None


def skipped(steps: Steps) -> float | None:
    return sum("skipped" in step for step in steps[-WINDOW:]) / len(steps[-WINDOW:])


SIGNS = (
    Sign(
        name="entropy collapse", measured="entropy over that of the first 10 steps", word="collapse",
        measure=over_first("entropy"), limit=0.2, below=True, alone=False,
        advice="entropy fell to less than a fifth of its first values, and the reward no longer rises: raise clip_high, lower the learning rate, or add tasks",
    ),
    Sign(
        name="no entropy left", measured="entropy", word="collapse",
        measure=last("entropy"), limit=0.01, below=True,
        advice="the policy answers as if greedily and tries nothing new: go back to an earlier checkpoint",
    ),
    Sign(
        name="entropy explosion", measured="entropy over that of the first 10 steps", word="explosion",
        measure=over_first("entropy"), limit=3.0,
        advice="entropy tripled, so answers become random: lower the learning rate, look at kl_k3",
    ),
    Sign(
        name="mismatch", measured="kl_k3 of engine and learner", word="mismatch",
        measure=last("kl_k3"), limit=0.05,
        advice="engine and learner disagree (swarmq doctor tells the causes apart): set ratio_band or row_k3_max",
    ),
    Sign(
        name="broken mismatch", measured="kl_k3 of engine and learner", word="broken",
        measure=last("kl_k3"), limit=0.5, level="error",
        advice="the engine does not sample from the trained policy: pause the run, and let swarmq doctor tell the causes apart",
    ),
    Sign(
        name="few effective samples", measured="share of effective samples", word="few",
        measure=last("effective_samples"), limit=0.3, below=True,
        advice="a few tokens carry most of the weight: lower groups.max_staleness or steps_per_batch",
    ),
    Sign(
        name="stale episodes", measured="share of episodes dropped as stale", word="many",
        measure=at_bound, limit=0.1,
        advice="finished episodes are thrown away: use fewer workers, shorter episodes, or a larger groups.max_staleness",
    ),
    Sign(
        name="staleness near its bound", measured="staleness over groups.max_staleness", word="near its bound",
        measure=near_bound, limit=0.8,
        advice="rollouts are as stale as groups.max_staleness allows, and staler ones would be dropped: use fewer workers, or lower it",
    ),
    Sign(
        name="zero-variance groups", measured="share of groups with equal rewards", word="many",
        measure=last("equal_groups"), limit=0.7,
        advice="most groups have equal rewards: tasks are too easy or too hard; change the mix or enlarge group_size",
    ),
    Sign(
        name="clipped upwards", measured="share of rewarded tokens masked or clipped", word="many",
        measure=cut("positive"), limit=0.5,
        advice="the loss masks or clips most rewarded tokens: lower the learning rate or steps_per_batch",
    ),
    Sign(
        name="clipped downwards", measured="share of punished tokens masked or clipped", word="many",
        measure=cut("negative"), limit=0.5,
        advice="the loss masks or clips most punished tokens: lower the learning rate or steps_per_batch",
    ),
    Sign(
        name="filtered upwards", measured="share of rewarded tokens filtered", word="many",
        measure=last("filtered_positive"), limit=FILTERED,
        advice="filters remove more rewarded tokens than outliers: look at kl_k3; swarmq doctor tells its causes apart",
    ),
    Sign(
        name="filtered downwards", measured="share of punished tokens filtered", word="many",
        measure=last("filtered_negative"), limit=FILTERED,
        advice="filters remove more punished tokens than outliers: look at kl_k3; swarmq doctor tells its causes apart",
    ),
    Sign(
        name="truncated answers", measured="share of answers cut off", word="many",
        measure=last("truncated"), limit=0.3,
        advice="token limits cut many answers off: raise engine.max_model_len, sampling.max_tokens or the agents' own limits, or set length_penalty",
    ),
    Sign(
        name="gradient growing", measured="gradient norm over that of the first 10 steps", word="growing",
        measure=over_first("grad_norm"), limit=10.0,
        advice="the gradient norm grew tenfold: lower the learning rate or grad_clip",
    ),
    Sign(
        name="misleading critic", measured="explained variance of the critic", word="misleading",
        measure=last("explained_variance"), limit=-0.5, below=True,
        advice="the critic's values are further from the returns than their mean is, so advantages are noisier than without it: lower "
        "critic.learning_rate, or let it learn alone first (critic.warmup_steps)",
    ),
    Sign(
        name="diverging critic", measured="value loss over that of the first 10 steps", word="diverging",
        measure=over_first("value_loss"), limit=10.0,
        advice="the value loss grew tenfold: lower critic.learning_rate, and look whether the scale of the rewards changed",
    ),
    Sign(
        name="steps skipped", measured="share of steps skipped", word="wrong",
        measure=skipped, limit=0.0, level="error",
        advice="steps changed nothing (`skipped` in their events says why): a filter leaves nothing, or gradients of policy or critic overflow",
    ),
)  # fmt: skip


def find_signs(steps: Steps, max_staleness: int) -> Iterator[Finding]:
    """Yield one finding for every warning sign and trend that can be computed from the steps' metrics."""
    if not steps:
        yield Finding(
            level="note",
            check="signs",
            text="the run's events.jsonl, which its learner writes, has no step yet",
        )
        return
    yield from _judge_sign([{**step, "max_staleness": max_staleness} for step in steps])
    yield from find_trends(steps)


class SignWatch:
    """Watcher for warning signs during training. Reports a sign when it appears, and again only after WINDOW steps without it."""

    def __init__(self) -> None:
        self._steps: list[Mapping[str, Any]] = []
        """The first WINDOW and the newest steps."""
        self._count = 0
        self._last_shown: dict[str, int] = {}
        """Name of a sign -> last step that had it."""

    def step(self, fields: Mapping[str, Any], max_staleness: int) -> list[Finding]:
        """Add a step and return the findings that appear with it. Findings that are not errors are reported from step WINDOW on,
        because earlier ones may be chance."""
        self._count += 1
        self._steps.append({**fields, "max_staleness": max_staleness})
        if len(self._steps) > WINDOW + MAX_STEPS:
            del self._steps[WINDOW]
        found = [*_judge_sign(self._steps), *find_trends(self._steps, only_signs=True)]
        found = [f for f in found if f.level == "error" or (f.level != "ok" and self._count >= WINDOW)]
        fresh = [f for f in found if self._count - self._last_shown.get(f.check, -WINDOW) > WINDOW]
        self._last_shown |= {f.check: self._count for f in found}
        return fresh


def _judge_sign(steps: Steps) -> Iterator[Finding]:
    for sign in SIGNS:
        if (value := sign.measure(steps)) is None:
            continue
        shown = value < sign.limit if sign.below else value > sign.limit
        shown = shown and (sign.alone or not reward_rises(steps))
        text = f"{sign.measured} {value:.4g} ({sign.word} {'below' if sign.below else 'above'} {sign.limit:g})"
        if shown:
            yield Finding(level=sign.level, check=sign.name, text=f"{text}: {sign.advice}")
        else:
            yield Finding(level="ok", check=sign.name, text=text, named=False)


def _mean(steps: Steps, name: str) -> float | None:
    """Return the mean over the steps that have the metric. Metrics that were not finite are null in the event file."""
    values = [float(value) for step in steps if (value := step.get(name)) is not None and math.isfinite(value)]
    return statistics.fmean(values) if values else None
