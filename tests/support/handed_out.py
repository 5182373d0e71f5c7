"""Run on every rank: models in folders are shared out, and each comes together again as it was loaded, on every rank.

python handed_out.py FOLDER ...
"""

from __future__ import annotations

import sys

import torch

from support.forks import make_group
from swarmq.config import Train
from swarmq.learner.distributed.accelerator import make_accelerator
from swarmq.learner.distributed.rendezvous import leave_group
from swarmq.learner.distributed.sharding import full_tensor, is_sharded
from swarmq.learner.model.layout_model import LayoutModel, PlacedLayout
from swarmq.learner.model.loading import load_lm
from swarmq.learner.teachers.reference_models import FrozenModel
from swarmq.timeline import lay_rows, unfold


def main(sources: list[str]) -> None:
    accelerator, placed, warm = make_accelerator(Train(sharding="full")), example(), torch.tensor(0.7)
    for source in sources:
        expected = LayoutModel(load_lm(source, gradient_checkpointing=False)).eval()
        judge = FrozenModel(source, accelerator, role="reference", vocab=0)
        assert is_sharded(judge._model)
        same(source, judge._model, expected)
        with torch.no_grad():
            wanted = expected(placed, warm).logprobs
        torch.testing.assert_close(judge.score(placed, warm).logprobs, wanted, msg=source)
        same(source, judge._model, expected)  # FSDP2 has put tensors in their places by now


def same(source: str, made: torch.nn.Module, expected: torch.nn.Module) -> None:
    for kind in ("named_parameters", "named_buffers"):
        ours, theirs = (dict(getattr(model, kind)(remove_duplicate=False)) for model in (made, expected))
        assert together(ours) == together(theirs), (source, "other weights are tied")
        for name, tensor in theirs.items():
            assert torch.equal(full_tensor(ours[name]), tensor.detach()), (source, name)
            assert ours[name].dtype == tensor.dtype
    assert made.state_dict().keys() == expected.state_dict().keys(), (source, "other tensors are saved")


def together(named: dict[str, torch.Tensor]) -> set[frozenset[str]]:
    """Names of one tensor."""
    return {frozenset(other for other in named if named[other] is named[name]) for name in named}


def example() -> PlacedLayout:
    rows = [(episode, row) for episode, turns in enumerate(make_group(3)) for row in unfold(turns)]
    return PlacedLayout.of(lay_rows(rows), torch.device("cpu"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
    leave_group()
