"""The verdict: what the clients wrote down, against the batch log, the checkpoints and the collector's ledger.

clients' ledgers ──> confirmed outcomes, and the answers each agent received ──┐
batch log        ──> which episodes were trained, with exactly which turns ────┼──> lost, twice, wrong
collector        ──> which were dropped, and why; which still wait ────────────┘
batch log ──replay without a fault──> weights of every version  ==  checkpoint, and every push that an engine took
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from benchmarks.faults import engine as scripted
from benchmarks.faults.client import Line, digest
from benchmarks.faults.inject import Injection
from benchmarks.faults.world import POLICY, Stall
from swarmq.collector.ledger import read_fates
from swarmq.config import SwarmJob
from swarmq.demo.accounting import Account, settle_run
from swarmq.learner.store import batch_log
from swarmq.messages import unpack_ids

NO_FAULT = "before the first"


class Row(msgspec.Struct, kw_only=True):
    """A line of the table: what came of the episodes that ended between this fault and the next one."""

    fault: str
    injections: int = 0
    ended: int = 0
    once: int = 0
    twice: int = 0
    lost: int = 0
    unseen: int = 0
    """Turns that were trained although their agent did not receive the answer to its end."""
    dropped: Counter[str] = msgspec.field(default_factory=Counter)
    longest_stall_s: float = 0.0


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What the run came to; every tuple of ids must be empty."""

    account: Account
    slots_twice: tuple[str, ...]
    """Slots of which two attempts were trained."""
    unseen: tuple[str, ...]
    """Calls that were trained although their agent did not receive the answer to its end."""
    wrong: tuple[str, ...]
    """Trained episodes without an answer that their agent received, or with another text of it."""
    unproven: tuple[str, ...]
    """Calls that were not trained although their agent received the answer; it did not say so, and nobody else could."""
    unfinished: tuple[str, ...]
    """Episodes that were trained although their agent failed or never ended them."""
    disagreed: tuple[str, ...]
    """Episodes of which collector and batch log tell different stories, and those both trained and dropped."""
    incomplete: tuple[str, ...]
    """Episodes that were dropped because a turn is nowhere whose answer their agent received."""
    rows: list[Row]

    @property
    def lost(self) -> int:
        return len(self.account.lost)

    @property
    def twice(self) -> int:
        return len(self.account.twice) + len(self.slots_twice)

    @property
    def faults(self) -> dict[str, int]:
        """What broke the promise; empty when it held."""
        found = {
            "lost": self.lost,
            "twice": self.twice,
            "unseen turns trained": len(self.unseen),
            "wrong turns": len(self.wrong),
            "trained without an end": len(self.unfinished),
            "ledgers disagree": len(self.disagreed),
            "received turns lost": len(self.incomplete),
        }
        return {what: count for what, count in found.items() if count}


def judge(
    job: SwarmJob,
    lines: Sequence[Line],
    injections: Sequence[Injection],
    stalls: Sequence[Stall],
    *,
    left: set[str],
    texts: bool,
) -> Verdict:
    """Compare the records of a run that has stopped.

    `left` are the episodes on the ready queue; `texts`: one token is one character, so compare those as well.
    """
    confirmed = [line for line in lines if line.event == "confirmed"]
    account = settle_run(job, (line.episode_id for line in confirmed))
    ending = {line.episode_id: line for line in lines if line.event == "ending"}
    trained: Counter[str] = Counter()
    slots: dict[str, set[str]] = defaultdict(set)
    wrong: list[str] = []
    unproven: list[str] = []
    unseen: dict[str, tuple[str, ...]] = {}
    ledger = read_fates(job.run_folder.inbox)
    dropped = {e: fate.reason for e, fate in ledger.items() if fate.state == "dropped"}
    for record in batch_log.read_records(job.run_folder.batch_log(POLICY)):
        dropped |= record.index.dropped
        trained.update(record.index.trained)
        for episode in record.episodes:
            slots[episode.slot.id].add(episode.episode_id)
            line = ending.get(episode.episode_id)
            answers = {turn.call_id: digest(_text(turn.sampled_ids)) for turn in episode.turns}
            if line is None:
                continue
            if strange := answers.keys() - line.answers.keys():
                unseen[episode.episode_id] = tuple(strange)
            missing = line.answers.keys() - answers.keys()
            if (line.names and missing) or (
                texts and any(answers[call] != text for call, text in line.answers.items() if call in answers)
            ):
                wrong.append(episode.episode_id)
            else:
                unproven += missing
    told = {e for e, fate in ledger.items() if fate.state == "trained"}
    published = {e for e, fate in ledger.items() if fate.state == "published"}
    gone = published - trained.keys() - dropped.keys() - left
    account = msgspec.structs.replace(account, lost=tuple(sorted({*account.lost, *gone})))
    return Verdict(
        account=account,
        slots_twice=tuple(slot for slot, episodes in slots.items() if len(episodes) > 1),
        unseen=tuple(call for calls in unseen.values() for call in calls),
        wrong=tuple(wrong),
        unproven=tuple(unproven),
        unfinished=tuple(sorted(trained.keys() - ending.keys())),
        incomplete=tuple(sorted(e for e, reason in dropped.items() if reason == "incomplete")),
        disagreed=tuple(sorted((told ^ trained.keys()) | (dropped.keys() & trained.keys()))),
        rows=_rows(confirmed, injections, stalls, trained, dropped, set(account.lost), unseen),
    )


