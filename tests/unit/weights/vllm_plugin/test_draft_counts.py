"""The number of drafts follows what is measured, and costs little where drafts do not pay."""

from __future__ import annotations

import itertools
import random

import pytest

from swarmq.weights.format.conventions import DRAFT_COUNTS, DRAFT_SCHEDULE
from swarmq.weights.vllm_plugin.draft_counts import WINDOW, DraftCounts

STEPS = 20_000
REQUESTS = 32


class Engine:
    """Steps of an engine whose seconds and tokens follow from the number of drafts, one step behind the choice as with vLLM."""

    def __init__(self, seconds, tokens, noise=0.1):
        self.seconds, self.tokens, self.noise = seconds, tokens, noise
        self.counts, self.dice, self.now, self.pending = DraftCounts(), random.Random(0), 0.0, 0
        self.drafted: list[int] = []
        self.took: list[float] = []

    def run(self, steps, sizes=(REQUESTS,), idle_after=False, waits=lambda _: 0.0):
        for step, requests in zip(range(steps), itertools.cycle(sizes), strict=False):
            count, self.pending = self.pending, self.counts[requests]
            self.drafted.append(count)
            self.took.append(self.seconds[count] * self.dice.uniform(1 - self.noise, 1 + self.noise))
            self.now += self.took[-1] + waits(step)
            sampled = round(requests * self.tokens[count] * self.dice.uniform(1 - self.noise, 1 + self.noise))
            self.counts.observe(
                requests=requests, sampled=sampled, count_after=self.pending, idle_after=idle_after, now=self.now
            )

    def share(self, count, last=STEPS // 2):
        """Share of the time of the last steps, without waits."""
        steps = list(zip(self.drafted, self.took, strict=True))[-last:]
        return sum(took for drafted, took in steps if drafted == count) / sum(took for _, took in steps)


COSTS = {0: 1.0, 3: 1.2, 8: 1.6}


@pytest.mark.parametrize(
    ("tokens", "best"),
    [({0: 1.0, 3: 1.1, 8: 1.2}, 0), ({0: 1.0, 3: 2.0, 8: 2.2}, 3), ({0: 1.0, 3: 2.5, 8: 5.0}, 8)],
)
def test_the_count_that_samples_most_tokens_per_second_stays(tokens, best):
    engine = Engine(COSTS, tokens)
    engine.run(STEPS)
    assert engine.share(best) > 0.95


def test_text_that_repeats_itself_no_longer_switches_drafts_off():
    engine = Engine(COSTS, {0: 1.0, 3: 2.5, 8: 5.0})
    engine.run(STEPS)
    engine.tokens = {0: 1.0, 3: 1.0, 8: 1.0}
    engine.run(STEPS)
    assert engine.share(0) > 0.95
    engine.tokens = {0: 1.0, 3: 2.5, 8: 5.0}
    engine.run(STEPS)
    assert engine.share(8) > 0.95


def test_steps_of_other_sizes_have_a_choice_of_their_own():
    engine = Engine({0: 1.0, 3: 1.0, 8: 1.0}, {0: 1.0, 3: 1.0, 8: 3.0})
    engine.run(STEPS, sizes=[2])
    engine.tokens = {0: 1.0, 3: 0.9, 8: 0.8}
    engine.run(STEPS, sizes=[64])
    assert engine.counts[64] == 0
    engine.run(WINDOW * 2, sizes=[2])
    assert engine.counts[2] == 8


def test_sizes_that_alternate_have_one_choice():
    engine = Engine(COSTS, {0: 1.0, 3: 1.0, 8: 1.0})
    engine.run(30, sizes=[3])
    engine.run(STEPS, sizes=[4, 3])
    assert engine.share(0) > 0.95


def test_a_trial_ends_soon_where_drafts_take_very_long():
    engine = Engine({0: 1.0, 3: 20.0, 8: 20.0}, {0: 1.0, 3: 1.5, 8: 2.0})
    engine.run(STEPS * 5)
    assert engine.now < 1.05 * STEPS * 5 + 20.0 * 2 * WINDOW


def test_a_pause_during_a_trial_decides_nothing():
    engine = Engine(COSTS, {0: 1.0, 3: 2.5, 8: 5.0})
    engine.run(STEPS, waits=lambda step: 500.0 if step % 40 == 0 else 0.0)
    assert engine.share(8) > 0.95


def test_time_without_requests_is_not_counted():
    engine = Engine(COSTS, {0: 1.0, 3: 1.0, 8: 1.0})
    engine.run(STEPS, idle_after=True)
    assert set(engine.drafted[1:]) == {DRAFT_COUNTS[0]}, (
        "a step after which none was left says nothing of the next one's time"
    )


def test_the_table_that_vllm_gets_has_each_count_once():
    assert sorted(count for _, _, count in DRAFT_SCHEDULE) == sorted(DRAFT_COUNTS)
    assert all(end + 1 == start for (_, end, _), (start, _, _) in itertools.pairwise(DRAFT_SCHEDULE))
