"""`swarmq study run`: the leader plans trials, leases them to workers, and writes the ledger. It can die at any moment: all it knows
is in the ledger, and the next leader continues from there.

    ledger ──> state ──> design ──> new facts ──> ledger ──> offers ──> workers
                 ^                                               │ reports (one queue, in order, acknowledged once the ledger has them)
                 └── facts ── decide ──────── the leader <───────┘ ──> event "lease"

A report that arrives again, because the leader died before it acknowledged it, decides nothing new. A leader that cannot know which
trials were offered offers them again; the claims of superfluous offers are answered with `drop`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from swarmq.broker import Broker, topology
from swarmq.errors import BrokerLostError, MessageError, StudyError
from swarmq.learner.store.writer_lock import hold_lock
from swarmq.messages import Event, TrialOffer, TrialReport, new_id
from swarmq.runtime.logs import log
from swarmq.runtime.wording import count_of
from swarmq.studies.decide import on_claim, on_end, on_loss
from swarmq.studies.design import choose_arms, look_next, plan_next
from swarmq.studies.identity import TrialMaker
from swarmq.studies.ledger import LedgerFile, StudyFolder
from swarmq.studies.records import (
    AnyFact,
    Looked,
    PlannerDecided,
    Promoted,
    Spending,
    StudyAmended,
    StudyOpened,
    StudyResumed,
    StudyStopped,
    Trial,
    TrialFailed,
    TrialParked,
    TrialResult,
    host_of,
)
from swarmq.studies.reports import (
    KIND,
    LEASE_EVENT,
    SOURCE,
    Beat,
    Claim,
    FileWanted,
    Greeting,
    LeaseVerdict,
    Report,
    inbox,
    kind_of,
    offers,
    run_of,
    unpack,
)
from swarmq.studies.shared_files import FileServer
from swarmq.studies.state import AMENDED, REMOVED, StudyState, TrialState, find_exceeded
from swarmq.studies.study import Study, hash_study

MAX_OFFERS = 16
"""Number of trials that are offered at once, so that a design may still decide which come next."""
VANISHED_LEASES = 10
"""Number of lease times without a sign of life after which a trial is offered again even if nobody else has claimed it: its offer
must have vanished with the broker's files."""
DISMISS_S = 10.0
"""Largest number of seconds in which a leader waits for workers to go."""
RETRY_S = 1.0
"""Seconds between two attempts to write to a full disk."""


class Heard(msgspec.Struct):
    """The last sign of life of a lease's holder. Times are of the monotonic clock."""

    at: float
    used_s: float | None = None
    """Seconds of the trial at that time; None: unknown since the leader started."""
    contested_at: float | None = None
    """Time since which another worker claims the trial and the holder has been silent."""


@contextlib.contextmanager
def open_leader(
    study: Study, folder: StudyFolder, *, report: Callable[[str], None] = lambda _: None
) -> Iterator[Leader]:
    """Open the ledger for writing. Raises LearnerError if another process leads the study, StudyError for a damaged ledger."""
    with hold_lock(folder.lock):
        ledger = LedgerFile(folder.ledger)
        try:
            yield Leader(study, folder, ledger, report=report)
        finally:
            ledger.close()


