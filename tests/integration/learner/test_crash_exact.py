"""A learner killed at any point ends with the same weights, to the bit, as one that was never killed."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from safetensors.numpy import load_file

from support import learner_process
from support.episodes import make_group
from swarmq.broker import topology
from swarmq.config import SwarmJob
from swarmq.learner.store import batch_log
from swarmq.messages import StepReport, decode

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]  # several learners, one after another

STEPS = 5
GROUPS_PER_BATCH = 2
WAIT_S = 600
"""For a learner, on a busy machine."""


def prepare(root: Path, model: Path) -> None:
    """A job, and a queue with exactly the episodes of all its steps and two groups without a signal."""
    root.mkdir()
    for points in ("die", "freeze", "slow"):
        (root / points).mkdir()
    job = SwarmJob.build(
        {
            "run": "r",
            "folder": str(root / "runs"),
            "groups": {"group_size": 2, "groups_per_batch": GROUPS_PER_BATCH, "max_staleness": 100},
            "policies": {
                "main": {
                    "model": str(model),
                    "train": {
                        "learning_rate": 1e-3,
                        "max_steps": STEPS,
                        "checkpoint_every": 2,
                        "deterministic": True,
                        "gradient_checkpointing": False,
                    },
                }
            },
        }
    )
    (root / "job.toml").write_text(job.to_toml())
    for number in range(STEPS * GROUPS_PER_BATCH + 2):
        equal = number in (3, 6)
        for episode in make_group(f"g{number}", (1.0, 1.0) if equal else (0.0, 1.0)):
            learner_process.put(root, topology.ready("r", "main"), episode)


def start(root: Path) -> subprocess.Popen[bytes]:
    path = os.pathsep.join([str(Path(learner_process.__file__).parents[1]), *os.environ.get("PYTHONPATH", "").split()])
    with (root / "log").open("ab") as log_file:
        return subprocess.Popen(
            [sys.executable, learner_process.__file__, "trainer", str(root)],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdout=log_file,
            stderr=log_file,
        )


def run_to_the_end(root: Path, *, starts: int) -> None:
    """Start again after every death, as whoever supervises it does."""
    for _ in range(starts):
        if start(root).wait(WAIT_S) == 0:
            return
    pytest.fail((root / "log").read_text())


def final(root: Path) -> Path:
    return root / "runs" / "r" / "main" / "checkpoints" / f"step-{STEPS:08d}"


def assert_same_training(root: Path, reference: Path) -> None:
    ours, wanted = load_file(final(root) / "model.safetensors"), load_file(final(reference) / "model.safetensors")
    assert ours.keys() == wanted.keys()
    assert all(ours[name].tobytes() == wanted[name].tobytes() for name in wanted)
    records = list(batch_log.read_records(root / "runs" / "r" / "main" / "batches"))
    ids = [i for record in records for i in (*record.index.trained, *record.index.dropped)]
    assert sorted(ids) == sorted({*ids}), "an episode is in the log twice"
    assert len(ids) == 2 * (STEPS * GROUPS_PER_BATCH + 2)
    assert not list((root / "queues" / topology.ready("r", "main")).glob("*.msg")), "not acknowledged"
    told = {
        message.record: message
        for path in (root / "queues" / topology.inbox("r")).glob("*.msg")
        if isinstance(message := decode(path.read_bytes()), StepReport)
    }
    assert {n: (m.trained, m.dropped) for n, m in told.items()} == {
        r.index.record: (r.index.trained, r.index.dropped) for r in records
    }


@pytest.fixture(scope="module")
def reference(tiny_qwen: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody disturbs."""
    root = tmp_path_factory.mktemp("reference") / "root"
    prepare(root, tiny_qwen)
    run_to_the_end(root, starts=1)
    steps = [msgspec.json.decode(line) for line in (root / "steps.jsonl").read_bytes().splitlines()]
    assert [step["version"] for step in steps] == list(range(1, STEPS + 1))
    return root


@pytest.mark.parametrize(
    ("points", "starts"),
    [
        (["ack-1", "ack-6", "publish-2", "step-3"], 1),  # the batch feeder dies: log to ack, step to report
        (["push-2", "push-4"], 3),  # the trainer dies: after the step, before it is reported or checkpointed
    ],
)
def test_dying_between_log_and_ack_and_between_step_and_report_changes_nothing(
    points: list[str], starts: int, tiny_qwen: Path, tmp_path: Path, reference: Path
) -> None:
    root = tmp_path / "root"
    prepare(root, tiny_qwen)
    for point in points:
        (root / "die" / point).touch()
    run_to_the_end(root, starts=starts)
    assert sorted((root / "died").read_text().split()) == sorted(points)
    assert_same_training(root, reference)


