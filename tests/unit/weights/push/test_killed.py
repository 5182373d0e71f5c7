"""A learner that takes turns with its engine may be killed at any point: the next one finds room, and an engine that serves."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from swarmq.errors import EngineError
from swarmq.weights.push.engine_control import Payload
from swarmq.weights.push.pusher import WeightPusher

STEP, PUSH, REPAIR = 16, 6, 12
"""Calls of a learner's start and first step, of a push alone, and of a start that finds weights in doubt, but those that only
look."""
SAVED, NEXT = 3, 4


class NamedTransfer:
    """A transfer whose weights are named by their version."""

    async def prepare(self, engine, route):
        pass

    def publish(self, tensors, version, dtype):
        return Payload(update_info={"path": f"weights {version}"})

    def withdraw(self):
        pass


class SharedGpu:
    """A learner on its engine's GPU, as `Learner` leads it."""

    def __init__(self, vllm, tmp_path):
        self.vllm = vllm
        self.pusher = WeightPusher([vllm.url], tmp_path, transfers={"file": NamedTransfer()}, patience_s=0)

    def start(self):
        """From the checkpoint."""
        self.pusher.sleep()
        self.compute()
        self.pusher.wake()
        self.pusher.repair([], SAVED)

    def step(self, version):
        self.pusher.sleep()
        self.compute()
        self.pusher.wake()
        self.pusher.push([], version)

    def compute(self):
        if self.vllm.killed_in is None:
            assert self.vllm.sleeping == {"weights", "kv_cache"}, "no room"


async def killed(vllm, call, life):
    """A learner's last calls: it is killed in this one. Returns how many there would have been."""
    vllm.killed_in, vllm.changes = call, 0
    with contextlib.suppress(EngineError):
        await asyncio.to_thread(life)
    vllm.killed_in = None
    return vllm.changes


def serves(vllm):
    assert not vllm.paused
    assert not vllm.asleep
    assert vllm.weights == f"weights {vllm.label}"


@pytest.fixture
def healthy(vllm):
    vllm.label, vllm.weights = f"{SAVED}", f"weights {SAVED}"
    yield vllm
    assert vllm.seen_while_serving <= {(f"{n}", f"weights {n}") for n in (SAVED, NEXT)}


@pytest.fixture
def learner(healthy, tmp_path):
    return lambda: SharedGpu(healthy, tmp_path)


def started_and_stepped(learner):
    learner.start()
    learner.step(NEXT)


@pytest.mark.parametrize("call", range(STEP + 1))
async def test_the_next_learner_finds_room_and_gets_its_engine_going(healthy, learner, call):
    await killed(healthy, call, lambda: started_and_stepped(learner()))
    await asyncio.to_thread(started_and_stepped, learner())
    serves(healthy)
    assert healthy.label == f"{NEXT}"


@pytest.mark.parametrize("call", range(PUSH + 1))
async def test_an_engine_beside_its_learner_goes_on_before_the_next_one_has_replayed(healthy, learner, call):
    await killed(healthy, call, lambda: learner().pusher.push([], NEXT))
    await asyncio.to_thread(learner().pusher.repair, [], SAVED)
    serves(healthy)


@pytest.mark.parametrize("call", range(REPAIR + 1))
async def test_a_learner_that_is_killed_in_the_repair_leaves_it_to_the_next(healthy, learner, call):
    healthy.label, healthy.weights, healthy.paused, healthy.active = f"updating-{NEXT}", "torn", True, True
    await killed(healthy, call, lambda: learner().start())
    await asyncio.to_thread(learner().start)
    serves(healthy)


async def test_these_are_all_calls_in_which_a_learner_may_be_killed(healthy, learner):
    assert await killed(healthy, 100, lambda: started_and_stepped(learner())) == STEP
    assert await killed(healthy, 100, lambda: learner().pusher.push([], NEXT)) == PUSH
    healthy.label, healthy.weights, healthy.paused, healthy.active = f"updating-{NEXT}", "torn", True, True
    assert await killed(healthy, 100, lambda: learner().start()) == REPAIR
    serves(healthy)