class Leader:
    """The leader of a study, whose ledger nobody else writes."""

    _broker: Broker

    def __init__(
        self, study: Study, folder: StudyFolder, ledger: LedgerFile, *, report: Callable[[str], None] = lambda _: None
    ) -> None:
        self._study, self._ledger, self._report = study, ledger, report
        self._maker, self._root = TrialMaker(study, folder.root), folder.root
        self.state = StudyState(ledger.entries)
        self._files = FileServer(self._maker)
        self._offered: dict[str, str] = {}
        """Trial that was offered -> host whose workers alone got the offer, or "" for all workers."""
        self._heard: dict[str, Heard] = {}

    @property
    def is_over(self) -> bool:
        """Whether the study has ended and no trial runs."""
        return self.state.stopped is not None and not self.state.leased

    async def run(self, broker: Broker) -> None:
        """Lead the study until it has ended and no trial runs."""
        self._broker = broker
        self._ledger.keep_time()
        run = run_of(self._study.name)
        await self._broker.declare(run, policies=[], kinds=[KIND])
        await self._advance()
        async with self._broker.consume(inbox(self._study.name), prefetch=64) as deliveries:
            check_at = time.monotonic() + self._study.lease_s
            while not self.is_over:
                if time.monotonic() >= check_at:
                    check_at = time.monotonic() + self._study.lease_s
                    self._ledger.keep_time()
                    await self._end_vanished()
                    continue
                try:
                    async with asyncio.timeout(check_at - time.monotonic()):
                        delivery = await anext(deliveries)
                except TimeoutError:
                    continue
                if isinstance(delivery.message, TrialReport):
                    await self._hear(delivery.message, by_host=topology.parse_host(delivery.arrival.sender))
                with contextlib.suppress(BrokerLostError):  # it comes again, and decides nothing new
                    await delivery.ack()
        await self._dismiss_workers()

    async def _dismiss_workers(self) -> None:
        """Tell the workers that the study has ended until they have gone: events may be lost, and the broker may end with this leader."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DISMISS_S):
                await self._tell("", "stop", 0)
                while await self._has_workers():
                    await asyncio.sleep(DISMISS_S / 20)
                    await self._tell("", "stop", 0)

    async def open(self, *, amend: str = "", resume: str = "") -> None:
        """Open the study, or check that it is the one that was opened. `amend`: reason of a change. Raises StudyError."""
        digest, inputs = hash_study(self._study), await asyncio.to_thread(self._maker.hash_inputs)
        metric = self._study.metric.name
        if self.state.study is None:
            await self._append([StudyOpened(study=self._study, digest=digest, inputs=inputs)])
        elif (hash_study(self.state.study), self.state.inputs) != (
            digest,
            inputs,
        ):  # a newer swarmq may know more settings
            if not amend:
                what = (
                    "the study file"
                    if hash_study(self.state.study) != digest
                    else "the job, code, tasks or model of an arm, or swarmq's version,"
                )
                raise StudyError(
                    f"{what} has changed since the study {self._study.name} was opened; say why with --amend REASON, or fork the study"
                )
            lacking = [one for one in self.state.trials.values() if one.result and metric not in one.result.metrics]
            if lacking:
                raise StudyError(
                    f"metric.name: {len(lacking)} results of the study have no {metric!r}; name a metric that they have, or fork the study"
                )
            await self._append([StudyAmended(study=self._study, digest=digest, inputs=inputs, reason=amend)])
        if self.state.stopped and (amend or resume):
            await self._append([StudyResumed(reason=amend or resume)])

    async def stop(self, reason: str) -> None:
        """Record that no further trial starts."""
        if self.state.study is None:
            raise StudyError("the study has not been opened, so there is nothing to stop")
        if not self.state.stopped:
            await self._append([StudyStopped(kind="asked", reason=reason)])

    async def _hear(self, message: TrialReport, *, by_host: str) -> None:
        """Act as a report says. `by_host`: the invited host that sent it, which speaks for its own workers alone."""
        try:
            report = unpack(message)
        except MessageError as error:
            log.warning("report_refused", reason=str(error))
            return
        if by_host and not self._may_report(report, by_host):
            log.warning("report_refused", reason=f"host {by_host} may report its own trials and decide nothing")
            return
        match report:
            case Greeting():
                await self._broker.declare(run_of(self._study.name), policies=[], kinds=[KIND, kind_of(report.host)])
                await self._tell(report.claim_id, "welcome", 0)
            case FileWanted():
                trials = [one.trial for one in self.state.trials.values()]
                await self._broker.emit(await asyncio.to_thread(self._files.answer, report, self._study, trials))
            case Claim():
                await self._end_if_lost(report)
                await self._park_outdated()  # one that ran when the study was amended
                decision = on_claim(self.state, report, elapsed_s=self._ledger.elapsed_s)
                await self._append(decision.facts)
                self._offered.setdefault(report.trial_id, "")
                one = self.state.trials.get(report.trial_id)
                if decision.verdict == "run" and one is not None:
                    self._heard.setdefault(report.claim_id, Heard(time.monotonic()))
                if decision.verdict == "stop":
                    self._offered.pop(report.trial_id, None)
                await self._tell(report.claim_id, decision.verdict or "drop", one.fence if one else 0)
            case Beat():
                one = self.state.trials.get(report.trial_id)
                if one is None or one.lease is None or one.fence != report.fence:
                    await self._tell(report.claim_id, "revoked", report.fence)
                else:
                    self._heard[report.claim_id] = Heard(time.monotonic(), report.used_s)
            case TrialResult() | TrialFailed():
                await self._append(on_end(self.state, report).facts)
                one = self.state.trials.get(report.trial_id)
                if isinstance(report, TrialFailed) and one is not None and one.lease is None:
                    self._offered.pop(report.trial_id, None)
                if one is not None and one.trial.purpose == "noise":
                    await self._report_power()
                await self._advance()
            case StudyStopped():
                if not self.state.stopped:
                    await self._append([report])
            case PlannerDecided():
                with contextlib.suppress(StudyError):  # the command has checked it; it was decided since
                    await self.decide(report)
                await self._advance()

    async def _report_power(self) -> None:
        """Say what the study can find once its last A/A trial has ended, before the comparison is paid for."""
        if all(one.is_settled for one in self.state.trials.values() if one.trial.purpose == "noise"):
            with contextlib.suppress(ModuleNotFoundError):  # the extra `studies`
                from swarmq.studies.analysis import announce_power  # noqa: PLC0415 - an extra

                self._report(await asyncio.to_thread(announce_power, self._study, self.state.results))

    def _may_report(self, report: Report, host: str) -> bool:
        """Return whether a report of an invited host is about its own workers."""
        match report:
            case Greeting():
                return report.host == host
            case Claim():
                return host_of(report.worker) == host
            case Beat() | TrialResult() | TrialFailed():
                one = self.state.trials.get(report.trial_id)
                # reports under an older lease are answered, and change nothing
                return (
                    one is None or one.lease is None or one.fence != report.fence or host_of(one.lease.worker) == host
                )
            case FileWanted():
                return True
            case StudyStopped() | PlannerDecided():
                return False

    async def _end_if_lost(self, claim: Claim) -> None:
        """End the lease of a trial whose offer has come to another worker, if the holder has been silent for `lease_s` since."""
        one = self.state.trials.get(claim.trial_id)
        if (
            one is None
            or one.lease is None
            or one.lease.claim_id == claim.claim_id
            or one.lease.copy_id != claim.copy_id
        ):
            return
        heard, now = self._heard.setdefault(one.lease.claim_id, Heard(time.monotonic())), time.monotonic()
        if heard.contested_at is None:
            heard.contested_at = now
        if now - heard.contested_at >= self._study.lease_s:
            await self._append(on_loss(one, self._bound_loss(one, heard)))

    async def _end_vanished(self) -> None:
        """End leases whose holders have been silent for very long, and offer their trials again; end a study that can start none of
        its trials any more, also if no worker asks."""
        for one in self.state.leased:
            assert one.lease is not None
            heard = self._heard.setdefault(one.lease.claim_id, Heard(time.monotonic()))
            if time.monotonic() - heard.at >= VANISHED_LEASES * self._study.lease_s:
                await self._append(on_loss(one, self._bound_loss(one, heard)))
                self._offered.pop(one.trial.id, None)
        for one in self.state.open:
            host = self._offered.get(one.trial.id)
            if host and not await self._has_workers(host):
                self._report(f"{one.trial}: {host} has its checkpoint and no worker; it begins again elsewhere")
                await self._offer(one.trial, "")
        why = find_exceeded(self.state, elapsed_s=self._ledger.elapsed_s)
        if why and not (self.state.stopped or self.state.leased):
            await self._append([StudyStopped(kind="budget", reason=why)])
        await self._advance()

    def _bound_loss(self, one: TrialState, heard: Heard) -> Spending:
        """Return the most that a silent worker can have spent: it ends its trial `lease_s` after the last beat that was confirmed."""
        assert one.lease is not None
        if heard.used_s is None:
            return one.lease.reserved
        seconds = heard.used_s + self._study.lease_s
        bound = min(seconds * self._study.trial.gpus, one.lease.reserved.gpu_seconds)
        return msgspec.structs.replace(one.lease.reserved, gpu_seconds=round(bound, 3))

    async def _advance(self) -> None:
        """Plan what comes next, offer it, and end a study that is complete."""
        if not self.state.stopped:
            await self._park_outdated()
            await self._append(look_next(self.state))
        if not self.state.stopped:
            await self._plan()
            if self._is_settled():
                await self._ask_planner()
            if self._is_settled() and not self.state.waiting:
                parked = sum(one.parked is not None for one in self.state.newest)
                without = f", {parked} of them without a result" if parked else ""
                await self._append([StudyStopped(kind="complete", reason=f"all planned trials are settled{without}")])
        if self.state.stopped:
            return
        room = MAX_OFFERS - sum(one.trial.id in self._offered for one in self.state.open)
        for one in [one for one in self.state.open if one.trial.id not in self._offered][: max(room, 0)]:
            await self._offer(one.trial, await self._find_host(one.trial))

    async def _plan(self) -> None:
        """Plan what the design adds now. Files are hashed in a thread: a model takes longer than a broker waits for heartbeats."""
        await self._append(await asyncio.to_thread(plan_next, self.state, self._maker.make))

    async def _find_host(self, trial: Trial) -> str:
        """Return the host that has the checkpoint from which a promoted trial continues, or "" if no worker is there."""
        host = self.state.hosts.get(trial.lineage, "") if trial.rung else ""
        return host if host and await self._has_workers(host) else ""

    async def _has_workers(self, host: str = "") -> bool:
        depths = await self._broker.depths([queue := offers(self._study.name, host)])
        return queue in depths and depths[queue].consumers > 0

    async def _offer(self, trial: Trial, host: str) -> None:
        self._offered[trial.id] = host
        offer = TrialOffer(run=run_of(self._study.name), copy_id=new_id(), body=msgspec.json.encode(trial))
        await self._broker.publish(offers(self._study.name, host), offer)

    async def _park_outdated(self) -> None:
        """Park open trials that the study as amended does not run."""
        await self._append(await asyncio.to_thread(self._list_outdated))

    def _list_outdated(self) -> list[TrialParked]:
        found = [(one.trial.id, self._find_outdated(one.trial)) for one in self.state.open]
        return [TrialParked(trial_id=trial_id, reason=why) for trial_id, why in found if why]

    def _find_outdated(self, trial: Trial) -> str:
        """Return why the study as amended does not run a trial, or "" if it does."""
        if self._maker.find_lineage(trial) != trial.lineage:
            return AMENDED
        design, arms = self._study.design, choose_arms(self._study) | self.state.added_arms
        if trial.purpose == "compare" and trial.seed not in self._study.seeds:
            return REMOVED
        if design.kind == "optuna":  # its arms are in the ledger alone
            return ""
        if trial.arm not in arms or trial.rung >= max(len(design.rungs), 1):
            return REMOVED
        planned = self._maker.make(trial.arm, arms[trial.arm], trial.seed, rung=trial.rung, purpose=trial.purpose)
        return "" if planned.id == trial.id else REMOVED

    def _is_settled(self) -> bool:
        return all(one.is_settled for one in self.state.trials.values())

    async def _ask_planner(self) -> None:
        """Ask the planner until it has added an arm, or one waits for a person, or it may not be asked again."""
        if self._study.planner.kind != "endpoint":
            return
        from swarmq.studies import planner  # noqa: PLC0415 - an extra

        while self._is_settled() and not self.state.waiting:
            if self.state.answer is None:
                if (asked := planner.prepare(self.state, self._root)) is None:
                    return
                await self._append([asked])
                await self._append([await asyncio.to_thread(planner.ask, self._study, asked)])
            await self._append(await asyncio.to_thread(planner.judge, self.state, self._maker.make, self._root))
            await self._plan()

    async def decide(self, decided: PlannerDecided) -> None:
        """Record a person's decision on an arm that waits. Raises StudyError if it does not wait."""
        if decided.arm not in self.state.waiting:
            raise StudyError(
                f"{decided.arm!r} does not wait for a decision; waiting: {', '.join(self.state.waiting) or 'none'}"
            )
        proposal = self.state.proposed[decided.arm]
        await self._append(
            [
                msgspec.structs.replace(
                    proposal, decision=decided.decision, by=decided.by, reason=decided.reason or proposal.reason
                )
            ]
        )

    async def _append(self, facts: Sequence[AnyFact]) -> None:
        """Write facts to the ledger, then act as they say. Waits while the disk is full."""
        if not facts:
            return
        is_reported = False
        while True:
            try:
                entries = self._ledger.append(facts)
                break
            except OSError as error:
                if not is_reported:
                    self._report(f"the ledger cannot be written ({error.strerror}); waiting, nothing is lost")
                is_reported = True
                await asyncio.sleep(RETRY_S)
        for entry in entries:
            self.state.apply(entry)
            if line := describe(entry.fact, self.state):
                self._report(line)

    async def _tell(self, claim_id: str, verdict: LeaseVerdict, fence: int) -> None:
        fields = {"claim_id": claim_id, "verdict": verdict, "fence": fence}
        await self._broker.emit(
            Event(run=run_of(self._study.name), source=SOURCE, name=LEASE_EVENT, at=time.time(), fields=fields)
        )


