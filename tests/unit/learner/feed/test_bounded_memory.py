"""What the learner's intake and log keep in memory does not grow with the run, once checkpoints let old batches go."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from support.episodes import make_group
from swarmq.config import Train
from swarmq.learner.feed.batcher import Batcher, BatchLimits
from swarmq.learner.store.batch_log import BatchLog
from swarmq.learner.store.records import BatchIndex, BatchRecord, RunIdentity


def test_24_000_logged_episodes_take_no_more_memory_than_12_000(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.fsync", lambda _: None)
    log = BatchLog(tmp_path, RunIdentity(run="r", policy="main", model="m"), segment_records=8)
    box = Batcher(BatchLimits(groups_per_batch=1, group_size=2, mix={"a": 1.0}, max_staleness=1, min_known=500))
    body = tuple(make_group("g"))

    def train(until: int) -> int:
        while box.record < until:
            number = box.record + 1
            trained = tuple(f"episode-{number}-{n}" for n in range(30))  # more than Python keeps spare tuples of
            index = BatchIndex(record=number, version=number, trained=trained)
            log.append(BatchRecord(index=index, episodes=body, settings=Train()))
            box.note(index)
            if number % 10 == 0:
                log.prune(number - 10, reported=number - 2, spare=box.limits.num_known)
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        early, late = train(400), train(800)
    finally:
        tracemalloc.stop()
        log.close()
    assert late - early < 100_000, "12,000 ids alone are a million bytes"
    assert len(log.places) < 50
