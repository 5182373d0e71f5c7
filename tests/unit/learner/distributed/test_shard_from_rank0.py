"""Ranks build models from configs that rank 0 has loaded from files: where these differ, nothing is shared out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from swarmq.errors import LearnerError
from swarmq.learner.distributed import shard_from_rank0
from swarmq.learner.distributed.shard_from_rank0 import TensorOutline, outline_tensors
from swarmq.learner.distributed.shard_from_rank0 import shard_from_rank0 as hand_out


def test_tied_weights_are_one_tensor_of_several_names() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2))
    model[1].weight = model[0].weight
    outlines = outline_tensors(model.requires_grad_(requires_grad=False))
    assert outlines["1.weight"] == outlines["0.weight"]
    assert outlines["0.weight"] == TensorOutline("0.weight", torch.Size((2, 2)), torch.float32, trained=False)
    assert outlines["2.running_mean"].trained is None


def test_a_model_that_is_not_what_its_config_says_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = outline_tensors(nn.Sequential(nn.Linear(2, 2, bias=True)))
    monkeypatch.setattr(shard_from_rank0, "broadcast_from_rank0", lambda _: loaded)
    nobody: Any = None
    with pytest.raises(LearnerError, match=r"config.json describes: only one of them has 0.bias .*repair its folder"):
        hand_out(nn.Sequential(nn.Linear(2, 2, bias=False)), nobody)
