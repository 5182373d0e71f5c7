"""When all attempts fail they go on one at a time, until one succeeds."""

from __future__ import annotations

import asyncio
import random
from itertools import pairwise

import pytest

from support.virtual_time import run
from swarmq.client.runners.circuit_breaker import MAX_PAUSE_S, MIN_FAILURES, CircuitBreaker

LANES = 16


async def _attempts(fails, *, until_s: float, serves=lambda _: True) -> list[float]:
    """When lanes began their attempts, each of which takes a tenth of a second. `fails`: whether all do, now."""
    now = asyncio.get_running_loop().time

    async def probe() -> bool:
        return serves(now())

    outage, begun = CircuitBreaker(lanes=LANES, pause_s=1.0, serves=probe), list[float]()

    async def lane() -> None:
        while now() < until_s:
            await outage.wait_for_turn()
            begun.append(now())
            await asyncio.sleep(0.1)
            outage.record(finished=not fails(now()))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(LANES):
            tasks.create_task(lane())
    return begun


def test_while_all_fail_one_begins_at_a_time_after_longer_and_longer_pauses():
    begun = run(_attempts(lambda _: True, until_s=600.0))
    before = 3 * LANES  # two failures of every lane, and those that were under way
    assert len(begun) < before + 2 * LANES, "otherwise each lane would begin 600 a minute"
    pauses = [later - earlier for earlier, later in pairwise(begun[before:])]
    assert 1.0 <= pauses[0] < 5.0
    assert max(pauses) == pytest.approx(MAX_PAUSE_S)


def test_the_first_that_succeeds_lets_all_go_on():
    begun = run(_attempts(lambda now: 10.0 < now < 100.0, until_s=200.0))
    assert sum(20.0 < at < 100.0 for at in begun) < 10
    assert sum(160.0 < at < 170.0 for at in begun) == pytest.approx(100 * LANES, rel=0.1)


@pytest.mark.parametrize("back_s", [100.0, 150.0, 600.0, 1000.0])
def test_attempts_go_on_within_seconds_of_the_proxys_return(back_s):
    down = lambda now: 10.0 < now < back_s  # noqa: E731
    begun = run(_attempts(down, serves=lambda now: not down(now), until_s=back_s + 20.0))
    assert min(at for at in begun if at > back_s) < back_s + 3.0
    assert sum(back_s + 3.0 < at < back_s + 13.0 for at in begun) == pytest.approx(100 * LANES, rel=0.1)


def test_attempts_of_which_some_succeed_are_not_held_up():
    outage = CircuitBreaker(lanes=1, pause_s=1.0)
    for _ in range(10):
        for _ in range(MIN_FAILURES - 1):
            outage.record(finished=False)
        assert not outage.is_open
        outage.record(finished=True)


def test_an_environment_that_fails_nine_times_in_ten_is_not_held_up():
    dice, outage, held = random.Random(0), CircuitBreaker(lanes=4, pause_s=1.0), 0
    for number in range(20_000):
        outage.record(finished=dice.random() > 0.9)
        held += outage.is_open and number > 500
    assert held < 200, "twenty failures in a row are usual here"


def test_a_few_successes_show_how_often_attempts_usually_fail():
    alarms = 0
    for seed in range(100):
        dice, breaker = random.Random(seed), CircuitBreaker(lanes=4, pause_s=1.0)
        for _ in range(300):
            was_open = breaker.is_open
            breaker.record(finished=dice.random() > 0.9)
            alarms += breaker.is_open and not was_open
    assert alarms < 200, "with few lanes, chance looks like an outage until the first successes"


def test_pauses_before_further_attempts_grow_once_more_have_failed_than_may_by_chance():
    dice, breaker = random.Random(0), CircuitBreaker(lanes=4, pause_s=1.0)
    assert [breaker.retry_pause_s(attempt) for attempt in (1, 2, 3, 7, 100)] == [1.0, 2.0, 4.0, 64.0, 64.0]
    for _ in range(1000):
        breaker.record(finished=dice.random() > 0.9)
    assert 20 < breaker.patience < 60
    assert {breaker.retry_pause_s(attempt) for attempt in range(1, breaker.patience + 1)} == {0.0}
    assert [breaker.retry_pause_s(breaker.patience + more) for more in (1, 2, 3, 1000)] == [1.0, 2.0, 4.0, 64.0]
    for _ in range(100):
        breaker.record(finished=True)
    assert breaker.patience == 0


def test_an_outage_is_noticed_as_soon_after_other_outages():
    outage = CircuitBreaker(lanes=1, pause_s=0.0)
    for _ in range(20):
        failures = 0
        while not outage.is_open:
            outage.record(finished=False)
            failures += 1
        assert failures == MIN_FAILURES
        outage.record(finished=True)


def test_an_outage_is_said_once_and_so_is_its_end(capsys):
    outage = CircuitBreaker(lanes=1, pause_s=0.0)
    for _ in range(3 * MIN_FAILURES):
        outage.record(finished=False)
    outage.record(finished=True)
    outage.record(finished=True)
    said = "".join(capsys.readouterr())
    assert said.count("attempts_keep_failing") == 1
    assert said.count("attempts_succeed_again") == 1
