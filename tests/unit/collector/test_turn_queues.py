"""Turns in queues of their own keep every promise, because ends wait until a fence has passed each of these queues."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterator

import msgspec
import pytest

from swarmq.collector.store import Store
from swarmq.messages import EpisodeEnd, Fence, RefusedTurn, Turn, encode
from unit.collector.simulator import RUN, BrokenError, Chaos, Shell, World, read_states
from unit.collector.test_simulation import SMALL, SMALL_STEPS, small

NUM_QUEUES = 2


class DividedWorld(World):
    """A world in which proxies divide turns among queues, by episode."""

    def __init__(self, *args, **kwargs) -> None:
        self.turns = [deque[bytes]() for _ in range(NUM_QUEUES)]
        self.held_turns = [list[bytes]() for _ in range(NUM_QUEUES)]
        super().__init__(*args, **kwargs)

    def enqueue(self, body: bytes) -> None:
        message = self.decoded(body)
        if isinstance(message, Turn | RefusedTurn):
            self.turns[zlib.crc32(message.episode_id.encode()) % NUM_QUEUES].append(body)
        else:
            super().enqueue(body)

    @property
    def is_busy(self) -> bool:
        return super().is_busy or any(self.turns)

    def deliver_turns(self, number: int) -> list[bytes]:
        queue = self.turns[number]
        most = len(queue) if self.resting else min(len(queue), self.rng.randrange(1, 4))
        batch = [queue.popleft() for _ in range(most)]
        self.held_turns[number] += batch
        return batch

    def redeliver(self) -> None:
        super().redeliver()
        for queue, held in zip(self.turns, self.held_turns, strict=True):
            queue.extendleft(reversed(held))
            held.clear()


class DividedShell(Shell):
    """What the service does with queues of turns."""

    world: DividedWorld
    num_fenced = NUM_QUEUES

    def restart(self) -> None:
        self.num_fences = 0
        self.passed: set[str] = set()
        super().restart()

    def work(self) -> Iterator[str]:
        while True:
            yield from self.take_turns()
            if batch := self.world.deliver():
                yield "delivered"
                if any(isinstance(end := self.world.decoded(body), EpisodeEnd) and end.calls is None for body in batch):
                    yield from self.await_turns()
            if batch or self.confirmed or self.decided_at != self.world.now:
                yield from self.decide(batch)
                yield "committed"
                self.world.acknowledge(len(batch))
            yield "acknowledged"
            yield from self.publish()

    def take_turns(self) -> Iterator[str]:
        number = self.world.rng.randrange(NUM_QUEUES)
        if batch := self.world.deliver_turns(number):
            yield "delivered"
            fences = {body for body in batch if isinstance(self.world.decoded(body), Fence)}
            yield from self.decide([body for body in batch if body not in fences])
            yield "committed"
            self.passed |= {self.world.decoded(body).fence_id for body in fences}
            del self.world.held_turns[number][: len(batch)]
            yield "acknowledged turns"

    def await_turns(self) -> Iterator[str]:
        wanted = set()
        for queue in self.world.turns[: self.num_fenced]:
            self.num_fences += 1
            fence = Fence(run=RUN, fence_id=f"{self.num_steps}.{self.num_fences}")
            wanted.add(fence.fence_id)
            queue.append(encode(fence))
            yield "published"
        while not wanted <= self.passed:
            yield from self.take_turns()


def divided(num, scene, shell=DividedShell, *, num_steps=SMALL_STEPS, store=None) -> list[DividedWorld]:
    return [DividedWorld(seed, scene, shell, store=store).run(num_steps) for seed in range(num)]


@pytest.mark.parametrize("name", SMALL)
def test_hundreds_of_small_schedules_keep_every_promise(name):
    played = divided(200, SMALL[name])
    assert sum(world.crashes for world in played) > 100
    assert sum(world.shell.num_fences > 0 for world in played) > 50


def test_a_crash_after_any_effect_of_a_schedule_changes_nothing():
    calm = msgspec.structs.replace(SMALL["two groups"], chaos=Chaos(crash=0.0))
    at = 1
    while DividedWorld(1, calm, DividedShell, crash_at={at}).run(SMALL_STEPS).crashes:
        at += 1
    assert at > 60


def test_a_world_is_the_same_on_the_real_store():
    ours, real = (divided(1, SMALL["two groups"], store=store)[0] for store in (None, Store))
    assert read_states(ours.shell.store) == read_states(real.shell.store)


class DecidesEndsAtOnce(DividedShell):
    def await_turns(self) -> Iterator[str]:
        yield from ()


class FencesOneQueue(DividedShell):
    num_fenced = 1


class PassesFencesBeforeTheirTurns(DividedShell):
    """Lets a fence pass when it arrives, although turns before it are not decided."""

    def take_turns(self) -> Iterator[str]:
        self.passed |= {
            message.fence_id
            for queue in self.world.turns
            for body in queue
            if isinstance(message := self.world.decoded(body), Fence)
        }
        yield from super().take_turns()


@pytest.mark.parametrize("rule", [DecidesEndsAtOnce, FencesOneQueue, PassesFencesBeforeTheirTurns])
def test_an_end_that_overtakes_turns_is_found_out(rule):
    with pytest.raises(BrokenError):
        divided(500, small(num_tasks=2, chaos=Chaos(meddling=0.0)), rule)
