"""The course of a study with real processes of trials, on a broker in memory: ends, failures, limits, stops, and a leader that dies."""

import asyncio
import contextlib
import os
import re

import msgspec
import pytest

from support.studies import FIRST
from swarmq.errors import LearnerError, StudyError
from swarmq.runtime.processes import is_alive
from swarmq.studies.leader import open_leader
from swarmq.studies.ledger import StudyFolder, read_ledger
from swarmq.studies.records import (
    Spending,
    StudyOpened,
    StudyStopped,
    TrialFailed,
    TrialParked,
    TrialPlanned,
    TrialResult,
    TrialStarted,
)
from swarmq.studies.reports import KIND, Beat, Claim, hash_terms, inbox, pack, run_of
from swarmq.studies.state import AMENDED, REMOVED, StudyState
from swarmq.studies.study import Study
from swarmq.studies.trial import has_started
from swarmq.studies.worker import TrialWorker, end_leftovers
from swarmq.testing import MemoryBroker

pytestmark = pytest.mark.timeout(300)

SCORE = "def trial(attempt): return {'score': attempt.settings['arm'] + attempt.seed / 10}\n"
SLOW = """
import time
from pathlib import Path

def trial(attempt):
    Path(attempt.folder, "runs").touch()
    time.sleep(600)
"""
TWO_ARMS = {"seeds": [0], "lease_s": 60.0}


class Lab:
    """A study in a folder of the test, with its leader and workers in this process."""

    def __init__(self, folder, code, *, broker=None, **changes):
        self.study = msgspec.convert(FIRST | TWO_ARMS | changes, Study)
        self.folder = StudyFolder(folder / "study.toml", self.study.name)
        (folder / "work.py").write_text(code)
        self.broker, self.said = broker or MemoryBroker(), []

    async def lead(self, **how):
        with open_leader(self.study, self.folder, report=self.said.append) as leader:
            await leader.open(**how)
            await leader.run(self.broker)

    async def start(self, tasks, **how):
        """Start a leader; return its task once there are queues for workers."""
        leading = tasks.create_task(self.lead(**how))
        while not (leading.done() or await self.broker.depths([inbox(self.study.name)])):  # noqa: ASYNC110 - a broker
            await asyncio.sleep(0.01)
        return leading

    @contextlib.asynccontextmanager
    async def at_work(self):
        worker = TrialWorker(self.broker, self.study, self.folder, environments=[{}, {}], ask_s=0.2)
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(worker.run())
            yield task
            task.cancel()

    async def run(self):
        async with asyncio.TaskGroup() as tasks:
            leading = await self.start(tasks)
            async with self.at_work():
                await leading
        return self.facts()

    def facts(self, *kinds):
        return [entry.fact for entry in read_ledger(self.folder.ledger) if isinstance(entry.fact, kinds or object)]

    async def until(self, condition):
        async with asyncio.timeout(120):
            while not condition():  # noqa: ASYNC110 - a file
                await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def two_trials_without_leader(folder):
    """A study whose leader has died while two trials run, with its workers."""
    plan = FIRST["trial"] | {"max_seconds": 120}  # for a loaded machine
    lab = Lab(folder, "import time\n" + SCORE.replace("return", "time.sleep(1.0); return"), trial=plan)
    async with asyncio.TaskGroup() as tasks:
        first = await lab.start(tasks)
        async with lab.at_work():
            await lab.until(lambda: len(lab.facts(TrialStarted)) == 2)
            first.cancel()
            await asyncio.wait([first])
            yield lab


async def test_every_trial_has_one_result_and_the_study_ends(tmp_path):
    lab = Lab(tmp_path, SCORE)
    await lab.run()
    assert sorted(fact.metrics["score"] for fact in lab.facts(TrialResult)) == [1.0, 2.0]
    assert [fact.kind for fact in lab.facts(StudyStopped)] == ["complete"]
    lineages = {fact.trial.id: fact.trial.lineage for fact in lab.facts(TrialPlanned)}
    for started in lab.facts(TrialStarted):
        assert has_started(lab.folder.trial(lineages[started.trial_id]), started.claim_id)


async def test_the_power_is_said_once_the_noise_is_known(tmp_path):
    lab = Lab(tmp_path, SCORE, noise_trials=3)
    await lab.run()
    (said,) = [at for at, line in enumerate(lab.said) if "find an effect of 0.5 with probability" in line]
    assert sum(any(f"seed {n}:" in line for n in (1, 2, 3)) for line in lab.said[:said]) == 3


async def test_a_trial_inherits_no_settings_that_its_hash_does_not_contain(tmp_path, monkeypatch):
    monkeypatch.setenv("SWARMQ_SET", "policies.main.train.learning_rate=1")
    monkeypatch.setenv("SWARMQ_AMQP_URL", "amqp://another")
    lab = Lab(tmp_path, "import os\n" + SCORE.replace("attempt.seed / 10", "sum(x in os.environ for x in NAMES)"))
    with (tmp_path / "work.py").open("a") as file:
        file.write("NAMES = ('SWARMQ_SET', 'SWARMQ_AMQP_URL')\n")
    await lab.run()
    assert sorted(fact.metrics["score"] for fact in lab.facts(TrialResult)) == [1.0, 2.0]


async def test_a_trial_that_always_breaks_is_parked_with_its_log_and_the_rest_goes_on(tmp_path):
    lab = Lab(tmp_path, SCORE.replace("return", "return 1 / (attempt.settings['arm'] - 1) and"))
    await lab.run()
    assert [fact.kind for fact in lab.facts(TrialFailed)] == ["failure"] * 3
    (parked,) = lab.facts(TrialParked)
    assert "ZeroDivisionError" in parked.log
    assert lab.said[-1] == "stopped: all planned trials are settled, 1 of them without a result"
    assert 'File "STUDY/work.py", line 1' in parked.log
    assert str(tmp_path) not in lab.folder.ledger.read_text()
    assert [fact.metrics["score"] for fact in lab.facts(TrialResult)] == [2.0]


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("def trial(attempt): return {'other': 1.0}\n", "returned no 'score', only other"),
        ("def trial(attempt): return {'score': float('nan')}\n", "returned nan as 'score'"),
        (
            "from swarmq.studies.trial import TrialOutcome\n\ndef trial(attempt): return TrialOutcome(metrics={'score': 1.0}, calls=9)\n",
            "has spent 9 calls, and trial.max_calls is 0",
        ),
    ],
)
async def test_what_is_no_result_is_a_failure(tmp_path, code, why):
    lab = Lab(tmp_path, code, max_failures=1)
    await lab.run()
    assert not lab.facts(TrialResult)
    assert all(why in f"{fact.reason}\n{fact.log}" for fact in lab.facts(TrialParked))
    assert len(lab.facts(TrialParked)) == 2


async def test_a_trial_is_killed_at_its_time_limit_and_charged(tmp_path):
    lab = Lab(tmp_path, SLOW, trial=FIRST["trial"] | {"max_seconds": 0.5}, max_failures=1)
    await lab.run()
    assert [fact.kind for fact in lab.facts(TrialFailed)] == ["timeout"] * 2
    assert all(fact.cost.gpu_seconds >= 0.5 for fact in lab.facts(TrialFailed))


async def test_a_leader_that_dies_is_replaced_while_trials_run_and_nothing_is_run_again(tmp_path):
    async with two_trials_without_leader(tmp_path) as lab:
        await lab.lead()
    assert len(lab.facts(TrialStarted)) == 2
    assert len(lab.facts(TrialResult)) == 2


async def test_a_worker_that_is_stopped_gives_its_trial_back(tmp_path):
    lab = Lab(tmp_path, SLOW)
    async with asyncio.TaskGroup() as tasks:
        leading = await lab.start(tasks)
        async with lab.at_work():
            await lab.until(lambda: len([*lab.folder.path.glob("trials/*/runs")]) == 2)
        await lab.until(lambda: len(lab.facts(TrialFailed)) == 2)
        assert {fact.kind for fact in lab.facts(TrialFailed)} == {"returned"}
        leading.cancel()


async def test_a_stop_lets_running_trials_end_and_a_resumed_study_runs_the_rest(tmp_path):
    lab = Lab(tmp_path, "import time\n" + SCORE.replace("return", "time.sleep(1.0); return"), seeds=[0, 1, 2])
    async with asyncio.TaskGroup() as tasks:
        leading = await lab.start(tasks)
        async with lab.at_work():
            await lab.until(lambda: len(lab.facts(TrialStarted)) == 2)
            stop = StudyStopped(kind="asked", reason="enough")
            await lab.broker.publish(inbox(lab.study.name), pack(lab.study.name, stop))
            await leading
            assert len(lab.facts(TrialResult)) == 2
    async with asyncio.TaskGroup() as tasks:
        resumed = await lab.start(tasks, resume="more is needed")
        async with lab.at_work():
            await resumed
    assert len(lab.facts(TrialResult)) == 6
    assert [fact.kind for fact in lab.facts(StudyStopped)] == ["asked", "complete"]


async def test_a_full_disk_holds_the_study_up_and_loses_nothing(tmp_path, monkeypatch):
    lab, real, full = Lab(tmp_path, SCORE), os.pwrite, asyncio.Event()
    times = iter(range(3))

    def write(file, data, at):
        if b"result" in data and next(times, None) is not None:
            full.set()
            return real(file, data[:5], at)
        return real(file, data, at)

    monkeypatch.setattr(os, "pwrite", write)
    monkeypatch.setattr("swarmq.studies.leader.RETRY_S", 0.01)
    await lab.run()
    assert full.is_set()
    assert len(lab.facts(TrialResult)) == 2


async def test_a_worker_without_room_for_a_trial_fails_it_and_lives_on(tmp_path):
    lab = Lab(tmp_path, SCORE, max_failures=1)
    lab.folder.path.mkdir(parents=True)
    (lab.folder.path / "trials").write_text("a file where the folders of trials belong")
    await lab.run()
    assert len(lab.facts(TrialParked)) == 2
    assert all("cannot be started" in fact.reason for fact in lab.facts(TrialFailed))


async def test_files_that_are_not_those_of_the_study_end_a_worker_before_it_runs_anything(tmp_path):
    lab = Lab(tmp_path, SCORE)
    async with asyncio.TaskGroup() as tasks:
        leading = tasks.create_task(lab.lead())
        await lab.until(lambda: lab.folder.ledger.exists() and len(lab.facts()) == 3)
        (tmp_path / "work.py").write_text("def trial(attempt): return {'score': 100.0}\n")
        with pytest.RaisesGroup(StudyError, allow_unwrapped=False, flatten_subgroups=True):
            await TrialWorker(lab.broker, lab.study, lab.folder, environments=[{}]).run()
        leading.cancel()
    assert not lab.facts(TrialStarted)


async def test_large_files_are_hashed_beside_the_event_loop(tmp_path):
    os.mkfifo(pipe := tmp_path / "model")  # whoever reads it waits for the event loop to write it
    lab = Lab(tmp_path, SCORE, trial=FIRST["trial"] | {"code": ["model"]})

    async def write():
        while True:
            with contextlib.suppress(OSError):  # nobody reads it yet
                file = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
                try:
                    os.write(file, b"weights")
                finally:
                    os.close(file)
            await asyncio.sleep(0.01)

    with open_leader(lab.study, lab.folder) as leader:
        writing = asyncio.create_task(write())
        await leader.open()
        writing.cancel()
    assert lab.facts(StudyOpened)


async def test_a_changed_study_needs_a_reason_and_keeps_its_results(tmp_path):
    lab = Lab(tmp_path, SCORE)
    await lab.run()
    arms = lab.study.arms | {"c": {"settings": {"arm": 3}}}
    lab.study = msgspec.convert(FIRST | TWO_ARMS | {"arms": msgspec.to_builtins(arms)}, Study)
    with open_leader(lab.study, lab.folder) as leader:
        with pytest.raises(StudyError, match="the study file has changed since .* --amend REASON"):
            await leader.open()
        await leader.open(amend="c is worth a try")
        assert not leader.state.stopped
    await lab.run()
    state = StudyState(read_ledger(lab.folder.ledger))
    assert [one.trial.arm for one in state.trials.values()] == ["a", "b", "c"]
    assert len(lab.facts(TrialResult)) == 3


async def test_open_trials_of_code_that_was_amended_are_parked_and_planned_anew(tmp_path):
    lab = Lab(tmp_path, "def trial(attempt): return 1 / 0\n", max_failures=1)
    with open_leader(lab.study, lab.folder) as leader:
        await leader.open()
    first = asyncio.create_task(lab.lead())
    await lab.until(lambda: len(lab.facts(TrialPlanned)) == 2)  # and offered, to nobody
    first.cancel()
    await asyncio.wait([first])
    lab = Lab(tmp_path, SCORE, broker=lab.broker)
    async with asyncio.TaskGroup() as tasks:
        leading = await lab.start(tasks, amend="it divided by 0")
        async with lab.at_work():
            await leading
    assert [fact.reason for fact in lab.facts(TrialParked)] == [AMENDED] * 2
    assert sorted(fact.metrics["score"] for fact in lab.facts(TrialResult)) == [1.0, 2.0]
    assert [fact.kind for fact in lab.facts(StudyStopped)] == ["complete"]


