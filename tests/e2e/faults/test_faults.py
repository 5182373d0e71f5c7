"""The short version of `benchmarks/faults`, and the proof that it would notice."""

from __future__ import annotations

import asyncio

import pytest
from benchmarks.faults.broken import RULES
from benchmarks.faults.inject import CLUSTER_FAULTS, DISK_FULL, FAULTS, WORKER_FAULTS
from benchmarks.faults.run import play, report

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(1800)]

REVEALED_BY = {
    "answer-before-confirm": ("proxy killed",),
    "acknowledge-before-commit": ("collector killed", "collector killed around a commit"),
    "no-slot-key": ("tasks sent again",),
    "take-turns-as-answered": ("proxy killed", "proxy killed while it answers"),
    "ends-do-not-wait": ("pieces out of order",),
    "acknowledge-before-log": ("learner I/O killed", "learner I/O killed around the log"),
    "no-dedup": ("episodes sent again",),
    "take-lost-for-confirmed": ("proxy's link to the broker cut",),
}
"""Rule -> faults that show what it is for."""
CLUSTER_RULE = "no-dedup-after-failover"
CLUSTER_LIMIT_S = 850.0
"""Seconds after which a run with a broken rule is ended with all that it has started."""


async def test_every_finished_episode_is_trained_exactly_once_whatever_dies(tmp_path, nursery, model):
    possible = FAULTS.keys() - CLUSTER_FAULTS.keys() - WORKER_FAULTS.keys()
    result = await play(tmp_path, nursery, injections=len(possible), seed=3, gap_s=0.2, model=model)
    assert result.passed, report(result)
    injected = {row.fault for row in result.verdict.rows if row.injections}
    assert possible - injected <= {DISK_FULL}, "the full disk only where one may be mounted"
    assert result.dead_letters == 0
    assert result.verdict.account.trained > 50
    assert result.weights.pushes > 0


async def test_nothing_is_lost_when_the_nodes_of_a_cluster_die_or_lose_each_other(tmp_path, nursery, model):
    """The other faults of a cluster take longer: `python -m benchmarks.faults --nodes 3`."""
    faults = ("broker's leader killed", "broker's leader cut off")
    result = await play(tmp_path, nursery, injections=len(faults), seed=1, gap_s=1.0, model=model, only=faults, nodes=3)
    assert result.passed, report(result)
    assert {row.fault for row in result.verdict.rows if row.injections} == set(faults)
    assert result.verdict.account.trained > 20
    assert result.dead_letters == 0


async def test_nothing_is_lost_when_each_process_of_a_collector_is_killed(tmp_path, nursery, model):
    faults = ("collector killed", "collector killed around a commit", *WORKER_FAULTS)
    result = await play(tmp_path, nursery, injections=6, seed=1, gap_s=1.0, model=model, only=faults, collectors=2)
    assert result.passed, report(result)
    assert {row.fault for row in result.verdict.rows if row.injections} == set(faults)
    assert result.verdict.account.trained > 20
    assert result.dead_letters == 0


def test_every_rule_that_can_be_broken_has_its_control() -> None:
    assert RULES.keys() == REVEALED_BY.keys() | {CLUSTER_RULE}


async def test_a_rule_that_only_a_cluster_needs_is_caught_when_it_is_broken(tmp_path, nursery, model):
    """A failover delivers again what was acknowledged late. Like other faults, it may strike where nothing was."""
    for seed in (5, 6):
        folder = tmp_path / str(seed)
        folder.mkdir()
        async with asyncio.timeout(CLUSTER_LIMIT_S):
            result = await play(
                folder, nursery, injections=1, seed=seed, gap_s=1.0, model=model, broken=CLUSTER_RULE,
                only=("broker's majority killed",), nodes=3,
            )  # fmt: skip
        if result.verdict.twice:
            return
    pytest.fail(f"{CLUSTER_RULE} was not caught:\n{report(result)}")


@pytest.mark.parametrize("rule", REVEALED_BY)
async def test_a_broken_rule_is_caught(rule, tmp_path, nursery, model):
    """Negative controls: each part that breaks one rule is found out by the same comparison.

    Faults strike at random moments, and not every schedule meets the broken rule; one of five must.
    """
    for seed in range(5, 10):
        folder = tmp_path / str(seed)
        folder.mkdir()
        result = await play(
            folder, nursery, injections=8, seed=seed, gap_s=0.4, model=model, broken=rule, only=REVEALED_BY[rule]
        )
        if result.verdict.faults:
            return
    pytest.fail(f"{rule} was not caught:\n{report(result)}")
