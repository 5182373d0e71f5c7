"""A policy learns one kind before the other: collector and the learner's intake, closed to a loop."""

from __future__ import annotations

import random

import msgspec
import pytest

from swarmq.collector.decide.core import Core
from swarmq.collector.decide.state import Rules
from swarmq.collector.service import build_rollout
from swarmq.config import SwarmJob, Train
from swarmq.learner.feed.batcher import Batcher, BatchLimits
from swarmq.messages import Control, VersionSpan
from unit.collector.twin_store import TwinStore

FAILS = {"hard": 0.5, "solved": 0.01}
"""Chance of an attempt to fail; two make a group."""
GROUPS = 400


@pytest.mark.parametrize(("when_dry", "least", "most"), [("wait", 1, 6), ("lend", 20, 40)])
def test_steps_while_one_kind_is_nearly_solved(when_dry, least, most, make_bench, say):
    """Waiting for groups of it that teach something, training nearly stands; lending, it goes on, and misses none of them."""
    dice, bench = random.Random(0), make_bench()
    job = SwarmJob.build(
        {
            "run": "r",
            "mix": {"hard": 0.5, "solved": 0.5},
            "policies": {"main": {"model": "m"}},
            "groups": {
                "group_size": 2,
                "groups_per_batch": 4,
                "max_staleness": 2,
                "when_dry": when_dry,
                "uninformative_groups": 8,
            },
        }
    )
    bench.store = TwinStore(run="r")
    bench.core = Core(Rules.of(job), bench.store, bench.store.snapshot(), now=bench.now, job=job)
    bench.effects.clear()
    bench.settle()
    limits = BatchLimits(groups_per_batch=4, mix=job.mix, max_staleness=2, group_size=2, vocab_size=100)
    intake, version, forwarded, trained = Batcher(limits), 0, 0, dict.fromkeys(FAILS, 0)
    for number in range(GROUPS):
        kind = dice.choice([kind for kind, out in bench.core.tickets.out.items() if out])
        for repeat, ticket in enumerate(sorted(bench.core.tickets.out[kind])[:2]):
            name = f"{number}.{repeat}"
            bench.take(
                say.begin(name, f"{kind}-{number}", repeat, kind=kind, group_size=2, ticket_id=ticket),
                say.turn(episode=name, versions=(VersionSpan(version=version, start=0, end=1),)),
                say.end(name, reward=float(dice.random() > FAILS[kind])),
            )
        for item in bench.sent[forwarded:]:
            assert intake.accept(build_rollout(bench.store, item))
        forwarded = len(bench.sent)
        batch = intake.take(version=version, at=0.0, settings=Train())
        if batch:
            version += 1
            assert len(batch.episodes) == 8
            for episode in batch.episodes:
                trained[episode.kind] += 1
        if record := batch or intake.drops(version=version, at=0.0):
            bench.take(say.consumed(*record.index.trained, version=version, dropped=dict(record.index.dropped)))
        bench.wait(0.1)
        state = bench.store.control() or Control(run="r", number=0)
        intake.change(msgspec.structs.replace(limits, lent=state.lent))
    assert least <= version <= most
    assert trained["solved"] > 0
    assert "stale" not in bench.dropped
