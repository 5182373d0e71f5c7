"""A small world around a core, driven by one seed: clients, a broker, a learner, and crashes between any two effects.

    clients ──pieces──> in ──> shell(core, store) ──> ready ──> learners ──Consumed──> in
       ^──────tickets────────────────┘

Everything that may go wrong does, as often as `Chaos` says: pieces sent twice and late, answers lost on the way to the
agent, agents that fail, vanish or come back from the dead, second attempts at a slot, a collector that dies between
delivery, commit, acknowledgement, publish and mark: at random, or at the steps that are asked for; and somebody who
deletes queues, empties them, or takes reports out of the inbox. `World.run` then lets the world come to rest and checks what
must hold for every schedule. Negative controls subclass `Shell` and break one rule each.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterator
from contextlib import suppress
from itertools import chain
from typing import Any

import msgspec

from swarmq.broker import topology
from swarmq.collector.decide import effects as do
from swarmq.collector.decide.core import Core
from swarmq.collector.decide.state import Rules, Usage
from swarmq.collector.report import state_fields
from swarmq.collector.service import build_rollout
from swarmq.collector.store import Store
from swarmq.messages import (
    DeliveryReport,
    EpisodeBegin,
    EpisodeEnd,
    Message,
    RefusedTurn,
    Rollout,
    Slot,
    StepReport,
    Turn,
    decode,
    encode,
    unpack_ids,
)
from unit.collector.memory_store import MemoryStore

RUN = "sim"
PAUSE_S = 25.0
"""How far the clock goes on when nothing else does."""
PATIENCE_S = 5000.0
"""How long nothing may move before the world is called stuck."""
EXPECTED_DROPS = {
    "superseded",
    "late_sibling",
    "group_too_small",
    "failed",
    "aborted",
    "silent",
    "no_turns",
    "unseen",
    "equal",
}
"""What may become of an episode when the pieces of each client arrive in the order they were sent."""
SPOILT_DROPS = {"refused_turn", "incomplete"}
"""And of one with a turn that nobody could read."""

OUTGOING = (do.Forward, do.IssueTicket)
STRIDE = 5
"""Steps of a client at a time when the world comes to rest."""


class BrokenError(AssertionError):
    """The world found a promise broken."""


class Chaos(msgspec.Struct, frozen=True, kw_only=True):
    """How often each thing goes wrong, as a share of the occasions."""

    twice: float = 0.1
    lost_answer: float = 0.15
    silent: float = 0.3
    """Attempts whose proxies do not say which answers were sent, as those of earlier versions."""
    mute: float = 0.2
    """Attempts that never call some policy."""
    spoilt: float = 0.0
    """Turns that cannot be read."""
    fails: float = 0.1
    vanishes: float = 0.1
    undead: float = 0.3
    """Of those that vanish: comes back and ends after all, while the slot is attempted again."""
    crash: float = 0.05
    equal: float = 0.15
    """Groups that a learner drops for equal rewards."""
    ticket_twice: float = 0.1
    """Clients that die between the confirm of a begin and the acknowledgement of its ticket."""
    meddling: float = 0.01
    """Somebody deletes or empties a queue of tickets or episodes, or takes the reports out of the inbox. Never at all:
    then nobody looks for what is lost either, so that a broken rule cannot hide behind it."""


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be done in a world, and by whom."""

    rules: Rules
    num_tasks: int = 4
    num_clients: int = 3
    max_calls: int = 3
    """Of a conversation."""
    max_attempts: int = 0
    """Failures after which a client gives a slot up and says so; 0: it never does."""
    order: str = "siblings"
    """`siblings`: repeats of a task one after another; `breadth`: all tasks once, then again; `shuffled`."""
    chaos: Chaos = Chaos()


# ---------------------------------------------------------------------------------------------- collector


