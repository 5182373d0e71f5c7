"""What is asked of a run is known before an hour on a GPU is spent, whichever benchmark has the loop run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from benchmarks import gpu_busy
from benchmarks.loop import run as loop
from benchmarks.trl import run as trl

from swarmq.messages import Event


@pytest.mark.parametrize("benchmark", [loop, trl])
def test_a_command_line_says_all_that_a_run_of_the_loop_needs(benchmark, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark", "--device", "cpu", "--steps", "4", "--warm-up", "1"])
    asked = loop.Asked.of(benchmark.parse())
    assert asked == loop.Asked(device="cpu", steps=4, warm_up=1, deadline=420.0)


def step(at: float, *, train_s: float = 4.0, mfu: float = 0.25) -> Event:
    """A step that waited 1 s, trained, and pushed for 1 s."""
    fields = {
        "wait_s": 1.0,
        "train_s": train_s,
        "push_s": 1.0,
        "step_s": train_s + 2,
        "mfu": mfu,
        "tokens_trained": 600,
    }
    return Event(run="r", name="step", source="learner.main", at=at, fields=fields)


def test_the_loop_is_compared_with_the_sum_of_what_its_parts_do_alone() -> None:
    rates = {"direct_tokens_per_s": 200.0, "proxy_tokens_per_s": 190.0}
    alone = [step(30.0, train_s=each, mfu=0.5) for each in (1.0, 2.0, 9.0)]
    figures = {"step_s": 4.5, "sampled_tokens_per_s": 100.0 / 4.5 * 6}
    found = loop.limits(figures, measured=[step(6.0), step(12.0)], alone=alone, rates=rates)
    assert found["proxy_over_direct"] == pytest.approx(0.95)
    assert found["rollout_alone_s"] == pytest.approx(3.0)
    assert found["learner_alone_s"] == 3.0
    assert found["loop_over_sum"] == pytest.approx(0.75)
    assert (found["mfu_in_loop"], found["mfu_alone"]) == (0.25, 0.5)


def test_an_engine_has_one_rate_beside_the_learner_and_one_without() -> None:
    """Steps from 0 to 6 and from 6 to 12 that compute from 1 to 5 and from 7 to 11."""
    meter = loop.TokenMeter(None, None)
    tokens, meter.looks = 0.0, []
    for second in range(14):
        meter.looks.append((float(second), tokens))
        tokens += 10.0 if 1 <= second % 6 < 5 else 40.0
    assert loop.engine_rates([step(6.0), step(12.0)], meter) == pytest.approx(
        {"beside_the_learner": 10.0, "without": 40.0}
    )


def test_a_run_that_could_not_be_looked_at_does_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(RuntimeError, match="nvidia-ml-py"):
        gpu_busy.check()


def test_what_is_measured_after_the_multi_process_service_is_no_client_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = tmp_path / "nvidia-cuda-mps-control"
    control.write_text(f'#!/bin/sh\necho "$CUDA_MPS_PIPE_DIRECTORY" >> {tmp_path}/asked\n')
    control.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    before = dict(os.environ)
    with loop.multi_process_service(tmp_path, wanted=True):
        place = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
    assert (tmp_path / "asked").read_text().split() == [place, place], "it was not started, or not asked to quit"
    assert dict(os.environ) == before
