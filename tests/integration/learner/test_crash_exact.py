"""A learner killed at any point ends with the same weights, to the bit, as one that was never killed."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from benchmarks.faults.nursery import Child
from safetensors.numpy import load_file

from support import learner_process
from support.episodes import make_group
from support.launch import environment, fork, kill, torchrun
from swarmq.broker import topology
from swarmq.config import SwarmJob
from swarmq.learner.store import batch_log
from swarmq.messages import StepReport, decode
from swarmq.runtime.processes import find_free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]  # several learners, one after another

STEPS = 5
GROUPS_PER_BATCH = 2
WAIT_S = 600
"""For a learner, on a busy machine."""


CRITIC = {
    "advantage": "gae",
    "critic": {"learning_rate": 1e-2, "gae_lambda": 0.9, "warmup_steps": 1, "lora": {"rank": 4}},
}


def prepare(root: Path, model: Path, *, critic: bool = False) -> None:
    """A job, and a queue with exactly the episodes of all its steps and, for advantages that compare with the group, two groups without a
    signal."""
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
                        **(CRITIC if critic else {}),
                    },
                }
            },
        }
    )
    (root / "job.toml").write_text(job.to_toml())
    for number in range(STEPS * GROUPS_PER_BATCH + (0 if critic else 2)):
        equal = number in (3, 6)
        for episode in make_group(f"g{number}", (1.0, 1.0) if equal else (0.0, 1.0)):
            learner_process.put(root, topology.ready("r", "main"), episode)


def start(root: Path) -> Child:
    return fork((learner_process.__file__, "trainer", str(root)), root / "log")


def start_alone(root: Path) -> subprocess.Popen[bytes]:
    """As a process of the test's own, which notices when it stops."""
    with (root / "log").open("ab") as log_file:
        return subprocess.Popen(
            [sys.executable, learner_process.__file__, "trainer", str(root)],
            env=environment(),
            stdout=log_file,
            stderr=log_file,
        )


def run_to_the_end(root: Path, *, starts: int) -> None:
    """Start again after every death, as whoever supervises it does."""
    for _ in range(starts):
        if start(root).join(WAIT_S) == 0:
            return
    pytest.fail((root / "log").read_text())


def final(root: Path) -> Path:
    return root / "runs" / "r" / "main" / "checkpoints" / f"step-{STEPS:08d}"


def assert_same_training(root: Path, reference: Path, *, groups: int = STEPS * GROUPS_PER_BATCH + 2) -> None:
    ours, wanted = load_file(final(root) / "model.safetensors"), load_file(final(reference) / "model.safetensors")
    assert ours.keys() == wanted.keys()
    assert all(ours[name].tobytes() == wanted[name].tobytes() for name in wanted)
    records = list(batch_log.read_records(root / "runs" / "r" / "main" / "batches"))
    ids = [i for record in records for i in (*record.index.trained, *record.index.dropped)]
    assert sorted(ids) == sorted({*ids}), "an episode is in the log twice"
    assert len(ids) == 2 * groups
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


def test_a_critic_is_the_same_after_deaths(tiny_qwen: Path, tmp_path: Path) -> None:
    """Before the first checkpoint, in a step that trains the critic alone, and after one, in a step that both make."""
    for name, points in (("calm", ()), ("killed", ("push-1", "push-4"))):
        prepare(tmp_path / name, tiny_qwen, critic=True)
        for point in points:
            (tmp_path / name / "die" / point).touch()
        run_to_the_end(tmp_path / name, starts=1 + len(points))
    assert len((tmp_path / "killed" / "died").read_text().split()) == 2
    assert_same_training(tmp_path / "killed", tmp_path / "calm", groups=STEPS * GROUPS_PER_BATCH)
    ours, wanted = (torch.load(final(tmp_path / name) / "state" / "critic.bin") for name in ("killed", "calm"))
    assert ours["batches"] == wanted["batches"] == STEPS
    assert ours["weights"]["weight"].any()
    assert all(torch.equal(ours["weights"][name], weight) for name, weight in wanted["weights"].items())
    for index, moments in wanted["optimizer"]["state"].items():
        assert all(torch.equal(ours["optimizer"]["state"][index][name], each) for name, each in moments.items())


def test_dying_while_a_checkpoint_is_written_changes_nothing(tiny_qwen: Path, tmp_path: Path, reference: Path) -> None:
    root = tmp_path / "root"
    prepare(root, tiny_qwen)
    (root / "die" / "draft-4").touch()
    drafts = root / "runs" / "r" / "main" / "checkpoints"
    assert start(root).join(WAIT_S) == -signal.SIGKILL
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
    assert start(root).join(WAIT_S) == -signal.SIGKILL
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
        learner = start(root)
        while not learner.has_ended() and len(_lines(log_file)) <= kills:
            time.sleep(0.001)
        time.sleep(rng.random() * 0.1)
        kill(learner)
        learner.join(WAIT_S)
    run_to_the_end(root, starts=2)
    assert_same_training(root, reference)