class Shell:
    """What the service does, cut into steps that a crash can fall between."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.store = world.make_store(None, run=RUN) if world.make_store else MemoryStore(world.decoded)
        self.num_steps = 0
        self.restart()

    def step(self) -> str:
        """Go on to the next place to die at, and maybe do."""
        where = next(self.steps)
        self.num_steps += 1
        if self.num_steps in self.world.crash_at:
            self.world.crashes += 1
            self.crash()
        return where

    def restart(self) -> None:
        self.core = self.make_core()
        self.outgoing: deque[do.Effect] = deque(self.store.outbox())
        self.confirmed: list[do.Effect] = []
        self.steps = self.work()
        self.deciding, self.decided_at = False, 0.0

    def make_core(self) -> Core:
        return Core(self.world.scene.rules, self.store, self.store.snapshot(), now=self.world.now)

    def crash(self) -> None:
        before, deciding = self.memory(), self.deciding
        self.steps.close()
        self.world.redeliver()
        self.restart()
        if not deciding and self.memory() != before:
            raise BrokenError(f"a restart changed the memory: {before} became {self.memory()}")

    def memory(self) -> tuple[object, ...]:
        """What a restart must not change."""
        core = self.core
        credit = {kind: (k.allocated, k.trained, k.debt) for kind, k in core.tickets.kinds.items()}
        groups = {
            gid: (g.kind, g.size, g.running, sorted(g.winners), g.given_up) for gid, g in core.groups.open.items()
        }
        published = {gid: (g.pending, g.trained, g.members) for gid, g in core.groups.published.items()}
        opened = {
            e.episode_id: (e.begin, e.end, e.calls, e.taint, e.sent, e.withdrawn) for e in core.episodes.open.values()
        }
        ready = {policy: n for policy, n in core.groups.ready.items() if n}
        return state_fields(core) | {"groups_ready": ready}, credit, core.tickets.out, groups, published, opened

    def work(self) -> Iterator[str]:
        """One thing after another, for ever; each yield is a place to die."""
        while True:
            if batch := self.world.deliver():
                yield "delivered"
            if batch or self.confirmed or self.decided_at != self.world.now:
                yield from self.decide(batch)
                yield "committed"
                self.world.acknowledge(len(batch))
            yield "acknowledged"
            yield from self.publish()

    def catch_up(self) -> None:
        """Work until there is nothing left to do but to wait."""
        while self.step() != "acknowledged" or self.world.is_busy:
            pass
        while self.outgoing:
            self.step()

    def decide(self, batch: list[bytes]) -> Iterator[str]:
        effects: list[do.Effect] = []
        confirmed = len(self.confirmed)
        gone = frozenset(self.world.gone)
        issued_before = self.core.tickets.serial
        self.deciding = True
        with self.store.transaction():
            for effect in chain(self.core.resend_lost(gone) if gone else (), self.decisions(batch)):
                self.store.write(effect)
                effects.append(effect)
            yield "written"
        self.deciding = False
        self.world.gone -= gone
        del self.confirmed[:confirmed]
        outgoing = [effect for effect in effects if isinstance(effect, OUTGOING)]
        self.outgoing += outgoing
        if issued := Counter(
            effect.kind
            for effect in outgoing
            if isinstance(effect, do.IssueTicket) and int(effect.ticket_id.partition(".")[2]) > issued_before
        ):
            self.world.check_credit(self.core, issued)

    def decisions(self, batch: list[bytes]) -> Iterator[do.Effect]:
        for item in self.confirmed:
            if isinstance(item, do.IssueTicket):
                yield from self.core.confirm_ticket(item.ticket_id)
            else:
                yield from self.core.confirm_forward(item.episode_id, item.policy)
        for body in batch:
            yield from self.core.take(self.world.decoded(body), body, self.world.now)
        if self.decided_at != self.world.now:
            yield from self.core.tick(self.world.now)
            if self.world.chaos.meddling and not self.outgoing and not self.world.inbox:
                waiting = {kind: len(self.world.tickets[kind]) for kind in self.world.scene.rules.mix}
                yield from self.core.check_tickets(waiting, self.world.now)
        yield from self.core.settle()
        self.decided_at = self.world.now

    def publish(self) -> Iterator[str]:
        while self.outgoing:
            item = self.outgoing.popleft()
            while self.world.queue_of(item) in self.world.gone:
                yield from self.decide([])
            if isinstance(item, do.IssueTicket):
                self.world.tickets[item.kind].append(item.ticket_id)
            elif message := build_rollout(self.store, item):
                self.world.ready[item.policy].append(message)
            yield "published"
            self.confirmed.append(item)


# ------------------------------------------------------------------------------------------------ clients


class Truth(msgspec.Struct, kw_only=True):
    """What really happened in an attempt, which only its client knows."""

    slot: Slot
    kind: str
    answered: dict[str, tuple[str, tuple[int, ...]]] = {}
    """Call -> policy and full prompt, of the calls whose answers the agent received."""
    spoilt: bool = False
    """One of its turns was."""
    ended: bool = False
    final: bool = False
    """It failed, and no attempt at its slot follows."""


class Client:
    """An agent host: takes a ticket, attempts slots of any kind that has one, and survives its own mistakes."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.news: list[DeliveryReport] = []
        """What proxies have not said yet."""
        self.steps = self.work()

    def work(self) -> Iterator[None]:
        world, rng, chaos = self.world, self.world.rng, self.world.chaos
        while True:
            kinds = [kind for kind in world.scene.rules.mix if world.slots[kind] and world.tickets[kind]]
            if not kinds:
                yield
                continue
            kind = rng.choice(kinds)
            ticket, (slot, attempt) = world.tickets[kind].popleft(), world.slots[kind].popleft()
            world.busy += 1
            for _ in self.attempt(slot, kind, attempt, ticket):
                world.stirred()
                yield
            world.busy -= 1
            if rng.random() < chaos.ticket_twice:
                world.tickets[kind].append(ticket)

    def attempt(self, slot: Slot, kind: str, attempt: int, ticket: str) -> Iterator[None]:
        world, rules = self.world, self.world.scene.rules
        episode_id = f"e{len(world.truths)}"
        truth = world.truths[episode_id] = Truth(slot=slot, kind=kind)
        world.send(
            EpisodeBegin(
                run=RUN,
                episode_id=episode_id,
                slot=slot,
                kind=kind,
                group_size=rules.group_size,
                policies=rules.trained,
                client_id="c",
                attempt=attempt,
                ticket_id=ticket,
                idle_timeout_s=rules.idle_timeout_s,
            )
        )
        yield
        self.news.clear()
        yield from self.calls(episode_id, truth)
        yield from self.end(episode_id, truth, attempt)
        self.report_answers(episode_id)  # at once: an end does not wait for ever

    def report_answers(self, episode_id: str) -> None:
        """Let the proxies report which answers they have sent and which not."""
        if self.news:
            told = {
                name: {episode_id: tuple(call for one in self.news for call in getattr(one, name).get(episode_id, ()))}
                for name in ("sent", "withdrawn")
            }
            self.world.send(DeliveryReport(run=RUN, served_id=self.news[0].served_id, **told))
            self.news.clear()

    def end(self, episode_id: str, truth: Truth, attempt: int) -> Iterator[None]:
        world, rng, chaos, rules = self.world, self.world.rng, self.world.chaos, self.world.scene.rules
        slot, kind, fate = truth.slot, truth.kind, rng.random()
        if fate < chaos.vanishes:
            world.slots[kind].insert(rng.choice([0, len(world.slots[kind])]), (slot, attempt + 1))
            if rng.random() > chaos.undead:
                return
            for _ in range(rng.randrange(20)):
                yield
        elif fate < chaos.vanishes + chaos.fails:
            status = rng.choice(["failed", "aborted"])
            truth.final = 0 < world.scene.max_attempts <= attempt + 1
            world.send(EpisodeEnd(run=RUN, episode_id=episode_id, status=status, final=truth.final))
            if not truth.final:
                world.slots[kind].append((slot, attempt + 1))
            return
        named = tuple(truth.answered) if rng.random() < 0.5 else None
        rewards = {policy: float(rng.randrange(2)) for policy in rules.trained}
        truth.ended = True
        world.send(EpisodeEnd(run=RUN, episode_id=episode_id, status="finished", rewards=rewards, calls=named))
        if rng.random() < chaos.twice:  # another outcome for the same episode: the first one counts
            world.send(
                EpisodeEnd(run=RUN, episode_id=episode_id, status="finished", rewards=dict.fromkeys(rewards, 9.0))
            )

    def calls(self, episode_id: str, truth: Truth) -> Iterator[None]:
        """A conversation per policy, each call continuing the one before; answers get lost and are asked for again."""
        rng, chaos = self.world.rng, self.world.chaos
        serial = 0
        speaks = rng.random() >= chaos.silent
        for policy in self.world.scene.rules.trained:
            last: tuple[str, tuple[int, ...]] | None = None
            num = rng.randrange(1, self.world.scene.max_calls + 1) if rng.random() >= chaos.mute else 0
            for number in range(num):
                parent, known = last or (None, ())
                # without a retry number a lost answer shows only if a later call continues its twin
                headed = number == num - 1 or rng.random() < 0.7
                lost = rng.random() < chaos.lost_answer
                prompt = (rng.randrange(99),)
                gives_up = lost and speaks and number == num - 1 and rng.random() < 0.5
                for retry in range(2 if lost and not gives_up else 1):
                    call_id, serial = f"c{serial}", serial + 1
                    sampled = tuple(rng.randrange(99) for _ in range(rng.randrange(1, 3)))
                    turn = Turn(
                        run=RUN,
                        episode_id=episode_id,
                        policy=policy,
                        call_id=call_id,
                        request_id=call_id,
                        request_digest=f"{policy}{number}",
                        retry=retry if headed else 0,
                        counts_retries=headed,
                        receipt=speaks,
                        parent=parent,
                        shared=len(known),
                        prompt_ids=array("i", prompt).tobytes(),
                        sampled_ids=array("i", sampled).tobytes(),
                        logprobs=array("f", [-1.0] * len(sampled)).tobytes(),
                    )
                    spoilt = bool(chaos.spoilt) and rng.random() < chaos.spoilt
                    truth.spoilt |= spoilt
                    refused = RefusedTurn(run=RUN, episode_id=episode_id, call_id=call_id, reason="spoilt")
                    self.world.send(refused if spoilt else turn)
                    if speaks:
                        self.say(episode_id, call_id, is_lost=lost and not retry, repeats=not gives_up)
                    yield
                if gives_up:
                    break
                truth.answered[call_id] = (policy, known + prompt)
                last = (call_id, known + prompt + sampled)

    def say(self, episode_id: str, call_id: str, *, is_lost: bool, repeats: bool) -> None:
        """What the proxy says of an answer, now or later. One that was lost it has refused, or was killed over, or it has sent
        it: then only an agent that asks again can give that away."""
        told = {episode_id: (call_id,)}
        fates = [{"withdrawn": told}, {}, *([{"sent": told}] if repeats else [])] if is_lost else [{"sent": told}]
        if fate := self.world.rng.choice(fates):
            self.news.append(DeliveryReport(run=RUN, served_id=f"{episode_id}.{call_id}", **fate))
        if self.world.rng.random() < 0.5:
            self.report_answers(episode_id)


