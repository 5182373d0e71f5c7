"""A GPU that fails or is too small ends the learner with what happened and what to do; what is on disk stays sound."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed import DistNetworkError

from support.episodes import make_group
from swarmq.config import Train
from swarmq.errors import LearnerError
from swarmq.learner import checkpoint, trainer
from swarmq.learner.children import _how
from swarmq.learner.records import BatchRecord, Identity, Index
from swarmq.learner.trainer import Trainer

TRAIN = Train(gradient_checkpointing=False, token_log=False)
LOST = torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered\nmore")
FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
APART = DistNetworkError("Connection reset by peer")


def batch(version: int) -> BatchRecord:
    return BatchRecord(index=Index(record=version, version=version), episodes=tuple(make_group("a")), settings=TRAIN)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (LOST, "step 2: the GPU failed: CUDA error: uncorrectable ECC error encountered; nothing is lost.*nvidia-smi"),
        (FULL, "step 2: the GPU has too little memory: CUDA out of memory.*micro_batch_tokens"),
        (APART, "step 2: the ranks lost each other: Connection reset by peer; nothing is lost"),
    ],
)
def test_a_step_says_what_failed_and_the_checkpoint_before_it_goes_on(
    error: Exception, said: str, tiny_qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity, learner = Identity(run="r", policy="main", model=str(tiny_qwen)), Trainer(str(tiny_qwen), TRAIN)
    learner.step(batch(1))
    checkpoint.save(tmp_path, learner, identity, model=str(tiny_qwen), keep=1)

    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as failing:
        failing.setattr(trainer, "policy_loss", fail)
        with pytest.raises(LearnerError, match=said):
            learner.step(batch(2))
    assert learner.version == 1
    found = checkpoint.newest(tmp_path, identity)
    assert found is not None
    again = Trainer(str(found.path), TRAIN, initial=str(tiny_qwen))
    checkpoint.restore(again, found)
    again.step(batch(2))
    assert again.version == 2


def test_other_errors_stay_what_they_are(tiny_qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(trainer, "policy_loss", fail)
    with pytest.raises(RuntimeError, match="a mistake of ours"):
        Trainer(str(tiny_qwen), TRAIN).step(batch(1))


def test_a_rank_that_waited_too_long_for_a_hung_gpu_is_named() -> None:
    assert trainer.COLLECTIVE_TIMEOUT < trainer.COMMAND_TIMEOUT
    assert "a GPU that stopped answering?" in _how(-6)
