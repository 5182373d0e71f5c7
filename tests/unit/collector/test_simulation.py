"""Seeded worlds full of faults keep every promise; and each broken rule is found out."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import msgspec
import pytest

from swarmq.collector.decide import effects as do
from swarmq.collector.decide.core import Core
from swarmq.collector.decide.state import EndedEpisode, Rules
from swarmq.collector.store import Store
from swarmq.errors import CollectorError
from swarmq.messages import DeliveryReport, EpisodeEnd, Message, RefusedTurn, Turn, decode, encode
from unit.collector.simulator import BrokenError, Chaos, Scene, Shell, World, every_crash, read_states, worlds


def scene(order="siblings", num_tasks=4, num_clients=3, max_attempts=0, chaos=Chaos(), **fields) -> Scene:  # noqa: B008
    given = {
        "run": "sim",
        "trained": ("main",),
        "known": ("main",),
        "mix": {"math": 1.0},
        "group_size": 2,
        "groups_per_batch": 2,
        "max_staleness": 0,
        "deadline_s": 100.0,
        "idle_timeout_s": 300.0,
        **fields,
    }
    return Scene(
        rules=Rules(**given),
        order=order,
        num_tasks=num_tasks,
        num_clients=num_clients,
        max_attempts=max_attempts,
        chaos=chaos,
    )


SCENES = {
    "one kind": scene(),
    "single episodes": scene(group_size=1, num_tasks=10),
    "two policies": scene(trained=("a", "b"), known=("a", "b")),
    "three kinds": scene(mix={"x": 0.5, "y": 0.25, "z": 0.25}, order="shuffled"),
    "half-open groups everywhere": scene(order="breadth", group_size=4, groups_per_batch=1, num_tasks=8),
    "many clients": scene(num_clients=12, num_tasks=8, max_staleness=1),
    "dying all the time": scene(chaos=Chaos(crash=0.4)),
    "turns that nobody can read": scene(chaos=Chaos(spoilt=0.1, meddling=0.0)),
    "agents that rarely succeed": scene(chaos=Chaos(fails=0.4, vanishes=0.3)),
    "slots that are given up": scene(chaos=Chaos(fails=0.5), group_size=4, max_attempts=2),
}


SMALL_STEPS = 20


def small(num_tasks=1, chaos=Chaos(crash=0.08), **fields) -> Scene:  # noqa: B008
    """A group or two, so that a schedule costs a millisecond and nearly every order of things comes up."""
    given = {"groups_per_batch": 1, "idle_timeout_s": 20.0, "deadline_s": 20.0, **fields}
    return msgspec.structs.replace(scene(num_tasks=num_tasks, num_clients=2, chaos=chaos, **given), max_calls=2)


SMALL = {
    "one group": small(),
    "two groups": small(num_tasks=2),
    "two policies": small(trained=("a", "b"), known=("a", "b")),
    "two kinds": small(mix={"x": 0.5, "y": 0.5}, groups_per_batch=2),
    "turns that nobody can read": small(chaos=Chaos(crash=0.08, spoilt=0.3, meddling=0.0)),
    "slots that are given up": small(num_tasks=2, chaos=Chaos(crash=0.08, fails=0.5), max_attempts=1, group_size=3),
}


@pytest.mark.parametrize("name", SMALL)
def test_thousands_of_small_schedules_keep_every_promise(name):
    assert worlds(0, 500, SMALL[name], num_steps=SMALL_STEPS) > 200


@pytest.mark.parametrize("name", SMALL)
def test_a_crash_after_any_effect_of_a_schedule_changes_nothing(name):
    calm = msgspec.structs.replace(SMALL[name], chaos=Chaos(crash=0.0))
    assert sum(every_crash(seed, calm, num_steps=SMALL_STEPS) for seed in range(3)) > 40


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENES)
def test_long_schedules_keep_every_promise(name):
    assert worlds(0, 30, SCENES[name]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENES)
def test_long_schedules_keep_every_promise_on_the_real_store(name):
    assert worlds(100, 10, SCENES[name], store=Store) > 0


@pytest.mark.parametrize("name", SMALL)
def test_a_world_is_the_same_on_both_stores(name):
    for seed in range(3):
        ours, real = (World(seed, SMALL[name], store=store).run(SMALL_STEPS) for store in (None, Store))
        assert ours.shell.memory() == real.shell.memory()
        assert read_states(ours.shell.store) == read_states(real.shell.store)


def test_a_world_is_the_same_for_the_same_seed():
    first, second = (World(7, SCENES["three kinds"]).run() for _ in range(2))
    assert first.shell.memory() == second.shell.memory()


def test_half_open_groups_that_ate_the_credit_still_finish_before_their_deadline():
    """Clients that begin all tasks once before any of them twice fill the window with groups of one member."""
    calm = Chaos(twice=0, lost_answer=0, fails=0, vanishes=0, crash=0, equal=0, ticket_twice=0, mute=0)
    rules = {"order": "breadth", "group_size": 4, "groups_per_batch": 1, "max_staleness": 1, "num_tasks": 12}
    world = World(1, scene(chaos=calm, deadline_s=1e9, **rules))
    world.run(num_steps=0)
    assert world.overdrafts > 0
    told = world.shell.core.counts
    assert told["dropped.group_too_small"] == 0
    assert told["trained"] == 48


HOPELESS = msgspec.structs.replace(
    SMALL["slots that are given up"], chaos=Chaos(crash=0.08, fails=0.5, undead=0.0, meddling=0.0)
)
FOR_EVER = msgspec.structs.replace(HOPELESS, rules=msgspec.structs.replace(HOPELESS.rules, deadline_s=1e9))


def test_no_group_needs_its_deadline_where_clients_say_which_slots_they_give_up():
    assert worlds(0, 500, FOR_EVER, num_steps=SMALL_STEPS) > 200


def late_siblings(shell: type[Shell]) -> int:
    """In patient worlds where no slot is attempted again before its last attempt has ended."""
    chaos = Chaos(crash=0.08, fails=0.5, vanishes=0.0, meddling=0.0)
    rules = msgspec.structs.replace(HOPELESS.rules, deadline_s=2000.0)
    patient = msgspec.structs.replace(HOPELESS, rules=rules, max_attempts=3, chaos=chaos)
    played = [World(seed, patient, shell).run(SMALL_STEPS) for seed in range(200)]
    return sum(world.shell.core.counts["dropped.late_sibling"] for world in played)


def test_no_group_goes_on_without_a_slot_that_is_attempted_again():
    assert late_siblings(Shell) == 0


class _Edits(Shell):
    """Has the ends of episodes changed before they are taken."""

    def decisions(self, batch: list[bytes]) -> Iterator[do.Effect]:
        return super().decisions([self.edit_if_end(body) for body in batch])

    def edit_if_end(self, body: bytes) -> bytes:
        end = decode(body)
        return encode(self.edit(end)) if isinstance(end, EpisodeEnd) else body

    def edit(self, end: EpisodeEnd) -> EpisodeEnd:
        raise NotImplementedError


class HearsOfNoLastAttempts(_Edits):
    def edit(self, end: EpisodeEnd) -> EpisodeEnd:
        return msgspec.structs.replace(end, final=False)


class TakesEveryAttemptForTheLast(_Edits):
    def edit(self, end: EpisodeEnd) -> EpisodeEnd:
        return msgspec.structs.replace(end, final=True)


class ForgetsWhatWasGivenUp(Shell):
    def decisions(self, batch: list[bytes]) -> Iterator[do.Effect]:
        return (effect for effect in super().decisions(batch) if not isinstance(effect, do.GiveUpSlot))


class KeepsWhatWasGivenUp(Shell):
    def decisions(self, batch: list[bytes]) -> Iterator[do.Effect]:
        return (effect for effect in super().decisions(batch) if not isinstance(effect, do.ForgetGivenUp))


def test_a_collector_that_mistakes_what_is_given_up_is_found_out():
    with pytest.raises(BrokenError, match="nothing moves any more"):
        worlds(0, 20, FOR_EVER, HearsOfNoLastAttempts, num_steps=SMALL_STEPS)
    assert late_siblings(TakesEveryAttemptForTheLast) > 0
    with pytest.raises(BrokenError, match="a restart changed the memory"):
        worlds(0, 100, HOPELESS, ForgetsWhatWasGivenUp, num_steps=100)
    with pytest.raises((BrokenError, CollectorError)):
        worlds(0, 100, HOPELESS, KeepsWhatWasGivenUp, num_steps=SMALL_STEPS)


class AcknowledgesFirst(Shell):
    def work(self) -> Iterator[str]:
        while True:
            batch = self.world.deliver()
            self.world.acknowledge(len(batch))
            yield "acknowledged"
            yield from self.decide(batch)
            yield "committed"
            yield from self.publish()


class MarksBeforePublishing(Shell):
    def publish(self) -> Iterator[str]:
        self.confirmed += self.outgoing
        yield from self.decide([])
        yield "marked"
        yield from super().publish()


class KnowsNoSlots(Shell):
    def make_core(self) -> Core:
        core = super().make_core()
        core.run.past = _WithoutSlots(core.run.past)
        return core

    def decisions(self, batch: list[bytes]) -> Iterator[do.Effect]:
        return (effect for effect in super().decisions(batch) if not isinstance(effect, do.WinSlot))


class _WithoutSlots:
    def __init__(self, past) -> None:
        self.ended = past.ended

    def winner(self, slot_id: str) -> None:
        return None

    def group_closed(self, group_id: str) -> bool:
        return False


class TakesTurnsTwice(Shell):
    def make_core(self) -> Core:
        return _TakesTurnsTwice(self.world.scene.rules, self.store, self.store.snapshot(), now=self.world.now)


class _TakesTurnsTwice(Core):
    def take(self, message: Message, body: bytes, now: float) -> list[do.Effect]:
        if isinstance(message, Turn) and (episode := self.episodes.open.get(message.episode_id)):
            episode.calls.pop(message.call_id, None)
        return super().take(message, body, now)


class KeepsOrphans(Shell):
    """Trains every answer that was sampled, received or not."""

    def decisions(self, batch: list[bytes]) -> Iterator[do.Effect]:
        return super().decisions([_anonymous(body) for body in batch])


def _anonymous(body: bytes) -> bytes:
    message = decode(body)
    if isinstance(message, Turn):
        return encode(msgspec.structs.replace(message, request_digest=""))
    if isinstance(message, EpisodeEnd):
        return encode(msgspec.structs.replace(message, calls=None))
    return body


class TakesTurnsAsAnswered(Shell):
    """Trains what is recorded, whether or not a proxy says that the answer was sent."""

    def decisions(self, batch: list[bytes]) -> Iterator[do.Effect]:
        return super().decisions([_unheard(body) for body in batch if not isinstance(decode(body), DeliveryReport)])


def _unheard(body: bytes) -> bytes:
    message = decode(body)
    return encode(msgspec.structs.replace(message, receipt=False)) if isinstance(message, Turn) else body


class ForgetsWhatProxiesSaid(Shell):
    def decisions(self, batch: list[bytes]) -> Iterator[do.Effect]:
        return (
            effect
            for effect in super().decisions(batch)
            if not (isinstance(effect, do.SaveTurn) and isinstance(decode(effect.body), DeliveryReport))
        )


class TrainsWithoutWhatWasRefused(Shell):
    def decisions(self, batch: list[bytes]) -> Iterator[do.Effect]:
        return super().decisions([body for body in batch if not isinstance(decode(body), RefusedTurn)])


class ForgetsEnds(Shell):
    def make_core(self) -> Core:
        core = super().make_core()
        core.run.past = _WithoutEnds(core.run.past)
        return core


class _WithoutEnds(_WithoutSlots):
    def __init__(self, past) -> None:
        self.winner, self.group_closed = past.winner, past.group_closed

    def ended(self, episode_id: str) -> EndedEpisode | None:
        return None


@pytest.mark.parametrize(
    "rule",
    [
        AcknowledgesFirst,
        MarksBeforePublishing,
        KnowsNoSlots,
        TakesTurnsTwice,
        KeepsOrphans,
        TakesTurnsAsAnswered,
        ForgetsWhatProxiesSaid,
        TrainsWithoutWhatWasRefused,
        ForgetsEnds,
    ],
)
@pytest.mark.parametrize("size", ["long", "small"])
def test_a_broken_rule_is_found_out(rule, size):
    chaos = Chaos(crash=0.2, vanishes=0.3, undead=0.8, meddling=0.0, spoilt=0.05)
    found = scene(num_clients=6, chaos=chaos) if size == "long" else small(num_tasks=2, chaos=chaos)
    num, steps = (100, 150) if size == "long" else (2000, SMALL_STEPS)
    with pytest.raises((BrokenError, CollectorError)):  # a table's primary key finds some first
        worlds(0, num, found, rule, num_steps=steps)


def test_an_acknowledgement_before_the_commit_loses_something_in_every_schedule_that_dies_between_them():
    calm = small(chaos=Chaos(crash=0.0, meddling=0.0))
    with pytest.raises(BrokenError):
        every_crash(0, calm, AcknowledgesFirst, num_steps=SMALL_STEPS)


class SendsNothingAgain(Shell):
    def make_core(self) -> Core:
        return _SendsNothingAgain(self.world.scene.rules, self.store, self.store.snapshot(), now=self.world.now)


class _SendsNothingAgain(Core):
    def resend_lost(self, queues: Collection[str]) -> list[do.Effect]:
        return []


def test_a_collector_that_sends_nothing_again_is_found_out():
    chaos = Chaos(crash=0.0, meddling=0.1)
    assert worlds(0, 200, small(num_tasks=2, chaos=chaos), num_steps=SMALL_STEPS) == 0
    with pytest.raises(BrokenError, match="nothing moves any more"):
        worlds(0, 200, small(num_tasks=2, chaos=chaos), SendsNothingAgain, num_steps=SMALL_STEPS)