# ------------------------------------------------------------------------------------------------ learner


class Learner:
    """Takes whole groups, drops some for equal rewards at once, trains batches, reports both."""

    def __init__(self, world: World, policy: str) -> None:
        self.world, self.policy = world, policy
        self.seen: dict[str, Rollout] = {}
        self.groups: dict[str, list[Rollout]] = defaultdict(list)
        self.whole: list[list[Rollout]] = []
        self.trained: list[str] = []
        self.record = self.version = 0
        self.reports: list[StepReport] = []
        self.asked = False

    def step(self) -> None:
        ready, rules = self.world.ready[self.policy], self.world.scene.rules
        while ready:
            self.take(ready.popleft())
        if len(self.whole) >= rules.groups_per_batch:
            batch, self.whole = self.whole[: rules.groups_per_batch], self.whole[rules.groups_per_batch :]
            self.version += 1
            self.report([episode.episode_id for group in batch for episode in group], {})

    def take(self, episode: Rollout) -> None:
        self.asked = self.asked and episode.episode_id in self.seen
        if self.seen.setdefault(episode.episode_id, episode) != episode:
            raise BrokenError(f"{episode.episode_id} was forwarded twice, and differently")
        members = self.groups[episode.group_id]
        if all(member.episode_id != episode.episode_id for member in members):
            members.append(episode)
            if len(members) == episode.group_members:
                if self.world.rng.random() < self.world.chaos.equal:
                    self.report([], {member.episode_id: "equal" for member in members})
                else:
                    self.whole.append(members)

    def report(self, trained: list[str], dropped: dict[str, str]) -> None:
        self.record += 1
        self.trained += trained
        self.world.stirred()
        self.reports.append(
            StepReport(
                run=RUN,
                policy=self.policy,
                record=self.record,
                version=self.version,
                trained=tuple(trained),
                dropped=dropped,
            )
        )
        self.world.send(self.reports[-1])

    def ask(self) -> None:
        """Nothing comes: tell the reports again, and ask for what was not reported."""
        if not self.asked:
            self.asked = True
            for report in self.reports:
                self.world.send(report)
            self.world.send(StepReport(run=RUN, policy=self.policy, version=self.version, trained=()))

    def lacks(self, episode_id: str) -> bool:
        """The collector waits for a report on an episode that is not here, or whose report it has not got."""
        reported = any(episode_id in report.trained or episode_id in report.dropped for report in self.reports)
        return reported or episode_id not in self.seen