def test_a_frozen_learner_that_wakes_after_another_took_its_place_does_no_harm(
    tiny_qwen: Path, tmp_path: Path, reference: Path
) -> None:
    """Its machine slept, and its locks lapsed as those of a network file system do."""
    root = tmp_path / "root"
    prepare(root, tiny_qwen)
    (root / "freeze" / "pushed-2").touch()
    frozen = start_alone(root)
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


@pytest.fixture(scope="module")
def two_hosts(tiny_qwen: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks that nobody disturbs."""
    root = tmp_path_factory.mktemp("two-hosts") / "root"
    prepare(root, tiny_qwen)
    assert run_on_hosts(root) == [0, 0], (root / "log").read_text()
    return root


def test_ranks_of_two_hosts_that_die_by_kill_change_nothing_whoever_starts_them_again(
    tiny_qwen: Path, tmp_path: Path, two_hosts: Path
) -> None:
    """First nobody starts the ranks again, then their launchers do."""
    root = tmp_path / "root"
    prepare(root, tiny_qwen)
    (root / "second" / "die").mkdir(parents=True)
    (root / "second" / "die" / "rank1-2").touch()
    assert 0 not in run_on_hosts(root)
    said = r"swarmq: rank 0 on .*no sign of life for 5 s of rank 1 on \S+ \(process \d+\)"
    assert re.search(said, (root / "log").read_text()), (root / "log").read_text()
    (root / "die" / "push-4").touch()
    assert run_on_hosts(root, restarts=1) == [0, 0], (root / "log").read_text()
    assert _lines(root / "second" / "died") == ["rank1-2"]
    assert _lines(root / "died") == ["push-4"]
    assert_same_training(root, two_hosts)
    assert {path.name for path in (root / "second").iterdir()} == {"die", "died", "log", "tmp"}


def test_ranks_in_two_network_namespaces_train_what_those_of_one_host_train(
    tiny_qwen: Path, tmp_path: Path, two_hosts: Path
) -> None:
    """Neither reaches the other's loopback, nor reads a file of the other."""
    root = tmp_path / "root"
    prepare(root, tiny_qwen)
    with two_namespaces() as (names, address):
        inside = [("ip", "netns", "exec", name) for name in names]
        assert run_on_hosts(root, inside=inside, address=address) == [0, 0], (root / "log").read_text()
    assert_same_training(root, two_hosts)


@contextlib.contextmanager
def two_namespaces() -> Iterator[tuple[list[str], str]]:
    """Two network namespaces with a link between them, and the address of the first."""
    names, net = [f"swarmq-{os.getpid()}-{host}" for host in range(2)], f"10.77.{os.getpid() % 256}"
    links = [f"sq{os.getpid()}-{host}" for host in range(2)]

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", links[0], "type", "veth", "peer", "name", links[1])
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces here, which need root and iproute2: {error}")
        for host, (name, link) in enumerate(zip(names, links, strict=True)):
            ip("link", "set", link, "netns", name)
            ip("-n", name, "addr", "add", f"{net}.{host + 1}/24", "dev", link)
            for each in ("lo", link):
                ip("-n", name, "link", "set", each, "up")
        yield names, f"{net}.1"
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def run_on_hosts(
    root: Path, *, restarts: int = 0, inside: Sequence[Sequence[str]] = ((), ()), address: str = "127.0.0.1"
) -> list[int]:
    """Start one rank on each of two hosts, the second with an empty folder, and return how their launchers ended.

    `inside`: command that runs others on each host.
    """
    port, started = find_free_port(), []
    for host, folder in enumerate((root, root / "second")):
        (folder / "tmp").mkdir(parents=True, exist_ok=True)
        launch = torchrun(host, port, address=address, restarts=restarts)
        with (folder / "log").open("ab") as log_file:
            started.append(
                subprocess.Popen(
                    [*inside[host], sys.executable, *launch, learner_process.__file__, "trainer", str(folder)],
                    env={**environment(), "TMPDIR": str(folder / "tmp")},
                    cwd=folder,
                    stdout=log_file,
                    stderr=log_file,
                )
            )
    try:
        return [each.wait(WAIT_S) for each in started]
    finally:
        for each in started:
            each.kill()


def _named(path: Path) -> str:
    """Without what tells a draft from all others."""
    return re.sub("(?<=[0-9])-[0-9a-f]{8}$", "", path.name)


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []
