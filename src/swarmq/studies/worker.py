"""`swarmq study worker`: runs trials of a study on this host, one at a time in each lane, which has GPUs of its own.

    trials, and those for this host alone --> offer held ─> claim ─> lease ─> trial's process, beats ─> end confirmed ─> ack
                              ├── this worker dies: RabbitMQ gives the offer to another one, whose claim waits until this one's beats
                              │   have been missing for `lease_s`
                              └── the broker is away for `lease_s`: the trial is ended here, because another worker may get it

The process of a trial dies with its worker. What it leaves behind (an engine, a broker) is found by an environment variable, and killed
when the trial's process has ended, or before the trial is started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from swarmq.broker import Broker, Delivery
from swarmq.errors import BrokerLostError, FilesDifferError, MessageError, StudyError, UnconfirmedError
from swarmq.messages import TrialOffer, new_id
from swarmq.runtime.files import write_atomically
from swarmq.runtime.logs import log
from swarmq.runtime.processes import die_with_parent, read_tail, stop_group
from swarmq.studies.changed_files import lay_over
from swarmq.studies.identity import TrialMaker
from swarmq.studies.ledger import StudyFolder, redact
from swarmq.studies.records import Spending, Trial, TrialFailed, TrialResult
from swarmq.studies.reports import (
    SOURCE,
    Beat,
    Claim,
    Greeting,
    LeaseVerdict,
    Report,
    hash_terms,
    inbox,
    offers,
    pack,
    run_of,
)
from swarmq.studies.study import Study
from swarmq.studies.trial import Attempt, Order, log_path, order_path, read_outcome, result_path

FOLDER_ENV = "SWARMQ_TRIAL_FOLDER"
"""Environment variable of all processes of a trial: the trial's folder."""
NOT_INHERITED = ("SWARMQ_SET", "SWARMQ_AMQP_URL")
"""Environment variables of a worker that would change what its trials do, although no hash of a trial contains them."""
BEATS_PER_LEASE = 6
TIMEOUT = "timeout"
ASK_S = 2.0
"""Seconds after which an unanswered or waiting claim is repeated."""
LOG_LINES = 40
GREET_S = 30.0
"""Seconds between two questions whether there is a leader, and after which a worker says that there is none."""
OWN_PREFETCH = 64
STOP_S = 30.0
"""Largest number of seconds in which a trial stops in order when its worker is stopped; its time limit holds, too."""


class LeaseAnswer(msgspec.Struct, frozen=True):
    verdict: LeaseVerdict
    fence: int


