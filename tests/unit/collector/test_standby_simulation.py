"""Collectors on several hosts keep every promise, whoever dies, sleeps or is suspected; and each broken rule is found out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from swarmq.collector.decide.log import LogReader, ReadResult
from swarmq.errors import CollectorError
from swarmq.messages import LogEntry
from unit.collector.simulator import BrokenError, Chaos, Scene
from unit.collector.standby_simulator import Host, Hosts, StandbyWorld
from unit.collector.test_simulation import SCENES, small

NUM_STEPS = 200
SMALL = {
    "one group": small(),
    "two policies": small(num_tasks=2, trained=("a", "b"), known=("a", "b")),
    "two kinds": small(num_tasks=2, mix={"x": 0.5, "y": 0.5}, groups_per_batch=2),
    "single episodes": small(num_tasks=6, group_size=1),
    "slots that are given up": small(num_tasks=2, group_size=3, max_attempts=1, chaos=Chaos(crash=0.08, fails=0.5)),
}
BUSY = small(
    num_tasks=6, group_size=3, groups_per_batch=2, max_staleness=1, chaos=Chaos(crash=0.03, vanishes=0.2, undead=0.8)
)


def play(num: int, given: Scene, hosts: type[Hosts] = Hosts, *, num_steps: int) -> int:
    """Run this many worlds; the number of terms that their logs saw. Raises BrokenError naming the seed."""
    terms = 0
    for seed in range(num):
        try:
            terms += StandbyWorld(seed, given, hosts).run(num_steps).shell.leader.reader.position.term
        except BrokenError as broken:
            raise BrokenError(f"seed {seed}: {broken}") from broken
    return terms


@pytest.mark.parametrize("name", SMALL)
def test_takeovers_change_nothing(name):
    assert play(60, SMALL[name], num_steps=NUM_STEPS) > 100


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENES)
def test_long_schedules_of_takeovers_change_nothing(name):
    assert play(20, SCENES[name], num_steps=1500) > 100


class AcknowledgesEarly(Host):
    """Acknowledges once a transaction is in the log, whether it counts or not."""

    def read_back(self) -> Iterator[str]:
        self.hosts.acknowledge(self, len(self.world.held))
        yield from super().read_back()


class PublishesEarly(Host):
    """Publishes before a transaction is in the log."""

    def before_append(self) -> Iterator[str]:
        self.outgoing += self.undecided
        yield from self.publish()
        yield from super().before_append()


class TrustsTheConfirm(Host):
    """Does not read its transactions back."""

    def read_back(self) -> Iterator[str]:
        position = self.reader.position
        self.reader.position = replace(position, number=position.number + 1, offset=len(self.hosts.log) - 1)
        yield "trusted"


class LeadsAtOnce(Host):
    """Does not read the log up to its claim."""

    def claim(self) -> None:
        super().claim()
        position = self.reader.position
        self.reader.position = replace(position, term=position.term + 1, offset=len(self.hosts.log) - 1)
        self.reader.is_leading = True


class SendsNothingAgain(Host):
    def what_learners_refuse(self) -> list[str]:
        return []


class ReaderWithoutTerms(LogReader):
    """Takes every transaction with the next number."""

    def _read(self, entry: LogEntry, offset: int) -> ReadResult:
        is_next = entry.what == "transaction" and self.is_complete and entry.number == self.position.number + 1
        return self._read_transaction(entry) if is_next else super()._read(entry, offset)


class IgnoresTerms(Host):
    reader_type = ReaderWithoutTerms


class ReaderWithoutGaps(LogReader):
    """Misses nothing, whatever is missing."""

    def _miss(self) -> ReadResult:
        return ReadResult.NOTHING if self.position.log else super()._miss()


class IgnoresGaps(Host):
    reader_type = ReaderWithoutGaps


@pytest.mark.parametrize(
    "rule",
    [AcknowledgesEarly, PublishesEarly, TrustsTheConfirm, LeadsAtOnce, SendsNothingAgain, IgnoresTerms, IgnoresGaps],
)
def test_a_broken_rule_is_found_out(rule):
    hosts = type("Broken", (Hosts,), {"host_type": rule})
    with pytest.raises((BrokenError, CollectorError, KeyError)):  # tables find some first
        play(300, BUSY, hosts, num_steps=300)
