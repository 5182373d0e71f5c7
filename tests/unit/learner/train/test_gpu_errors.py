"""A GPU that fails or is too small ends the learner with what happened and what to do; what is on disk stays sound."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from torch.distributed import DistNetworkError

from support.episodes import make_group
from swarmq.config import Train
from swarmq.errors import LearnerError
from swarmq.learner.checkpoint import discovery, save_load
from swarmq.learner.distributed.accelerator import COMMAND_TIMEOUT
from swarmq.learner.distributed.processes import _how
from swarmq.learner.distributed.rendezvous import COLLECTIVE_TIMEOUT
from swarmq.learner.store.records import BatchIndex, BatchRecord, RunIdentity
from swarmq.learner.train import trainer
from swarmq.learner.train.gpu_errors import map_gpu_errors
from swarmq.learner.train.trainer import Trainer
from swarmq.timeline import resolve

TRAIN = Train(gradient_checkpointing=False, token_log=False)
LOST = torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered\nmore")
FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
APART = DistNetworkError("Connection reset by peer")


def batch(version: int) -> BatchRecord:
    return BatchRecord(
        index=BatchIndex(record=version, version=version), episodes=tuple(make_group("a")), settings=TRAIN
    )


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
    identity, learner = RunIdentity(run="r", policy="main", model=str(tiny_qwen)), Trainer(str(tiny_qwen), TRAIN)
    learner.step(batch(1))
    save_load.save_checkpoint(tmp_path, learner, identity, model=str(tiny_qwen), keep=1)

    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as failing:
        failing.setattr(trainer, "policy_loss", fail)
        with pytest.raises(LearnerError, match=said):
            learner.step(batch(2))
    assert learner.version == 1
    found = discovery.find_newest(tmp_path, identity)
    assert found is not None
    again = Trainer(str(found.path), TRAIN, initial=str(tiny_qwen))
    save_load.restore(again, found)
    again.step(batch(2))
    assert again.version == 2


def test_a_batch_that_a_gpu_had_no_room_for_is_made_again_in_smaller_passes(tiny_qwen: Path) -> None:
    """As the error says to: its record is in the log with the settings of before."""
    episodes = tuple(episode for name in "abc" for episode in make_group(name, turns=3))
    longest = max(len(turn) for episode in episodes for turn in resolve(episode.turns))
    settings = msgspec.structs.replace(TRAIN, micro_batch_tokens=100 * longest, layout="tree", learning_rate=1e-3)
    record = BatchRecord(index=BatchIndex(record=1, version=1), episodes=episodes, settings=settings)
    passes, weights = [], []
    for most in (100 * longest, longest, longest // 2):
        now = msgspec.structs.replace(settings, micro_batch_tokens=most, layout="rows", learning_rate=0.5)
        learner = Trainer(str(tiny_qwen), now)
        fields = learner.step(record)
        assert fields["layout"] == "rows"
        passes.append(fields["passes"])
        weights.append({name: tensor.clone() for name, tensor in learner.named_tensors()})
    assert passes[0] == 1
    assert passes[1] == passes[2] > 1
    for made in weights[1:]:
        for name, tensor in weights[0].items():
            torch.testing.assert_close(made[name], tensor, rtol=0, atol=1e-5, msg="it is the same step")


MEMORY, BROKEN, ALONE = "the GPU has too little memory: ", "the GPU failed: ", "the ranks lost each other: "


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be",
            BROKEN + "CUDA error: an",
        ),
        ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`", BROKEN + "CUDA error: CUBLAS"),
        ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR", BROKEN + "cuDNN error"),
        ("backend='inductor' raised:\nRuntimeError: Triton Error [CUDA]: unspecified", BROKEN + "RuntimeError: Triton"),
        ("CUDA driver error: unknown error", BROKEN + "CUDA driver error"),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", MEMORY + "CUDA error: CUBLAS"),
        ("Triton Error [CUDA]: out of memory", MEMORY + "Triton Error"),
        (
            "NCCL error in: ProcessGroupNCCL.cpp:123\nncclRemoteError: a call failed on another host",
            ALONE + "NCCL error",
        ),
        ("[/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:3", ALONE + "[/gloo/transport"),
    ],
)
def test_what_lies_under_torch_is_known_by_its_words(text: str, said: str) -> None:
    with pytest.raises(LearnerError) as caught, map_gpu_errors("step 2"):
        raise RuntimeError(text)
    assert str(caught.value).startswith(f"step 2: {said}")
    assert "nothing is lost" in str(caught.value)


def test_an_accelerator_error_for_want_of_memory_is_one_of_memory() -> None:
    with pytest.raises(LearnerError, match="too little memory"), map_gpu_errors("step 2"):
        raise torch.AcceleratorError("CUDA error: out of memory")


@pytest.mark.parametrize(
    "text",
    [
        "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
        "DefaultCPUAllocator: not enough memory: you tried to allocate 4 bytes",
        "Distributed package doesn't have NCCL built in",
        "",
    ],
)
def test_mistakes_that_only_mention_gpus_stay_what_they_are(text: str) -> None:
    with pytest.raises(RuntimeError) as caught, map_gpu_errors("step 2"):
        raise RuntimeError(text)
    assert type(caught.value) is RuntimeError


def test_other_errors_stay_what_they_are(tiny_qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(trainer, "policy_loss", fail)
    with pytest.raises(RuntimeError, match="a mistake of ours"):
        Trainer(str(tiny_qwen), TRAIN).step(batch(1))


def test_a_rank_that_waited_too_long_for_a_hung_gpu_is_named() -> None:
    assert COLLECTIVE_TIMEOUT < COMMAND_TIMEOUT
    assert "a GPU that stopped answering?" in _how(-6)