async def test_an_arm_that_an_amendment_removes_is_not_run_until_another_one_takes_it_back(tmp_path):
    lab = Lab(tmp_path, SCORE)
    both = FIRST["arms"]

    def amend(arms):
        lab.study = msgspec.convert(FIRST | TWO_ARMS | {"arms": arms}, Study)

    first = asyncio.create_task(lab.lead())
    await lab.until(lambda: lab.folder.ledger.exists() and len(lab.facts(TrialPlanned)) == 2)  # and offered, to nobody
    first.cancel()
    await asyncio.wait([first])
    amend({"a": both["a"], "c": {"settings": {"arm": 3}}})
    async with asyncio.TaskGroup() as tasks:
        leading = await lab.start(tasks, amend="b is hopeless")
        async with lab.at_work():
            await leading
    assert [fact.reason for fact in lab.facts(TrialParked)] == [REMOVED]
    newest = StudyState(read_ledger(lab.folder.ledger)).newest
    assert {one.trial.arm for one in newest} == {"a", "c"}, "a report calls nothing a failure that was removed"
    assert sorted(fact.metrics["score"] for fact in lab.facts(TrialResult)) == [1.0, 3.0]
    amend(both)
    async with asyncio.TaskGroup() as tasks:
        leading = await lab.start(tasks, amend="it was not")
        async with lab.at_work():
            await leading
    assert sorted(fact.metrics["score"] for fact in lab.facts(TrialResult)) == [1.0, 2.0, 3.0]


async def test_an_amendment_names_no_metric_that_results_lack(tmp_path):
    lab = Lab(tmp_path, SCORE)
    await lab.run()
    lab.study = msgspec.convert(FIRST | TWO_ARMS | {"metric": {"name": "speed"}}, Study)
    with open_leader(lab.study, lab.folder) as leader:
        with pytest.raises(StudyError, match="metric.name: 2 results of the study have no 'speed'"):
            await leader.open(amend="speed counts")
        assert leader.state.study.metric.name == "score"


async def test_a_lease_that_nobody_holds_ends_also_while_others_talk(tmp_path):
    lab = Lab(tmp_path, SCORE, lease_s=0.1, seeds=[0])
    leading = asyncio.create_task(lab.lead())
    await lab.until(lambda: lab.folder.ledger.exists() and len(lab.facts(TrialPlanned)) == 2)
    one = lab.facts(TrialPlanned)[0].trial

    async def claim(trial, copy_id):
        terms = hash_terms(lab.study, trial.lineage)
        sent = Claim(claim_id=copy_id, trial_id=trial.id, copy_id=copy_id, worker="w", terms=terms)
        await lab.broker.publish(inbox(lab.study.name), pack(lab.study.name, sent))

    await claim(one, "lost with the broker's files")
    async with asyncio.timeout(60):
        while not lab.facts(TrialFailed):
            await claim(one, "superfluous")
            await asyncio.sleep(0.01)
    assert [(fact.kind, fact.trial_id) for fact in lab.facts(TrialFailed)] == [("lost", one.id)]
    leading.cancel()
    await asyncio.wait([leading])


async def test_the_time_of_a_leader_is_capped_also_if_no_worker_comes(tmp_path):
    short = FIRST["trial"] | {"max_seconds": 0.5}
    lab = Lab(tmp_path, SCORE, lease_s=0.1, trial=short, budget={"wall_clock_s": 2})
    async with asyncio.timeout(60):
        await lab.lead()
    (stopped,) = lab.facts(StudyStopped)
    assert (stopped.kind, stopped.reason.partition(":")[0]) == ("budget", "budget.wall_clock_s")


async def test_a_stopped_study_is_not_over_while_a_trial_runs_whose_result_is_to_come(tmp_path):
    async with two_trials_without_leader(tmp_path) as lab:
        with open_leader(lab.study, lab.folder) as leader:
            await leader.stop("enough")
            assert not leader.is_over
            await leader.run(lab.broker)
            assert leader.is_over
    assert len(lab.facts(TrialResult)) == 2