def _text(sampled: bytes) -> str:
    return scripted.spell(unpack_ids(sampled).tolist())


def _rows(
    confirmed: Sequence[Line],
    injections: Sequence[Injection],
    stalls: Sequence[Stall],
    trained: Counter[str],
    dropped: dict[str, str],
    lost: set[str],
    unseen: Mapping[str, Sequence[str]],
) -> list[Row]:
    """Every episode and every stall belongs to the fault before it."""
    times = [injection.at for injection in injections]
    rows: dict[str, Row] = {NO_FAULT: Row(fault=NO_FAULT)}
    for injection in injections:
        rows.setdefault(injection.fault, Row(fault=injection.fault)).injections += 1

    def row_at(at: float) -> Row:
        position = bisect_right(times, at)
        return rows[injections[position - 1].fault if position else NO_FAULT]

    for line in confirmed:
        row, episode = row_at(line.at), line.episode_id
        row.ended += 1
        row.once += trained[episode] == 1
        row.twice += trained[episode] > 1
        row.lost += episode in lost
        row.unseen += len(unseen.get(episode, ()))
        if episode in dropped:
            row.dropped[dropped[episode]] += 1
    for stall in stalls:
        row = row_at(stall.began)
        row.longest_stall_s = max(row.longest_stall_s, stall.seconds)
    return sorted(rows.values(), key=lambda row: row.fault)


class LongStall(msgspec.Struct, frozen=True, kw_only=True):
    """One of the longest stretches without progress, and what was injected meanwhile."""

    seconds: float
    before: str
    """The last fault before it."""
    during: tuple[tuple[float, str], ...]
    """Seconds after its beginning, and the fault."""


def longest(stalls: Sequence[Stall], injections: Sequence[Injection], *, num: int = 5) -> list[LongStall]:
    """The longest first."""
    found = []
    for stall in sorted(stalls, key=lambda stall: -stall.seconds)[:num]:
        before = [each.fault for each in injections if each.at <= stall.began]
        during = [
            (each.at - stall.began, each.fault) for each in injections if 0 < each.at - stall.began < stall.seconds
        ]
        found.append(LongStall(seconds=stall.seconds, before=before[-1] if before else NO_FAULT, during=tuple(during)))
    return found


class Weights(msgspec.Struct, frozen=True, kw_only=True):
    """What a replay of the batch log without any fault says of the weights."""

    version: int
    checkpoint_equal: bool
    """The last checkpoint's weights are the replay's, bit for bit."""
    pushes: int
    """Weight pushes that an engine took to the end."""
    pushes_wrong: tuple[int, ...]
    """Versions whose pushed weights are not the replay's."""


def replayed(job: SwarmJob, journal: Path | None) -> Weights:
    """Train the batch log again from the initial model, without broker or engine, and compare."""
    import torch  # noqa: PLC0415  (only the verdict needs it)
    from safetensors.numpy import load_file  # noqa: PLC0415

    from swarmq.learner.checkpoint import discovery  # noqa: PLC0415
    from swarmq.learner.store.records import RunIdentity  # noqa: PLC0415
    from swarmq.learner.train.trainer import Trainer  # noqa: PLC0415

    torch.set_num_threads(1)
    settings = job.policies[POLICY]
    trainer = Trainer(settings.model, settings.train)
    digests = {0: _digest(trainer)}
    for record in batch_log.read_records(job.run_folder.batch_log(POLICY)):
        if record.index.trained:
            trainer.step(record)
            digests[trainer.version] = _digest(trainer)
    newest = discovery.find_newest(job.run_folder.checkpoints(POLICY), RunIdentity.of(job, POLICY))
    checkpoint = scripted.digest(load_file(newest.path / "model.safetensors")) if newest else ""
    pushed = list(_pushes(journal)) if journal and journal.exists() else []
    return Weights(
        version=trainer.version,
        checkpoint_equal=bool(newest) and newest.version == trainer.version and checkpoint == digests[trainer.version],
        pushes=len(pushed),
        pushes_wrong=tuple(version for version, found in pushed if digests.get(version) != found),
    )


def _digest(trainer: object) -> str:
    tensors = {name: tensor.cpu().numpy() for name, tensor in trainer.named_tensors()}  # type: ignore[attr-defined]
    return scripted.digest(tensors)


def _pushes(journal: Path) -> Iterator[tuple[int, str]]:
    for line in journal.read_bytes().splitlines():
        note = json.loads(line)
        if note["event"] == "finish":
            yield note["version"], note["digest"]