# -------------------------------------------------------------------------------------------------- world


class Chance(random.Random):
    """Small choices at a third of the cost; their bias is of no account here."""

    def randrange(self, start: int, stop: int | None = None, step: int = 1) -> int:
        low, high = (0, start) if stop is None else (start, stop)
        return low + int(self.random() * (high - low))

    def choice(self, seq: Any) -> Any:
        return seq[int(self.random() * len(seq))]


class World:
    def __init__(
        self,
        seed: int,
        scene: Scene,
        shell: type[Shell] = Shell,
        *,
        store: type[Store] | None = None,
        crash_at: Collection[int] = (),
    ) -> None:
        """`store`: the real one, and messages that are decoded whenever they are read. `crash_at`: steps of the shell,
        from 1 on, besides those that chance chooses."""
        self.rng = Chance(seed)
        self.known: dict[bytes, Message] | None = None if store else {}
        self.make_store = store
        self.crash_at = crash_at
        self.scene, self.chaos = scene, scene.chaos
        self.now = 1000.0
        self.inbox: deque[bytes] = deque()
        self.held: list[bytes] = []
        self.later: list[bytes] = []
        self.ready: dict[str, deque[Rollout]] = {policy: deque() for policy in scene.rules.trained}
        self.tickets: dict[str, deque[str]] = defaultdict(deque)
        self.truths: dict[str, Truth] = {}
        self.busy = 0
        self.overdrafts = 0
        self.gone: set[str] = set()
        """Queues that somebody deleted and nobody has made again."""
        self.moved, self.resting = True, False
        self.crashes = 0
        self.slots = self._slots()
        self.clients = [Client(self) for _ in range(scene.num_clients)]
        self.learners = [Learner(self, policy) for policy in scene.rules.trained]
        self.shell = shell(self)

    def run(self, num_steps: int = 150) -> World:
        """A stretch of chaos, then rest, then the reckoning."""
        for _ in range(num_steps):
            self.act()
            if self.rng.random() < self.chaos.meddling:
                self.meddle()
            if self.rng.random() < self.chaos.crash:
                self.crashes += 1
                self.shell.crash()
        self.chaos = msgspec.structs.replace(
            self.chaos, twice=0.0, crash=0.0, ticket_twice=0.0, vanishes=0.0, fails=0.0
        )
        self.rest()
        self.reckon()
        return self

    def act(self) -> None:
        """Somebody, chosen at random, does the next thing."""
        choice = self.rng.randrange(10)
        if choice < 5:
            next(self.rng.choice(self.clients).steps)
        elif choice < 8:
            self.shell.step()
        elif choice < 9:
            self.rng.choice(self.learners).step()
            if self.later and self.rng.random() < 0.5:
                self.enqueue(self.later.pop(self.rng.randrange(len(self.later))))
        else:
            self.now += self.rng.choice([0.1, 1.0, 10.0, 60.0])

    def rest(self) -> None:
        """Everybody works until all slots were attempted and nothing moves. Raises BrokenError if it never ends."""
        self.resting = True
        for body in self.later:
            self.enqueue(body)
        self.later.clear()
        waited_s = 0.0
        while waited_s < PATIENCE_S:
            self.moved = False
            for client in self.clients:
                for _ in range(STRIDE):
                    next(client.steps)
            self.shell.catch_up()
            for learner in self.learners:
                learner.step()
            if not self.moved and not self.is_busy:
                if (
                    self.done
                    and not self.busy
                    and not self.shell.core.episodes.open
                    and not self.waiting
                    and not self.astray
                ):
                    return
                for learner in self.learners if self.chaos.meddling else ():
                    learner.ask()
                self.now += PAUSE_S
                waited_s += PAUSE_S
            else:
                waited_s = 0.0
        left = {kind: len(slots) for kind, slots in self.slots.items()}
        raise BrokenError(f"nothing moves any more: {left} slots left, {state_fields(self.shell.core)}")

    # ---- the broker

    def send(self, message: Message) -> None:
        body = encode(message)
        if self.known is not None:
            self.known[body] = message
        self.enqueue(body)
        if self.rng.random() < self.chaos.twice:
            self.later.append(body)

    def enqueue(self, body: bytes) -> None:
        self.inbox.append(body)

    @property
    def is_busy(self) -> bool:
        """Messages wait for the collector."""
        return bool(self.inbox)

    def decoded(self, body: bytes) -> Message:
        return (self.known or {}).get(body) or decode(body)

    def deliver(self) -> list[bytes]:
        most = len(self.inbox) if self.resting else min(len(self.inbox), self.rng.randrange(1, 8))
        batch = [self.inbox.popleft() for _ in range(most)]
        self.held += batch
        return batch

    def acknowledge(self, num: int) -> None:
        del self.held[:num]

    def redeliver(self) -> None:
        self.inbox.extendleft(reversed(self.held))
        self.held.clear()

    def meddle(self) -> None:
        queues = {topology.ready(RUN, policy): queue for policy, queue in self.ready.items()}
        queues |= {topology.tickets(RUN, kind): self.tickets[kind] for kind in self.scene.rules.mix}
        if (choice := self.rng.randrange(3)) == 0:
            self.inbox = deque(body for body in self.inbox if not isinstance(self.decoded(body), StepReport))
            return
        name = self.rng.choice(list(queues))
        queues[name].clear()
        if choice == 1:
            self.gone.add(name)

    def queue_of(self, item: do.Effect) -> str:
        if isinstance(item, do.IssueTicket):
            return topology.tickets(RUN, item.kind)
        assert isinstance(item, do.Forward)
        return topology.ready(RUN, item.policy)

    # ---- bookkeeping

    def stirred(self) -> None:
        self.moved = True

    @property
    def done(self) -> bool:
        """No slots are left; or the mix waits for a kind that has none left."""
        dry = any(self.tickets[kind] and not slots for kind, slots in self.slots.items())
        return dry or not any(self.slots.values())

    @property
    def waiting(self) -> bool:
        return any(group.winners for group in self.shell.core.groups.open.values())

    @property
    def astray(self) -> bool:
        """Somebody's meddling is not made good yet."""
        core = self.shell.core
        pending = ((learner, group) for learner in self.learners for group in core.groups.published.values())
        return any(self.nowhere(kind) for kind in core.tickets.out) or any(
            learner.lacks(episode_id)
            for learner, group in pending
            for episode_id in group.pending.get(learner.policy, ())
        )

    def nowhere(self, kind: str) -> set[str]:
        """Tickets that are out and that nobody can take. They are missed when the queue is empty: not while others lie in it
        and there is nothing to take them for."""
        queue, out = set(self.tickets[kind]), self.shell.core.tickets.out[kind]
        return set() if queue and not self.slots[kind] else out - queue

    def _slots(self) -> dict[str, deque[tuple[Slot, int]]]:
        rules = self.scene.rules
        slots: dict[str, deque[tuple[Slot, int]]] = {}
        for kind in rules.mix:
            pairs = [(t, r) for t in range(self.scene.num_tasks) for r in range(rules.group_size)]
            if self.scene.order == "breadth":
                pairs.sort(key=lambda pair: pair[1])
            elif self.scene.order == "shuffled":
                self.rng.shuffle(pairs)
            slots[kind] = deque((Slot(task_id=f"{kind}{t}", repeat=r), 0) for t, r in pairs)
        return slots

    # ---- what must hold

    def check_credit(self, core: Core, issued: Counter[str]) -> None:
        """Tickets are issued within the window; beyond it only for a group that lacks members while learners starve,
        and only when the kind has no ticket out and nothing running."""
        usage = core.groups.usage()
        starved = bool(core.groups.short_of(owed=1))
        for kind, num in issued.items():
            used, out = usage.get(kind, Usage()), len(core.tickets.out[kind])
            if out + used.running + used.waiting + used.published > core.tickets.window(kind):
                self.overdrafts += 1
                if not starved or used.running or out > num or num >= self.scene.rules.group_size:
                    raise BrokenError(
                        f"{kind}: {num} tickets issued, {out} out, {used}, window {core.tickets.window(kind)}"
                    )

    def reckon(self) -> None:
        core, store = self.shell.core, self.shell.store
        ledger = read_states(store)
        self._each_episode_has_one_fate(ledger)
        self._each_slot_is_trained_once()
        self._trained_turns_are_the_answered_ones()
        self._no_finished_slot_is_lost(ledger)
        self._sums_agree(core, ledger)
        self._no_credit_leaked(core)
        self._no_group_waits_in_vain(core)

    def _each_episode_has_one_fate(self, ledger: dict[str, tuple[str, str]]) -> None:
        for episode_id in self.truths:
            state, reason = ledger.get(episode_id, ("missing", ""))
            expected = EXPECTED_DROPS | SPOILT_DROPS if self.truths[episode_id].spoilt else EXPECTED_DROPS
            if state not in {"trained", "dropped", "published"} or (state == "dropped" and reason not in expected):
                raise BrokenError(f"{episode_id} ended as {state} {reason}")
            arrived = sum(episode_id in learner.seen for learner in self.learners)
            if (state in {"trained", "published"}) > arrived:
                raise BrokenError(f"{episode_id} is {state}, and no learner has got it")
        if ledger.keys() - self.truths.keys():
            raise BrokenError(f"episodes that nobody began: {ledger.keys() - self.truths.keys()}")

    def _each_slot_is_trained_once(self) -> None:
        for learner in self.learners:
            times = Counter(self.truths[episode_id].slot.id for episode_id in learner.seen)
            twice = [slot for slot, n in times.items() if n > 1]
            if twice:
                raise BrokenError(f"slots {twice} were forwarded to {learner.policy} more than once")

    def _trained_turns_are_the_answered_ones(self) -> None:
        for learner in self.learners:
            for episode in learner.seen.values():
                answered = self.truths[episode.episode_id].answered
                wanted = {call: prompt for call, (policy, prompt) in answered.items() if policy == learner.policy}
                with suppress(KeyError):
                    if resolve(episode.turns) == wanted and len(episode.turns) == len(wanted):
                        continue
                raise BrokenError(
                    f"{episode.episode_id}: turns {[t.call_id for t in episode.turns]}, answered {list(wanted)}"
                )

    def _no_finished_slot_is_lost(self, ledger: dict[str, tuple[str, str]]) -> None:
        """A slot with an outcome was forwarded; or its outcome was dropped for a reason that explains it."""
        forwarded = {self.truths[e].slot.id for learner in self.learners for e in learner.seen}
        for episode_id, truth in self.truths.items():
            _, reason = ledger[episode_id]
            if reason == "superseded" and truth.slot.id not in forwarded and not self._slot_dropped(truth.slot, ledger):
                raise BrokenError(f"{episode_id} was superseded by nobody")
            if reason in {"no_turns", "unseen"} and truth.answered:
                raise BrokenError(f"{episode_id} lost its turns")
            if truth.ended and reason in {"failed", "aborted"}:
                raise BrokenError(f"{episode_id} finished and is counted as {reason}")

    def _slot_dropped(self, slot: Slot, ledger: dict[str, tuple[str, str]]) -> bool:
        same = [ledger[e] for e, truth in self.truths.items() if truth.slot == slot]
        return ("dropped", "group_too_small") in same

    def _sums_agree(self, core: Core, ledger: dict[str, tuple[str, str]]) -> None:
        told = state_fields(core)
        ends = told["trained"] + told["in_learners"] + told["waiting"] + told["open"] + sum(told["dropped"].values())
        if not told["begun"] == ends == len(self.truths):
            raise BrokenError(f"{len(self.truths)} began; the collector says {told}")
        if Counter(reason for state, reason in ledger.values() if state == "dropped") != Counter(told["dropped"]):
            raise BrokenError(f"counted {told['dropped']}, the ledger says otherwise")

    def _no_credit_leaked(self, core: Core) -> None:
        """With nobody running, what is not in learners' hands is out as tickets, and every such ticket can be taken."""
        usage = core.groups.usage()
        for kind in self.scene.rules.mix:
            out = core.tickets.out[kind]
            published = usage[kind].published if kind in usage else 0
            if len(out) + published < core.tickets.window(kind):
                raise BrokenError(
                    f"{kind}: {len(out)} tickets out, {published} in learners, of {core.tickets.window(kind)}"
                )
            if missing := self.nowhere(kind):
                raise BrokenError(f"{kind}: tickets {missing} are out, but nobody can take them")
        num_groups = sum(core.tickets.window(kind) for kind in self.scene.rules.mix) / self.scene.rules.group_size
        if num_groups < (self.scene.rules.max_staleness + 1) * self.scene.rules.groups_per_batch:
            raise BrokenError(f"the window is {num_groups} groups")

    def _no_group_waits_in_vain(self, core: Core) -> None:
        """A group without members is forgotten when its last slot is given up, or after a deadline; by the store as well."""
        for group_id, group in core.groups.open.items():
            if not group.lacks or self.now - max(group.given_up.values(), default=0.0) >= core.rules.deadline_s:
                raise BrokenError(f"group {group_id} is kept, and nothing of it will come: {group}")
        if kept := {group_id for group_id, *_ in self.shell.store.snapshot().given_up} - core.groups.open.keys():
            raise BrokenError(f"slots given up of groups {kept} are kept, which are gone")