class LeaseAnswers:
    """The leader's newest answers to the claims of this worker, and whether the study has ended."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()
        self._newest: dict[str, LeaseAnswer | None] = {}
        self.stopped = asyncio.Event()

    async def follow(self, broker: Broker, run: str, *, ready: asyncio.Event) -> None:
        async with broker.events(run, senders=[SOURCE]) as events:
            ready.set()
            async for event in events:
                claim_id = event.fields["claim_id"]
                if not claim_id:
                    self.stopped.set()
                elif claim_id in self._newest:
                    self._newest[claim_id] = LeaseAnswer(event.fields["verdict"], event.fields["fence"])
                    self._changed.set()

    @contextlib.contextmanager
    def expect(self, claim_id: str) -> Iterator[None]:
        """Keep the answers to a claim inside the block."""
        self._newest[claim_id] = None
        try:
            yield
        finally:
            del self._newest[claim_id]

    async def wait(self, claim_id: str, seconds: float) -> LeaseAnswer | None:
        """Return the next answer to a claim; None if there is none within `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._newest[claim_id] is None:
                    self._changed.clear()
                    await self._changed.wait()
        answer, self._newest[claim_id] = self._newest[claim_id], None
        return answer

    def is_revoked(self, claim_id: str) -> bool:
        answer = self._newest[claim_id]
        return answer is not None and answer.verdict == "revoked"


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """One start of a trial under a lease."""

    trial: Trial
    claim: Claim
    fence: int
    folder: Path
    root: Path
    """Folder of the study file."""
    began: float
    """Time of the monotonic clock."""

    def fail(self, kind: Literal["failure", "timeout", "returned"], reason: str, cost: Spending) -> TrialFailed:
        return TrialFailed(
            trial_id=self.trial.id,
            fence=self.fence,
            kind=kind,
            reason=redact(reason, self.root),
            log=redact(read_tail(log_path(self.folder), LOG_LINES), self.root),
            cost=cost,
        )


def no_leader(name: str, where: str, seconds: float) -> str:
    """Say that a study has no leader."""
    return f"no leader of study {name} has answered for {seconds:.0f} s over RabbitMQ at {where}; start it on its host: `swarmq study run`"


class TrialWorker:
    """A worker of a study. `environments`: environment variables of the trials of each lane. `host`: name of this host, whose workers
    share the folders of trials. `where`: address of the broker, for messages."""

    def __init__(
        self,
        broker: Broker,
        study: Study,
        folder: StudyFolder,
        *,
        environments: Sequence[Mapping[str, str]],
        host: str = "",
        where: str = "the broker",
        ask_s: float = ASK_S,
        greet_s: float = GREET_S,
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._broker, self._study, self._folder, self._where = broker, study, folder, where
        self._environments, self._ask_s, self._greet_s, self._report = environments, ask_s, greet_s, report
        self._host = host or socket.gethostname().split(".")[0]
        self._answers = LeaseAnswers()
        self._own = asyncio.Queue[Delivery]()
        """Offers of trials for this host alone."""

    async def run(self) -> None:
        """Run trials until the study has ended, or until cancelled. Raises FilesDifferError if the files here are not those of the study."""
        ready, welcome = asyncio.Event(), asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            ended = tasks.create_task(self._answers.stopped.wait())
            ended.add_done_callback(lambda _: welcome.set())
            others = [
                tasks.create_task(self._answers.follow(self._broker, run_of(self._study.name), ready=ready)),
                tasks.create_task(self._greet(ready, welcome)),
                tasks.create_task(self._collect_own(welcome)),
            ]
            lanes = [tasks.create_task(self._serve(environment, welcome)) for environment in self._environments]
            await asyncio.wait([ended, *lanes], return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait(lanes)
            for task in (ended, *others):
                task.cancel()

    async def _greet(self, ready: asyncio.Event, welcome: asyncio.Event) -> None:
        """Ask again and again whether there is a leader, and say so while there is none."""
        await ready.wait()
        while True:
            greeting, began, is_missed = Greeting(claim_id=new_id(), host=self._host), time.monotonic(), False
            with self._answers.expect(greeting.claim_id):
                await self._send(greeting)  # it waits in the queue for a leader
                while await self._answers.wait(greeting.claim_id, self._greet_s) is None:
                    self._report(no_leader(self._study.name, self._where, time.monotonic() - began))
                    is_missed = True
                    await self._send(greeting)  # the answer may have been lost
            if is_missed:
                self._report(f"the leader of study {self._study.name} answers")
            welcome.set()
            await asyncio.sleep(self._greet_s)

    async def _collect_own(self, welcome: asyncio.Event) -> None:
        await welcome.wait()
        if self._answers.stopped.is_set():
            return
        async with self._broker.consume(offers(self._study.name, self._host), prefetch=OWN_PREFETCH) as deliveries:
            async for delivery in deliveries:
                self._own.put_nowait(delivery)

    async def _serve(self, environment: Mapping[str, str], welcome: asyncio.Event) -> None:
        """Run one trial after the other until the study has ended."""
        await welcome.wait()
        while (own := await self._serve_anyones(environment)) is not None:
            await self._take(own, environment)

    async def _serve_anyones(self, environment: Mapping[str, str]) -> Delivery | None:
        """Run trials that any host may run, until there is one for this host alone. Return its offer; None once the study has ended.

        The consumer is closed before a trial of this host runs, because it may hold an offer that another worker can take.
        """
        if not self._own.empty():
            return self._own.get_nowait()
        async with self._broker.consume(offers(self._study.name), prefetch=1) as deliveries:
            while True:
                own, anyones = await self._next(deliveries)
                if own or not anyones:
                    return own
                await self._take(anyones, environment)

    async def _next(self, deliveries: AsyncIterator[Delivery]) -> tuple[Delivery | None, Delivery | None]:
        """Wait for an offer, or for the end of the study. Return what is there: an offer for this host, one for any host."""
        own, anyones = asyncio.ensure_future(self._own.get()), asyncio.ensure_future(anext(deliveries))
        ended = asyncio.ensure_future(self._answers.stopped.wait())
        try:
            await asyncio.wait([own, anyones, ended], return_when=asyncio.FIRST_COMPLETED)
            return own.result() if own.done() else None, anyones.result() if anyones.done() else None
        finally:
            for future in (own, anyones, ended):
                future.cancel()

    async def _take(self, delivery: Delivery, environment: Mapping[str, str]) -> None:
        """Run the offered trial until the leader knows its end, and acknowledge the offer."""
        offer = delivery.message
        assert isinstance(offer, TrialOffer)
        trial = msgspec.json.decode(offer.body, type=Trial)
        maker = TrialMaker(self._study, self._folder.root)  # of the files as they are now
        terms = hash_terms(self._study, await asyncio.to_thread(maker.find_lineage, trial))
        problem = await asyncio.to_thread(maker.find_problem, trial)
        is_settled = False
        while not is_settled:
            claim = Claim(
                claim_id=new_id(),
                trial_id=trial.id,
                copy_id=offer.copy_id,
                worker=f"{self._host}:{os.getpid()}",
                terms=terms,
            )
            with self._answers.expect(claim.claim_id):
                fence = await self._claim(claim, problem)
                is_settled = fence is None or await self._run(trial, claim, fence, environment)
        with contextlib.suppress(BrokerLostError):  # it comes back, and the leader says that it is settled
            await delivery.ack()

    async def _claim(self, claim: Claim, problem: str) -> int | None:
        """Ask the leader until it decides; return the fencing token of the lease, or None if there is nothing to run. `problem`: why the
        files here make no such trial.

        Raises FilesDifferError if the files here are not those of the study.
        """
        while True:
            await self._send(claim)
            answer = await self._answers.wait(claim.claim_id, self._ask_s)
            match answer.verdict if answer else None:
                case "run" if answer:
                    return answer.fence
                case "wait":
                    await asyncio.sleep(self._ask_s)
                case "differs":
                    raise FilesDifferError(
                        f"trial {claim.trial_id[:12]}: the study file, job, code, tasks, model or swarmq's version in {self._folder.root} "
                        f"are not those of the study{problem and f' ({problem})'}; copy them from the leader's host, or amend the study there"
                    )
                case None:
                    pass
                case _:
                    return None

    async def _run(self, trial: Trial, claim: Claim, fence: int, environment: Mapping[str, str]) -> bool:
        """Run a trial under a lease, and report its end; return False if the lease was lost."""
        folder, root = self._folder.trial(trial.lineage), self._folder.root
        start = Start(trial=trial, claim=claim, fence=fence, folder=folder, root=root, began=time.monotonic())
        try:
            process = await self._start(start, environment)
        except OSError as error:  # a full disk, or no memory for a process
            await asyncio.sleep(self._ask_s)
            await self._send(start.fail("failure", f"the trial cannot be started: {error}", Spending()))
            return True
        self._report(f"{trial}: started")
        try:
            why = await self._watch(process, start)
        except asyncio.CancelledError:
            left_s = start.began + self._study.trial.max_seconds - time.monotonic()
            await _end(process, start.folder, grace_s=min(STOP_S, left_s))
            returned = start.fail("returned", "the worker was stopped", self._measure(start))
            await self._send(returned, deadline_s=self._ask_s)
            raise
        await _end(process, start.folder)
        cost = self._measure(start)
        if why == TIMEOUT:
            limit_s = self._study.trial.max_seconds
            await self._send(start.fail("timeout", f"killed after {limit_s:g} s, its trial.max_seconds", cost))
        elif why:
            self._report(f"{trial}: ended, because {why}")
            return False
        elif process.returncode:
            status = f"the trial's process has ended with status {process.returncode}"
            await self._send(start.fail("failure", status, cost))
        else:
            await self._send_result(start, cost)
        return True

    def _measure(self, start: Start) -> Spending:
        return Spending(gpu_seconds=round((time.monotonic() - start.began) * self._study.trial.gpus, 3))

    async def _send_result(self, start: Start, cost: Spending) -> None:
        """Report the trial's result, or a failure if there is none, or if the trial has spent more than it may."""
        plan = self._study.trial
        try:
            outcome = read_outcome(start.folder)
            cost = msgspec.structs.replace(cost, calls=outcome.calls, money=outcome.money)
            for name, spent, most in (("calls", cost.calls, plan.max_calls), ("money", cost.money, plan.max_money)):
                if spent > most:
                    raise StudyError(f"the trial has spent {spent:g} {name}, and trial.max_{name} is {most:g}")
            await self._send(
                TrialResult(
                    trial_id=start.trial.id,
                    fence=start.fence,
                    metrics=outcome.metrics,
                    curves=outcome.curves,
                    scores=outcome.scores,
                    cost=cost,
                )
            )
        except (StudyError, MessageError) as error:  # no result, or one that is larger than a message may be
            await self._send(start.fail("failure", str(error), cost))

    async def _start(self, start: Start, environment: Mapping[str, str]) -> asyncio.subprocess.Process:
        trial, folder = start.trial, start.folder
        attempt = Attempt(settings=trial.settings, seed=trial.seed, steps=trial.steps, folder=str(folder))
        order = Order(
            plan=self._study.trial,
            agent=trial.agent,
            tasks=trial.tasks,
            attempt=attempt,
            claim_id=start.claim.claim_id,
        )
        await asyncio.to_thread(_prepare, folder, order)
        root = await asyncio.to_thread(lay_over, self._folder, trial.files)
        with log_path(folder).open("ab") as sink:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "swarmq.studies.trial_process",
                str(folder),
                cwd=root,
                env={**_inherit(), **environment, FOLDER_ENV: str(folder)},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                preexec_fn=_die_at_once,
            )

    async def _watch(self, process: asyncio.subprocess.Process, start: Start) -> str:
        """Send beats until the process ends; return why it must be killed, or "" if it has ended by itself."""
        lease_s, claim_id = self._study.lease_s, start.claim.claim_id
        confirmed, ends_at = start.began, start.began + self._study.trial.max_seconds
        ended = asyncio.ensure_future(process.wait())
        try:
            while not ended.done():
                if (now := time.monotonic()) >= ends_at:
                    return TIMEOUT
                if now >= confirmed + lease_s:
                    return f"the broker was away for {lease_s:g} s"
                if self._answers.is_revoked(claim_id):
                    return "another worker has its lease"
                used_s = round(now - start.began, 3)
                beat = Beat(claim_id=claim_id, trial_id=start.trial.id, fence=start.fence, used_s=used_s)
                next_at = min(now + lease_s / BEATS_PER_LEASE, ends_at, confirmed + lease_s)
                if await self._send(beat, deadline_s=next_at - now):
                    confirmed = now
                await asyncio.wait([ended], timeout=max(next_at - time.monotonic(), 0))
            return ""
        finally:
            ended.cancel()

    async def _send(self, report: Report, *, deadline_s: float | None = None) -> bool:
        """Return whether the broker has confirmed the report."""
        try:
            await self._broker.publish(inbox(self._study.name), pack(self._study.name, report), deadline_s=deadline_s)
        except UnconfirmedError:
            return False
        return True


def _inherit() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}


def _die_at_once() -> None:
    die_with_parent(signal.SIGKILL)


async def _end(process: asyncio.subprocess.Process, folder: Path, *, grace_s: float = 0.0) -> None:
    """End a trial's process, and what it has started: the next trial needs its GPUs."""
    await stop_group(process, grace_s=grace_s)
    await asyncio.to_thread(end_leftovers, folder)


def _prepare(folder: Path, order: Order) -> None:
    """Make the folder of a trial ready for its next start."""
    end_leftovers(folder)
    folder.mkdir(parents=True, exist_ok=True)
    result_path(folder).unlink(missing_ok=True)
    write_atomically(order_path(folder), msgspec.json.encode(order))


def end_leftovers(folder: Path) -> None:
    """Kill processes of earlier starts of the trial on this host."""
    mark = f"{FOLDER_ENV}={folder}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                log.warning("leftover_killed", pid=int(entry.name), folder=str(folder))
                os.kill(int(entry.name), signal.SIGKILL)