def describe(fact: AnyFact, state: StudyState) -> str:
    """Return the line by which a fact is shown, or "" for one that is not."""

    def trial(trial_id: str) -> Trial:
        return state.trials[trial_id].trial

    match fact:
        case TrialResult(metrics=metrics):
            value = metrics[state.study.metric.name] if state.study else 0.0
            done = sum(one.result is not None for one in state.trials.values())
            return f"{trial(fact.trial_id)}: {value:g} ({done} of {count_of(len(state.trials), 'trial')})"
        case TrialFailed():
            last = fact.log.strip().rpartition("\n")[2].strip()
            return f"{trial(fact.trial_id)}: {fact.kind}, {fact.reason}" + (f": {last}" if last else "")
        case TrialParked():
            return f"{trial(fact.trial_id)}: parked, {fact.reason}"
        case Promoted():
            return f"{fact.arm} goes on to rung {fact.rung} (place {fact.rank} of {fact.of})"
        case Looked():
            return f"look {fact.look}: {fact.decision}, {fact.reason}"
        case PlannerDecided():
            return f"planner: {fact.arm or 'answer'} {fact.decision} by {fact.by}, {fact.reason}"
        case StudyOpened():
            return f"opened {fact.study.name}, {fact.digest[:12]}"
        case StudyAmended():
            return f"amended: {fact.reason}"
        case StudyResumed():
            return f"resumed: {fact.reason}"
        case StudyStopped():
            return f"stopped: {fact.reason}"
    return ""
