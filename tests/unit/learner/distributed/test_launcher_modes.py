"""What `accelerate launch` would have accelerate do to a model or its gradient is refused, or without effect."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swarmq.config import Train
from swarmq.errors import LearnerError
from swarmq.learner.distributed.accelerator import make_accelerator
from swarmq.learner.distributed.launcher_modes import refuse_modes

PLAIN = {
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_DYNAMO_BACKEND": "NO",
    "ACCELERATE_DYNAMO_MODE": "default",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
    "ACCELERATE_DYNAMO_USE_DYNAMIC": "False",
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "False",
    "ACCELERATE_USE_CPU": "False",
}
"""What it sets where it is asked for processes alone."""
SHARED_OUT = r".*train\.sharding = 'full'"


@pytest.mark.parametrize("cuda", [False, True])
def test_processes_are_what_it_is_there_for(cuda: bool) -> None:
    refuse_modes(PLAIN, cuda=cuda)
    refuse_modes({}, cuda=cuda)


@pytest.mark.parametrize("axis", ["CP", "SP", "TP"])
def test_what_would_cut_rows_into_parts_is_refused_by_name_and_with_what_does_it_here(
    axis: str, monkeypatch: pytest.MonkeyPatch, tiny_qwen: Path
) -> None:
    monkeypatch.setenv(f"PARALLELISM_CONFIG_{axis}_SIZE", "2")
    with pytest.raises(LearnerError, match=f"--parallelism-config-{axis.lower()}-size out.*train.context_parallel = 2"):
        make_accelerator(Train(mixed_precision="bf16"), str(tiny_qwen))


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("ACCELERATE_USE_DEEPSPEED", "true", f"--use_deepspeed {SHARED_OUT}"),
        ("ACCELERATE_USE_MEGATRON_LM", "true", f"--use_megatron_lm {SHARED_OUT}"),
        ("ACCELERATE_USE_FSDP", "true", f"--use_fsdp {SHARED_OUT}"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "true", f"--use_parallelism_config {SHARED_OUT}"),
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", "--dynamo_backend .*swarmq compiles layers by itself"),
        ("ACCELERATE_FP8_BACKEND", "te", r"--fp8_backend .*train\.mixed_precision"),
    ],
)
def test_what_would_change_what_is_computed_is_refused_by_its_option_and_with_what_there_is_here(
    variable: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch, tiny_qwen: Path
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(LearnerError, match=said):
        make_accelerator(Train(), str(tiny_qwen))


def test_processors_in_place_of_gpus_are_refused_for_what_gpus_were_planned_for() -> None:
    refuse_modes(PLAIN | {"ACCELERATE_USE_CPU": "True"}, cuda=False)
    with pytest.raises(LearnerError, match="--cpu .*CUDA_VISIBLE_DEVICES=''"):
        refuse_modes(PLAIN | {"ACCELERATE_USE_CPU": "True"}, cuda=True)


def test_the_environment_divides_no_gradient(monkeypatch: pytest.MonkeyPatch, tiny_qwen: Path) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    weight = torch.ones(3, requires_grad=True)
    make_accelerator(Train(), str(tiny_qwen)).backward(weight.sum())
    assert weight.grad is not None
    assert weight.grad.tolist() == [1.0, 1.0, 1.0]
