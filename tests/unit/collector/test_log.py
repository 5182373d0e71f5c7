"""What entries of the collectors' log mean to whoever reads them."""

from __future__ import annotations

import pytest

from swarmq.collector.decide.log import LogPosition, LogReader, ReadResult
from swarmq.messages import LogEntry


def entry(what="transaction", term=1, **fields) -> LogEntry:
    return LogEntry(run="r", what=what, **{"log": "l", "term": term, **fields})


class Log:
    """A log, and readers of it."""

    def __init__(self, *entries: LogEntry) -> None:
        self.entries = list(entries)

    def read(self, reader: LogReader) -> list[ReadResult]:
        place = reader.position.offset + 1
        return [reader.read(one, offset) for offset, one in enumerate(self.entries[place:], place)]


def fresh(me: str) -> LogReader:
    return LogReader(me, LogPosition(), is_empty=True)


@pytest.fixture
def log() -> Log:
    return Log(entry("claim", sender="a"), entry(number=1, body=b"one"))


def test_the_first_claim_founds_the_log_and_a_later_founder_joins(log):
    log.entries.insert(1, entry("claim", sender="b", log="m"))
    first, second = fresh("a"), fresh("b")
    assert log.read(first) == [ReadResult.WON, ReadResult.NOTHING, ReadResult.CONFIRMED]
    assert log.read(second)[0] is ReadResult.GAP
    assert not second.is_leading
    log.entries.append(entry("copy", number=1, join=second.join, body=b"all"))
    assert log.read(second) == [ReadResult.REPLACE]
    assert (second.is_complete, second.position.number, second.body) == (True, 1, b"all")


def test_a_transaction_behind_the_claim_of_a_successor_counts_for_nobody(log):
    leader, standby = fresh("a"), LogReader("b", LogPosition(log="l", term=1, offset=0), is_empty=False)
    log.read(leader)
    log.entries += [entry("claim", term=2, sender="b"), entry(number=2, body=b"late"), entry(number=2, term=2)]
    assert log.read(leader) == [ReadResult.LOST, ReadResult.NOTHING, ReadResult.APPLY]
    assert log.read(standby) == [ReadResult.APPLY, ReadResult.WON, ReadResult.NOTHING, ReadResult.CONFIRMED]


def test_of_two_claims_with_one_term_the_first_counts(log):
    standby = LogReader("b", LogPosition(log="l", term=1, offset=0), is_empty=False)
    log.entries += [entry("claim", term=2, sender="c"), entry("claim", term=2, sender="b")]
    assert log.read(standby) == [ReadResult.APPLY, ReadResult.LOST, ReadResult.NOTHING]


def test_a_divided_transaction_counts_with_its_last_part_whatever_is_sent_twice(log):
    standby = LogReader("b", LogPosition(log="l", term=1, number=1, offset=1), is_empty=False)
    parts = [entry(number=2, part=part, num_parts=2, body=body) for part, body in enumerate((b"x", b"y"))]
    log.entries += [parts[0], parts[0], parts[1], parts[1]]
    assert log.read(standby) == [ReadResult.NOTHING, ReadResult.NOTHING, ReadResult.APPLY, ReadResult.NOTHING]
    assert standby.body == b"xy"


@pytest.mark.parametrize("missed", [entry(number=3), entry(number=2, term=2)])
def test_whoever_lacks_history_asks_for_a_copy_of_the_store_and_does_not_lead_before_it_has_one(log, missed):
    standby = LogReader("b", LogPosition(log="l", term=1, number=1, offset=1), is_empty=False)
    log.entries += [missed, entry("claim", term=3, sender="b")]
    assert log.read(standby) == [ReadResult.GAP, ReadResult.GAP]
    assert (standby.is_leading, standby.is_complete) == (False, False)


def test_whoever_finds_entries_deleted_asks_for_a_copy_even_if_the_next_one_says_nothing():
    standby = LogReader("b", LogPosition(log="l", term=1, number=1, offset=1), is_empty=False)
    assert standby.read(entry("join", sender="c"), 5) is ReadResult.GAP


def test_a_base_of_a_leader_that_has_lost_meanwhile_is_not_taken(log):
    standby = fresh("b")
    log.read(standby)
    log.entries += [entry("claim", term=2, sender="c"), entry("copy", number=1, join=standby.join, body=b"all")]
    assert log.read(standby) == [ReadResult.GAP, ReadResult.NOTHING]


def test_a_store_with_a_history_of_its_own_belongs_to_no_log_of_others(log):
    assert log.read(LogReader("b", LogPosition(), is_empty=False))[0] is ReadResult.FOREIGN
    assert ReadResult.FOREIGN in log.read(LogReader("b", LogPosition(log="other", term=1), is_empty=False))
