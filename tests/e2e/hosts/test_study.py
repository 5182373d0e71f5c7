"""Workers that join a study from hosts with neither its disk nor its loopback; one of them is cut off during a trial, another one killed."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

import pytest
import tomli_w
from benchmarks.hosts.machines import DISK, Machine, Switch, why_not

from support.studies import FIRST
from support.tls import self_signed
from swarmq.studies.ledger import StudyFolder, read_ledger
from swarmq.studies.records import AnyFact, Entry, StudyStopped, TrialFailed, TrialResult, TrialStarted, host_of

pytestmark = [
    pytest.mark.broker,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]
STUDY = f"{DISK}/study"
LEASE_S = 5.0
TRIAL = f"""
import time
from pathlib import Path

def trial(attempt):
    Path("{DISK}/started").touch()
    while not Path("{DISK}/go").exists():
        time.sleep(0.05)
    return {{"score": attempt.settings["arm"]}}
"""


class StudyOnHosts:
    """A study on the host `leader`, and hosts that have an invite alone."""

    def __init__(self, switch: Switch, stack: contextlib.ExitStack) -> None:
        self.leader, self.gpu2, self.gpu3 = (
            stack.enter_context(switch.machine(name)) for name in ("leader", "gpu2", "gpu3")
        )
        root = self.leader.path(STUDY)
        root.mkdir()
        self_signed(root, self.leader.address)
        (root / "work.py").write_text(TRIAL)
        plan = FIRST["trial"] | {"max_seconds": 600}
        study = FIRST | {"trial": plan, "seeds": [0], "lease_s": LEASE_S, "budget": {"gpu_seconds": 1e6}}
        (root / "study.toml").write_text(tomli_w.dumps(study))
        self._ledger = StudyFolder(root / "study.toml", study["name"]).ledger
        opened = "--tls-port 5671 --certificate cert.pem --key key.pem"
        self.leader.boot(
            {"leader": ["sh", "-c", f"cd {STUDY}; {study_command(f'run --workers 0 {opened}')}; sleep 999"]}
        )
        self.wait_until((self._ledger.parent / "endpoint").exists)

    def join(self, machine: Machine) -> None:
        reach = f"--amqp 'amqps://{self.leader.address}:5671/?heartbeat=2' --ca cert.pem"
        asked = study_command(f"invite study.toml {machine.name} {reach}")
        machine.path(f"{DISK}/invite").write_text(self.leader.run(["sh", "-c", f"cd {STUDY}; {asked}"]))
        machine.boot({"worker": ["sh", "-c", f"cd {DISK}; {study_command('worker --join invite')}"]})

    def wait_for_trial(self, machine: Machine) -> None:
        self.wait_until((machine.path(DISK) / "started").exists)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 600
        while not condition():
            assert time.monotonic() < deadline, "\n".join(one.logs() for one in (self.leader, self.gpu2, self.gpu3))
            time.sleep(0.1)

    def entries(self, kind: type[AnyFact]) -> list[Entry]:
        return [entry for entry in read_ledger(self._ledger) if isinstance(entry.fact, kind)]


def study_command(words: str) -> str:
    return f"{sys.executable} -m swarmq study {words}"


@pytest.fixture
def study() -> Iterator[StudyOnHosts]:
    with contextlib.ExitStack() as stack:
        yield StudyOnHosts(stack.enter_context(Switch()), stack)


def test_trials_of_hosts_that_are_cut_off_and_killed_run_elsewhere_and_have_one_result_each(
    study: StudyOnHosts,
) -> None:
    study.join(study.gpu2)
    study.wait_for_trial(study.gpu2)
    study.gpu2.cut_off()
    study.join(study.gpu3)
    study.wait_for_trial(study.gpu3)
    study.gpu3.kill()
    study.gpu3.path(f"{DISK}/go").touch()
    study.gpu3.boot()
    study.wait_until(lambda: bool(study.entries(StudyStopped)))
    (stopped,), lost = study.entries(StudyStopped), study.entries(TrialFailed)
    assert stopped.fact.kind == "complete"
    assert {entry.fact.kind for entry in lost} == {"lost"}
    hosts = {entry.number: host_of(entry.fact.worker) for entry in study.entries(TrialStarted)}
    assert {hosts[entry.fact.fence] for entry in lost} == {"gpu2", "gpu3"}
    results = [entry.fact for entry in study.entries(TrialResult)]
    assert sorted(result.metrics["score"] for result in results) == [1.0, 2.0]
    assert {hosts[result.fence] for result in results} == {"gpu3"}
    study.wait_until(
        lambda: "ended, because the broker was away for 5 s" in study.gpu2.logs()
    )  # else two hosts ran one trial
