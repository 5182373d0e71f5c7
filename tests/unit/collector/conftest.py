"""A core on a store in memory, and short ways to say what clients, proxies and learners send."""

from __future__ import annotations

from array import array
from collections import defaultdict

import pytest

from swarmq.collector.decide import effects as do
from swarmq.collector.decide.core import AWAKE_S, Core
from swarmq.collector.decide.state import Rules
from swarmq.collector.service import build_rollout
from swarmq.event_fields import undescribed
from swarmq.messages import EpisodeBegin, EpisodeEnd, Event, Message, Rollout, Slot, StepReport, Turn, encode
from unit.collector.twin_store import TwinStore

RUN = "r"


def ids(*values: int) -> bytes:
    return array("i", values).tobytes()


def begin(episode: str = "e", task: str = "t", repeat: int = 0, **fields) -> EpisodeBegin:
    given = {"kind": "math", "group_size": 1, "policies": ("main",), "client_id": "c", **fields}
    return EpisodeBegin(run=RUN, episode_id=episode, slot=Slot(task_id=task, repeat=repeat), **given)


def turn(call: str = "a", episode: str = "e", *, prompt=(1, 2), sampled=(3,), **fields) -> Turn:
    given = {"policy": "main", "request_id": call, **fields}
    logprobs = array("f", [-0.5] * len(sampled)).tobytes()
    return Turn(
        run=RUN,
        episode_id=episode,
        call_id=call,
        prompt_ids=ids(*prompt),
        sampled_ids=ids(*sampled),
        logprobs=logprobs,
        **given,
    )


def end(episode: str = "e", status: str = "finished", reward: float = 1.0, **fields) -> EpisodeEnd:
    given = {"rewards": {"main": reward} if status == "finished" else {}, **fields}
    return EpisodeEnd(run=RUN, episode_id=episode, status=status, **given)


def consumed(
    *trained: str, policy: str = "main", version: int = 1, dropped: dict[str, str] | None = None
) -> StepReport:
    return StepReport(run=RUN, policy=policy, version=version, trained=trained, dropped=dropped or {})


class Bench:
    """What the service does, without a broker: every `take` is a transaction of its own."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.now = 1000.0
        self.store = TwinStore(run=RUN)
        self.core = Core(rules, self.store, self.store.snapshot(), now=self.now)
        self.effects: list[do.Effect] = []
        self.settle()

    def take(self, *messages: Message) -> None:
        for message in messages:
            self.run(self.core.take(message, encode(message), self.now))

    def wait(self, seconds: float) -> None:
        """Let time pass, with ticks as often as a collector needs them."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(self.now + AWAKE_S, until)
            self.run(self.core.tick(self.now))

    def sleep(self, seconds: float) -> None:
        """Be stopped for so long."""
        self.now += seconds
        self.run(self.core.tick(self.now))

    def run(self, effects: list[do.Effect]) -> None:
        with self.store.transaction():
            for effect in effects:
                self.store.write(effect)
        self.effects += effects
        for effect in effects:
            if isinstance(effect, do.Emit):
                event = Event(run=RUN, source="collector", name=effect.name, at=self.now, fields=dict(effect.fields))
                assert not undescribed(event)
        self.settle()

    def settle(self) -> None:
        with self.store.transaction():
            for effect in (settled := self.core.settle()):
                self.store.write(effect)
        self.effects += settled

    def restart(self) -> None:
        """Lose all memory."""
        self.core = Core(self.rules, self.store, self.store.snapshot(), now=self.now)

    @property
    def sent(self) -> list[do.Forward]:
        return [effect for effect in self.effects if isinstance(effect, do.Forward)]

    @property
    def episodes(self) -> list[Rollout]:
        return [message for item in self.sent if (message := build_rollout(self.store, item))]

    @property
    def tickets(self) -> dict[str, int]:
        """Tickets ever issued, by kind."""
        issued: dict[str, int] = defaultdict(int)
        for effect in self.effects:
            if isinstance(effect, do.IssueTicket):
                issued[effect.kind] += 1
        return dict(issued)

    @property
    def dropped(self) -> dict[str, int]:
        counts = self.core.counts
        return {name.removeprefix("dropped."): n for name, n in counts.items() if name.startswith("dropped.")}

    def events(self, name: str) -> list[dict]:
        return [dict(e.fields) for e in self.effects if isinstance(e, do.Emit) and e.name == name]

    def num_turns(self) -> int:
        return self.store._one("SELECT count(*) FROM turns")[0]

    def state(self, episode: str = "e") -> tuple[str, str]:
        ended = self.core.run.past.ended(episode)
        return (ended.state, ended.reason) if ended else ("open", "")


def rules(**fields) -> Rules:
    given = {
        "run": RUN,
        "trained": ("main",),
        "known": ("main",),
        "mix": {"math": 1.0},
        "group_size": 1,
        "groups_per_batch": 2,
        "min_group": 2,
        "max_staleness": 1,
        **fields,
    }
    return Rules(**given)


@pytest.fixture
def bench() -> Bench:
    return Bench(rules())


@pytest.fixture
def make_bench():
    return lambda **fields: Bench(rules(**fields))


@pytest.fixture
def say():
    """The messages: `say.begin(...)`, `say.turn(...)`, `say.end(...)`, `say.consumed(...)`, `say.ids(...)`."""

    class Say:
        begin = staticmethod(begin)
        turn = staticmethod(turn)
        end = staticmethod(end)
        consumed = staticmethod(consumed)
        ids = staticmethod(ids)

    return Say
