"""The metrics of a step: sums over the tokens on every rank, reduced to one set of numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from swarmq.learner.methods.loss_effects import LossEffect
from swarmq.learner.methods.losses import MAX_LOG_RATIO, LossInputs, TokenLoss

NAMES = (
    "tokens", "compared", "loss", "k3", "ratio", "ratio_squared", "entropy", "logprobs", "positive", "negative",
    "masked_positive", "masked_negative", "clipped_positive", "clipped_negative", "calls_left_out", "tokens_left_out",
    "filtered_positive", "filtered_negative", "divergence", "same_tokens", "same_gap", "value_loss", "valued",
)  # fmt: skip
GAP_BINS = 160
GAP_LOW, GAP_HIGH = -12.0, 4.0
"""Range of log10 |logprobs - behavior_logprobs| in the histogram, with ten bins per decade, so that quantiles are exact to 26
%."""


class MetricSums:
    """Running sums of one optimizer step on one rank."""

    def __init__(self, device: torch.device) -> None:
        self.values = dict.fromkeys(NAMES, torch.zeros((), dtype=torch.float64, device=device))
        self.gaps = torch.zeros(GAP_BINS, dtype=torch.float64, device=device)

    def add(self, **values: Tensor | float) -> None:
        for name, value in values.items():
            self.values[name] = self.values[name] + value

    def add_mismatch(self, tokens: LossInputs, among: Tensor) -> None:
        """Add the mismatch between engine and learner. `among` [S] bool: tokens with a weight, including those that filters
        remove, because filters would hide the mismatch."""
        if tokens.held is not None:
            among = (
                among & ~tokens.held
            )  # behavior_logprobs is normalised over the tokens that the grammar allowed, logprobs over all
        gap = tokens.logprobs.detach() - tokens.behavior_logprobs
        held = gap.clamp(max=MAX_LOG_RATIO)
        ratio = held.exp()
        self.add(
            compared=among.sum(),
            k3=((ratio - held - 1) * among).sum(dtype=torch.float64),
            ratio=(ratio * among).sum(dtype=torch.float64),
            ratio_squared=(ratio.double().square() * among).sum(),
        )
        place = (gap.abs().double().log10() - GAP_LOW) * (GAP_BINS / (GAP_HIGH - GAP_LOW))
        self.gaps.index_add_(0, place.nan_to_num(GAP_BINS).clamp(0, GAP_BINS - 1).long(), among.double())

    def add_same(self, logprobs: Tensor, behavior_logprobs: Tensor, same: Tensor) -> None:
        """Add the mismatch of the tokens `same` [S] bool, which were sampled with the learner's present weights. `logprobs`
        [S]: log-probabilities under these weights."""
        gap = (logprobs.detach() - behavior_logprobs).abs()
        self.add(same_tokens=same.sum(), same_gap=torch.where(same, gap, 0).sum(dtype=torch.float64))

    def add_tokens(self, tokens: LossInputs, entropy: Tensor, loss: TokenLoss, kept: Tensor) -> None:
        """Add the tokens of the loss. `kept` [S] bool: tokens with a weight that no filter removed."""
        logprobs, (up, down) = tokens.logprobs.detach(), _signs(loss, kept)
        masked, clipped = loss.effects == LossEffect.MASKED, loss.effects > LossEffect.MASKED
        self.add(
            tokens=kept.sum(),
            entropy=(entropy * kept).sum(dtype=torch.float64),
            logprobs=(logprobs * kept).sum(dtype=torch.float64),
            positive=up.sum(),
            negative=down.sum(),
            masked_positive=(masked & up).sum(),
            masked_negative=(masked & down).sum(),
            clipped_positive=(clipped & up).sum(),
            clipped_negative=(clipped & down).sum(),
        )
        if tokens.reference is not None:
            d = (tokens.reference - logprobs).clamp(max=MAX_LOG_RATIO)
            self.add(divergence=((d.exp() - d - 1) * kept).sum(dtype=torch.float64))

    def add_filtered(self, loss: TokenLoss, left_out: Tensor) -> None:
        """Add filtered tokens. `left_out` [S] bool: tokens with a weight that a filter removed."""
        up, down = _signs(loss, left_out)
        self.add(filtered_positive=up.sum(), filtered_negative=down.sum())

    def reduce(self, all_reduce: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """Return the metrics over all ranks, the same on every rank."""
        flat = torch.cat([torch.stack([torch.as_tensor(self.values[n]) for n in NAMES]), self.gaps])
        flat = all_reduce(flat).cpu()
        total = dict(zip(NAMES, flat[: len(NAMES)].tolist(), strict=True))
        count, compared = max(total["tokens"], 1.0), max(total["compared"], 1.0)
        return {
            "tokens_trained": int(total["tokens"]),
            "tokens_compared": int(total["compared"]),
            "loss": total["loss"],
            "kl_k3": total["k3"] / compared,
            "gap_p99": _quantile(flat[len(NAMES) :], 0.99),
            "effective_samples": total["ratio"] ** 2 / (compared * max(total["ratio_squared"], 1e-30))
            if total["compared"]
            else 1.0,
            "same_weights_tokens": int(total["same_tokens"]),
            "same_weights_gap": total["same_gap"] / max(total["same_tokens"], 1.0),
            "entropy": total["entropy"] / count,
            "logprob": total["logprobs"] / count,
            "masked_positive": total["masked_positive"] / max(total["positive"], 1.0),
            "masked_negative": total["masked_negative"] / max(total["negative"], 1.0),
            "clipped_positive": total["clipped_positive"] / max(total["positive"], 1.0),
            "clipped_negative": total["clipped_negative"] / max(total["negative"], 1.0),
            "filtered_positive": _share(total["filtered_positive"], total["positive"]),
            "filtered_negative": _share(total["filtered_negative"], total["negative"]),
            "kl_reference": total["divergence"] / count,
            "calls_left_out": int(total["calls_left_out"]),
            "tokens_left_out": int(total["tokens_left_out"]),
            **({"value_loss": total["value_loss"]} if total["valued"] else {}),
        }


def _signs(loss: TokenLoss, among: Tensor) -> tuple[Tensor, Tensor]:
    """Return masks [S] bool of the tokens with positive and with negative advantage. Without advantages, all tokens count as
    positive."""
    if loss.advantages is None:
        return among, torch.zeros_like(among)
    return (loss.advantages > 0) & among, (loss.advantages < 0) & among


def _share(left_out: float, kept: float) -> float:
    return left_out / max(left_out + kept, 1.0)


def _quantile(counts: Tensor, share: float) -> float:
    """Return the upper edge of the histogram bin that contains the quantile; 0 for an empty histogram."""
    if not counts.sum():
        return 0.0
    index = int(torch.searchsorted(counts.cumsum(0), counts.sum() * share))
    return float(10 ** (GAP_LOW + (index + 1) * (GAP_HIGH - GAP_LOW) / GAP_BINS))