def read_states(store: Store | MemoryStore) -> dict[str, tuple[str, str]]:
    """Return episode -> (state, reason) for every episode that ever began."""
    if isinstance(store, MemoryStore):
        return dict(store.states)
    return {name: (state, reason) for name, state, reason in store._all("SELECT id, state, reason FROM episodes")}


def resolve(turns: tuple[Turn, ...]) -> dict[str, tuple[int, ...]]:
    """Full prompts, by following parents within what was sent. Raises KeyError where a parent is missing."""
    prompts: dict[str, tuple[int, ...]] = {}
    whole: dict[str | None, tuple[int, ...]] = {None: ()}
    for turn in turns:
        prompts[turn.call_id] = (*whole[turn.parent][: turn.shared], *unpack_ids(turn.prompt_ids))
        whole[turn.call_id] = (*prompts[turn.call_id], *unpack_ids(turn.sampled_ids))
    return prompts


def worlds(
    first_seed: int,
    num: int,
    scene: Scene,
    shell: type[Shell] = Shell,
    *,
    num_steps: int = 150,
    store: type[Store] | None = None,
) -> int:
    """Run that many worlds; the number of crashes they survived. Raises BrokenError naming the seed."""
    crashes = 0
    for seed in range(first_seed, first_seed + num):
        try:
            crashes += World(seed, scene, shell, store=store).run(num_steps).crashes
        except BrokenError as broken:
            raise BrokenError(f"seed {seed}: {broken}") from broken
    return crashes


def every_crash(seed: int, scene: Scene, shell: type[Shell] = Shell, *, num_steps: int) -> int:
    """One schedule over and over, with a crash after its first effect, its second, and so on to its last; how many."""
    at = 1
    while World(seed, scene, shell, crash_at={at}).run(num_steps).crashes:
        at += 1
    return at - 1