def test_dying_while_a_checkpoint_is_written_changes_nothing(tiny_qwen: Path, tmp_path: Path, reference: Path) -> None:
    root = tmp_path / "root"
    prepare(root, tiny_qwen)
    (root / "die" / "draft-4").touch()
    drafts = root / "runs" / "r" / "main" / "checkpoints"
    assert start(root).wait(WAIT_S) == -signal.SIGKILL
    assert [_named(draft) for draft in drafts.glob(".draft-*")] == [".draft-step-00000004"]
    run_to_the_end(root, starts=1)
    assert_same_training(root, reference)
    assert not list(drafts.glob(".draft-*"))


def test_training_goes_on_beside_a_checkpoint_that_is_made_whole(
    tiny_qwen: Path, tmp_path: Path, reference: Path
) -> None:
    root = tmp_path / "root"
    prepare(root, tiny_qwen)
    for version in (2, 4):
        (root / "slow" / f"draft-{version}").touch()
    run_to_the_end(root, starts=1)
    assert_same_training(root, reference)


def test_dying_in_a_step_beside_a_checkpoint_that_is_not_whole_changes_nothing(
    tiny_qwen: Path, tmp_path: Path, reference: Path
) -> None:
    """What the log has of the steps before it is still needed."""
    root = tmp_path / "root"
    prepare(root, tiny_qwen)
    (root / "slow" / "draft-4").touch()
    (root / "die" / "draft-4").touch()
    assert start(root).wait(WAIT_S) == -signal.SIGKILL
    checkpoints = root / "runs" / "r" / "main" / "checkpoints"
    assert sorted(map(_named, checkpoints.iterdir())) == [".draft-step-00000004", "step-00000002"]
    assert "5" in _lines(root / "pushed")
    run_to_the_end(root, starts=1)
    assert_same_training(root, reference)


def test_dying_at_random_moments_changes_nothing(tiny_qwen: Path, tmp_path: Path, reference: Path) -> None:
    root = tmp_path / "root"
    prepare(root, tiny_qwen)
    rng = random.Random(7)
    log_file = root / "steps.jsonl"
    for kills in range(3):
        process = start(root)
        while process.poll() is None and len(_lines(log_file)) <= kills:
            time.sleep(0.001)
        time.sleep(rng.random() * 0.1)
        process.kill()
        process.wait()
    run_to_the_end(root, starts=2)
    assert_same_training(root, reference)


def test_a_frozen_learner_that_wakes_after_another_took_its_place_does_no_harm(
    tiny_qwen: Path, tmp_path: Path, reference: Path
) -> None:
    """Its machine slept, and its locks lapsed as those of a network file system do."""
    root = tmp_path / "root"
    prepare(root, tiny_qwen)
    (root / "freeze" / "pushed-2").touch()
    frozen = start(root)
    os.waitpid(frozen.pid, os.WUNTRACED)
    (io_process,) = map(int, Path(f"/proc/{frozen.pid}/task/{frozen.pid}/children").read_text().split())
    os.kill(io_process, signal.SIGSTOP)
    for lock in (root / "runs").rglob("lock"):
        lock.unlink()
    run_to_the_end(root, starts=1)
    pushed = _lines(root / "pushed")
    for pid in (io_process, frozen.pid):
        os.kill(pid, signal.SIGCONT)
    assert frozen.wait(WAIT_S) == 1
    assert "was taken over by process" in (root / "log").read_text()
    assert _lines(root / "pushed") == pushed
    assert_same_training(root, reference)


def test_a_damaged_checkpoint_is_passed_over_and_the_log_makes_up_for_it(
    tiny_qwen: Path, tmp_path: Path, reference: Path
) -> None:
    root = tmp_path / "root"
    shutil.copytree(reference, root)
    job = (root / "job.toml").read_text().replace(str(reference), str(root))
    (root / "job.toml").write_text(job)
    weights = final(root) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\xff")
    run_to_the_end(root, starts=1)
    assert "checkpoint_damaged" in (root / "log").read_text()
    assert_same_training(root, reference)


def _named(path: Path) -> str:
    """Without what tells a draft from all others."""
    return re.sub("(?<=[0-9])-[0-9a-f]{8}$", "", path.name)


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []
