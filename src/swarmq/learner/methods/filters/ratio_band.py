"""The filter `ratio_band`."""

from __future__ import annotations

from torch import Tensor

from swarmq.config import Train
from swarmq.learner.methods.filters import compute_gap
from swarmq.learner.methods.losses import LossInputs


def ratio_band(tokens: LossInputs, _among: Tensor, train: Train) -> Tensor:
    """Keep tokens whose ratio rho is in the band."""
    assert train.ratio_band is not None
    low, high = train.ratio_band
    ratio = compute_gap(tokens).exp()
    return (ratio >= low) & (ratio <= high)