async def test_what_a_trial_has_started_ends_with_it(tmp_path):
    """The engine of a trial that was killed would hold the next one's GPU."""
    code = SLOW.replace(
        "    time.sleep",
        "    Path('child').write_text(str(subprocess.Popen(['sleep', '600'], start_new_session=True).pid))\n    time.sleep",
    )
    lab = Lab(
        tmp_path,
        "import subprocess\n" + code,
        trial=FIRST["trial"] | {"max_seconds": 10},  # on a loaded machine, Python starts in some of them
        design={"kind": "sequential"},
        budget={"trials": 1},
    )  # fmt: skip
    await lab.run()
    assert {fact.kind for fact in lab.facts(TrialFailed)} == {"timeout"}
    assert not is_alive(int((tmp_path / "child").read_text()))


async def test_a_stopped_worker_gives_its_trial_no_more_time_than_it_may_take(tmp_path):
    lab = Lab(
        tmp_path,
        "import signal\n" + SLOW.replace("    time.sleep", "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n    time.sleep"),
        trial=FIRST["trial"] | {"max_seconds": 4},
    )  # fmt: skip
    async with asyncio.TaskGroup() as tasks:
        leading = await lab.start(tasks)
        async with lab.at_work():
            await lab.until(lambda: len([*lab.folder.path.glob("trials/*/runs")]) == 2)
        await lab.until(lambda: len(lab.facts(TrialFailed)) == 2)
        leading.cancel()
    assert all(fact.cost.gpu_seconds < 20 for fact in lab.facts(TrialFailed)), "STOP_S would be 30"


async def test_a_worker_that_misses_the_end_of_a_study_is_told_again(tmp_path):
    lab, missed = Lab(tmp_path, SCORE), []
    emit = lab.broker.emit

    async def lose_the_first(event):
        if event.fields["verdict"] == "stop" and not missed:
            missed.append(event)
            return True
        return await emit(event)

    lab.broker.emit = lose_the_first
    worker = TrialWorker(lab.broker, lab.study, lab.folder, environments=[{}], ask_s=0.2)
    async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
        await lab.start(tasks)
        tasks.create_task(worker.run())
    assert missed


def test_a_second_leader_is_refused(tmp_path):
    lab = Lab(tmp_path, SCORE)
    with (
        open_leader(lab.study, lab.folder),
        pytest.raises(LearnerError, match="is in use by process"),
        open_leader(lab.study, lab.folder),
    ):
        pass


async def test_what_a_killed_start_of_a_trial_left_behind_is_ended(tmp_path):
    sleeper = await asyncio.create_subprocess_exec(
        "sleep", "600", env=os.environ | {"SWARMQ_TRIAL_FOLDER": str(tmp_path / "one")}
    )
    end_leftovers(tmp_path / "other")
    assert sleeper.returncode is None
    end_leftovers(tmp_path / "one")
    assert await sleeper.wait() == -9


async def test_a_worker_says_that_there_is_no_leader_and_that_there_is_one_again(tmp_path):
    lab, said = Lab(tmp_path, SCORE), []
    await lab.broker.declare("study-first", policies=[], kinds=["trials"])  # a leader was there once
    worker = TrialWorker(
        lab.broker, lab.study, lab.folder, environments=[{}], where="mq:5672", greet_s=0.05, report=said.append
    )
    async with asyncio.TaskGroup() as tasks:
        working = tasks.create_task(worker.run())
        await lab.until(lambda: said)
        assert re.fullmatch(
            r"no leader of study first has answered for \d+ s over RabbitMQ at mq:5672; .*`swarmq study run`", said[0]
        )
        await lab.lead()
        await working
    assert "the leader of study first answers" in said


RESUMED = """
from pathlib import Path

def trial(attempt):
    state, left = Path(attempt.folder, "state"), Path("hold").exists() and attempt.steps == 2
    made = len(state.read_text()) if state.exists() else 0
    if left:
        Path("held").touch()
        __import__("time").sleep(600)
    state.write_text("x" * attempt.steps)
    return {"score": float(attempt.settings["arm"]), "made_before": float(made)}
"""
RUNGS = {"design": {"kind": "asha", "rungs": [1, 2], "keep": 0.5}, "lease_s": 0.5}


