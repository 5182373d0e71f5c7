"""Whether gradients, and what optimizer steps made of them, are the same but for rounding: each parameter for itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

ROUNDING = 1e-5
"""Of a parameter's own gradient. FP32 rounds by 6e-8; sums in another order come out up to 7e-7 apart here."""
NOTHING = 1e-8
"""Of the whole gradient. A parameter with less has a gradient that is nothing but rounding, and tells nothing."""
MOVED = 5e-3
"""Of a parameter's own way over some steps; up to 6e-4 here. AdamW divides by the size of each entry's gradient, so the
rounding of an entry that is next to nothing counts as much as another's whole step."""


def assert_same_gradient(ours: Mapping[str, Tensor], wanted: Mapping[str, Tensor], tolerance: float = ROUNDING) -> None:
    """By parameter's name. Large gradients elsewhere excuse nothing."""
    assert ours.keys() == wanted.keys()
    norms = {name: float(value.double().norm()) for name, value in wanted.items()}
    total = sum(norm**2 for norm in norms.values()) ** 0.5
    for name, value in wanted.items():
        assert norms[name] > NOTHING * total, f"{name} has no gradient to compare"
        apart = float((ours[name].double() - value.double()).norm()) / norms[name]
        assert apart < tolerance, (name, apart)


def assert_same_way(
    ours: Mapping[str, Tensor], wanted: Mapping[str, Tensor], before: Mapping[str, Tensor], tolerance: float = MOVED
) -> None:
    """Weights by name, that steps from `before` made."""
    assert ours.keys() == wanted.keys()
    for name, value in wanted.items():
        way = float((value - before[name]).norm())
        assert way > 0, f"{name} was not moved"
        apart = float((ours[name] - value).norm()) / way
        assert apart < tolerance, (name, apart)


def assert_same(made: dict[str, Any], alone: dict[str, Any]) -> None:
    """What two runs of `learner_ranks` made: the steps by the size of their gradients too, which AdamW makes nothing of."""
    assert made["left_out"] == alone["left_out"]
    assert_same_gradient(made["gradient"], alone["gradient"])
    assert made["norms"] == pytest.approx(alone["norms"], rel=1e-5)
    assert all(torch.equal(tensor, alone["before"][name]) for name, tensor in made["before"].items())
    assert_same_way(made["weights"], alone["weights"], alone["before"])
