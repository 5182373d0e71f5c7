"""Ranks that die, fall silent or fail are named to all others, which end."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from swarmq.errors import SetUpError
from swarmq.learner.distributed.rank_monitor import End, RankFacts, RankMonitor

distributed: Any = torch.distributed


class Ranks:
    """Ranks on one store. A rank that would end its process puts itself and its reason into `ended`."""

    def __init__(self, count: int) -> None:
        self.store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.facts = [RankFacts(rank=rank, host=f"gpu{rank}", pid=7) for rank in range(count)]
        self.ended = queue.SimpleQueue[tuple[int, End]]()
        self.monitors = list[RankMonitor]()

    def start(self, rank: int, **timing: float) -> RankMonitor:
        times: Any = {"beat_s": 0.01, "lost_s": 600.0, "suspect_s": 0.2, "leave_s": 0.05} | timing
        monitor = RankMonitor(
            self.store.clone(),
            self.facts,
            rank,
            address="gpu0:29500",
            end_process=lambda end: self.ended.put((rank, end)),
            **times,
        )
        self.monitors.append(monitor)
        return monitor

    def next_end(self) -> tuple[int, End]:
        return self.ended.get(timeout=60)


@pytest.fixture
def two() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    for each in ranks.monitors:
        each.close()


def test_an_error_of_one_rank_ends_the_others_with_its_words_and_its_status(two: Ranks) -> None:
    two.start(0)
    monitor = two.start(1)
    with monitor.report_errors():
        raise SetUpError("train.layout: no")
    ends = dict([two.next_end(), two.next_end()])
    said = "rank 1 on gpu1 (process 7): train.layout: no"
    assert ends[1] == End(text=said, status=78, rank=1)
    assert ends[0] == End(text=f"rank 0 on gpu0 (process 7) ends: {said}", status=78, rank=1)


def test_a_rank_that_falls_silent_is_named_to_all_by_rank_0(two: Ranks) -> None:
    two.start(1, beat_s=600.0)  # counted once, and then no more
    two.start(0, lost_s=0.2)
    rank, end = two.next_end()
    assert rank == 0
    assert end.text.startswith("no sign of life for 0.2 s of rank 1 on gpu1 (process 7)")


def test_after_a_failed_collective_the_rank_that_died_is_found_soon(two: Ranks) -> None:
    two.start(1, beat_s=600.0)
    assert "of rank 1 on gpu1" in two.start(0).find_lost()


def test_ranks_that_are_alive_or_have_finished_are_not_named() -> None:
    ranks = Ranks(3)
    first, _, third = (ranks.start(rank, suspect_s=0.6) for rank in range(3))
    third.close()
    assert first.find_lost() == ""
    assert ranks.ended.empty()
    for each in ranks.monitors:
        each.close()


def test_ranks_that_lose_the_store_name_rank_0_and_its_address() -> None:
    ranks = Ranks(2)
    monitor = ranks.start(1)
    del ranks.store
    rank, end = ranks.next_end()
    assert rank == 1
    assert "no contact with the store at gpu0:29500" in end.text
    assert "rank 0 on gpu0 (process 7) or its launcher ended" in end.text
    monitor.close()


def test_a_store_that_answers_no_more_ends_the_rank_though_nobody_closes_the_connection() -> None:
    ranks = Ranks(2)
    ranks.store = StuckStore(ranks.store)
    monitor = ranks.start(1, lost_s=0.1)
    assert "no contact with the store at gpu0:29500: rank 0 on gpu0" in ranks.next_end()[1].text
    StuckStore.goes_on.set()
    monitor.close()


class StuckStore:
    """A store whose host is cut off."""

    goes_on = threading.Event()

    def __init__(self, store: Any) -> None:
        self._store = store

    def clone(self) -> StuckStore:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def check(self, keys: list[str]) -> Any:
        assert self.goes_on.wait(60)
        return self._store.check(keys)