@contextlib.asynccontextmanager
async def hosts_at_work(lab, *names):
    """Workers of hosts that share no folder."""
    async with asyncio.TaskGroup() as tasks:
        working = {}
        for name in names:
            folder = StudyFolder(lab.folder.root / "study.toml", lab.study.name, path=lab.folder.root / name)
            worker = TrialWorker(lab.broker, lab.study, folder, environments=[{}], host=name, ask_s=0.1, greet_s=0.5)
            working[name] = tasks.create_task(worker.run())
        yield working
        for task in working.values():
            task.cancel()


async def test_a_promoted_trial_goes_to_the_host_that_has_its_checkpoint(tmp_path):
    lab = Lab(tmp_path, RESUMED, seeds=[0, 1], **{**RUNGS, "lease_s": 60.0})
    async with asyncio.TaskGroup() as tasks:
        leading = await lab.start(tasks)
        async with hosts_at_work(lab, "one", "two"):
            await leading
    promoted = {fact.trial.id: fact.trial.lineage for fact in lab.facts(TrialPlanned) if fact.trial.rung}
    assert len(promoted) == 4, "the best arm and the baseline, with two seeds each"
    hosts = {fact.trial_id: fact.worker.partition(":")[0] for fact in lab.facts(TrialStarted)}
    first = {fact.trial.lineage: hosts[fact.trial.id] for fact in lab.facts(TrialPlanned) if not fact.trial.rung}
    assert set(first.values()) == {"one", "two"}
    assert {one: hosts[one] for one in promoted} == {one: first[lineage] for one, lineage in promoted.items()}
    made = {fact.metrics["made_before"] for fact in lab.facts(TrialResult) if fact.trial_id in promoted}
    assert made == {1.0}, "the first step was not repeated"


async def test_a_promoted_trial_whose_host_is_gone_begins_again_on_another_and_the_leader_says_so(tmp_path):
    lab = Lab(tmp_path, RESUMED, seeds=[0], **RUNGS)
    (tmp_path / "hold").touch()
    async with asyncio.TaskGroup() as tasks:
        leading = await lab.start(tasks)
        async with hosts_at_work(lab, "one"):
            await lab.until((tmp_path / "held").exists)
        (tmp_path / "hold").unlink()
        async with hosts_at_work(lab, "two"):
            await leading
    assert any("one has its checkpoint and no worker; it begins again elsewhere" in line for line in lab.said), lab.said
    made = [fact.metrics["made_before"] for fact in lab.facts(TrialResult)]
    assert made == [0.0] * 4
    assert [fact.kind for fact in lab.facts(StudyStopped)] == ["complete"]


async def test_an_invited_host_decides_nothing(tmp_path):
    lab = Lab(tmp_path, SCORE)
    stop = pack(lab.study.name, StudyStopped(kind="asked", reason="mischief"))
    with open_leader(lab.study, lab.folder) as leader:
        await leader.open()
        await leader._hear(stop, by_host="gpu2")
        assert not leader.state.stopped
        await leader._hear(stop, by_host="")
        assert leader.state.stopped


async def test_an_invited_host_reports_its_own_trials_alone(tmp_path):
    lab = Lab(tmp_path, SCORE)
    with open_leader(lab.study, lab.folder) as leader:
        await leader.open()
        leader._broker = lab.broker
        await lab.broker.declare(run_of(lab.study.name), policies=[], kinds=[KIND])
        await leader._advance()
        one = next(iter(leader.state.trials.values()))
        terms = hash_terms(lab.study, one.trial.lineage)

        async def hear(report, host):
            await leader._hear(pack(lab.study.name, report), by_host=host)

        def claim(worker):
            return Claim(claim_id=f"of {worker}", trial_id=one.trial.id, copy_id="o", worker=worker, terms=terms)

        await hear(claim("gpu3:1"), "gpu2")
        assert not one.lease
        await hear(claim("gpu3:1"), "gpu3")
        assert one.lease
        assert one.lease.worker == "gpu3:1"
        forged = TrialResult(trial_id=one.trial.id, fence=one.fence, metrics={"score": 99.0}, cost=Spending())
        await hear(forged, "gpu2")
        assert not one.result
        old = Beat(claim_id="old", trial_id=one.trial.id, fence=one.fence - 1, used_s=1.0)
        await hear(old, "gpu2")
        assert lab.broker.emitted[-1].fields["verdict"] == "revoked", "a host that lost its lease is told so"
        await hear(forged, "gpu3")
        assert one.result
