"""The small world of `simulator.py` with collectors on several hosts and the log that they share.

    clients ──> in ──> the host that consumes it ──append──> log ──> all hosts, each at its own pace
                              └──────> ready, tickets

Besides all that goes wrong there, hosts are killed between any two effects, stopped for a while without noticing it, cut off from
the inbox while they still live, and suspected without reason; and the log loses its beginning. Negative controls subclass
`Host` or `LogReader` and break one rule each.
"""

from __future__ import annotations

import copy
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import suppress

import msgspec

from swarmq.broker import topology
from swarmq.collector.decide import effects as do
from swarmq.collector.decide.core import Core
from swarmq.collector.decide.log import LogPosition, LogReader, ReadResult
from swarmq.collector.service import build_rollout
from swarmq.collector.store import decode_rows, encode_rows
from swarmq.messages import LogEntry, Rollout
from unit.collector.memory_store import MemoryStore
from unit.collector.simulator import OUTGOING, PAUSE_S, RUN, BrokenError, Learner, Scene, World, read_states

NUM_HOSTS = 2
PAUSE, WAKE, SUSPECT, FORGET = 0.01, 0.02, 0.005, 0.02
"""How often, in a host's steps: it is stopped, is woken, suspects a leader that lives, and the log loses its beginning."""
PAUSE_BEFORE_PUBLISH = 0.1
"""How often it is stopped with a message in its hands."""
STRIDE = 5
"""Steps of hosts for one step of the world."""


class FencedError(Exception):
    """What a host decided does not count."""


class HostStore(MemoryStore):
    """A store with its place in the log. Bases are passed by their index in `bases`."""

    def __init__(self, world: World, bases: list[dict]) -> None:
        super().__init__(world.decoded)
        self._place: dict[None, LogPosition] = {}
        self._bases = bases

    def position(self) -> LogPosition:
        return self._place.get(None, LogPosition())

    def save_position(self, position: LogPosition) -> None:
        self._set(self._place, None, position)

    def dump(self) -> bytes:
        tables = {name: value for name, value in vars(self).items() if name not in {"_decoded", "_bases", "_undo"}}
        self._bases.append(copy.deepcopy(tables))
        return b"%d" % (len(self._bases) - 1)

    def replace(self, dumped: bytes) -> None:
        vars(self).update(copy.deepcopy(self._bases[int(dumped)]))


class Host:
    """What `standby.py` and `service.py` do on one host, cut into steps that a crash can fall between."""

    reader_type = LogReader

    def __init__(self, hosts: Hosts, name: str) -> None:
        self.hosts, self.world, self.name = hosts, hosts.world, name
        self.store = HostStore(hosts.world, hosts.bases)
        self.is_stopped = False
        self.num_starts = 0
        self.start()

    def start(self) -> None:
        self.num_starts += 1
        is_empty = not (self.store.states or self.store._credit)
        self.reader = self.reader_type(f"{self.name}{self.num_starts}", self.store.position(), is_empty=is_empty)
        self.core: Core | None = None
        self.outgoing: deque[do.Effect] = deque()
        self.confirmed: list[do.Effect] = []
        self.join_requests: list[str] = []
        self.undecided: list[do.Effect] = []
        """What the present transaction would publish."""
        self.decided_at = 0.0
        self.steps = self.work()

    def kill(self) -> None:
        self.steps.close()
        self.hosts.disconnect(self)
        self.is_stopped = False
        self.start()

    def work(self) -> Iterator[str]:
        while True:
            if self.reader.is_leading:
                with suppress(FencedError):
                    yield from self.lead()
                self.hosts.disconnect(self)
                self.core = None
                self.join_requests.clear()
            else:
                yield from self.follow()

    # ---- the log

    def append(self, what: str, **fields) -> None:
        position = self.reader.position
        entry = LogEntry(run=RUN, what=what, **{"log": position.log, "term": position.term, **fields})
        self.hosts.log.append(entry)
        self.world.stirred()

    def read_next(self) -> ReadResult | None:
        """Take the next entry and do what it says; None at the end of the log."""
        offset = max(self.reader.position.offset + 1, self.hosts.log_begins)
        if offset >= len(self.hosts.log):
            return None
        entry = self.hosts.log[offset]
        result = self.reader.read(entry, offset)
        self.world.stirred()
        if result is ReadResult.JOIN_REQUESTED:
            self.join_requests.append(entry.join)
        elif result is ReadResult.GAP:
            self.append("join", sender=self.reader.me, join=self.reader.join)
        elif result is ReadResult.FOREIGN:
            raise BrokenError(f"{self.name} has a store of its own")
        return result

    def follow(self) -> Iterator[str]:
        result = self.read_next()
        if result is ReadResult.APPLY or result is ReadResult.REPLACE:
            if result is ReadResult.REPLACE:
                self.store.replace(self.reader.body)
            with self.store.transaction():
                for effect in decode_rows(self.reader.body) if result is ReadResult.APPLY else ():
                    self.store.write(effect)
                yield "applying"
                self.store.save_position(self.reader.position)
        elif result is ReadResult.WON or result is ReadResult.LOST:
            with self.store.transaction():
                self.store.save_position(self.reader.position)
        elif (self.reader.is_complete or not self.reader.has_begun) and self.hosts.seems_leaderless(self):
            self.claim()
        yield "followed"

    def claim(self) -> None:
        log = self.reader.position.log or self.reader.me
        self.append("claim", term=self.reader.position.term + 1, sender=self.reader.me, log=log)

    # ---- leading

    def lead(self) -> Iterator[str]:
        world = self.world
        snapshot = self.store.snapshot()
        self.core = Core(world.scene.rules, self.store, snapshot, now=world.now)
        self.confirmed = []
        yield from self.decide([], lost=self.what_learners_refuse())
        self.outgoing = deque(self.store.outbox())
        while True:
            batch = self.hosts.deliver(self)
            yield "delivered"
            if batch or self.confirmed or self.decided_at != world.now:
                yield from self.decide(batch)
                yield "committed"
                self.hosts.acknowledge(self, len(batch))
            yield "acknowledged"
            yield from self.publish()
            while self.read_next():
                self.check()
            self.check()
            for join in self.join_requests:
                self.append("copy", number=self.reader.position.number, join=join, body=self.store.dump())
            self.join_requests.clear()

    def what_learners_refuse(self) -> list[str]:
        """The queues whose rollouts are of an older term."""
        return [topology.ready(RUN, policy) for policy in self.world.scene.rules.trained]

    def check(self) -> None:
        if not self.reader.is_leading:
            raise FencedError

    def decide(self, batch: list[bytes], lost: list[str] = []) -> Iterator[str]:  # noqa: B006
        core = self.core
        assert core is not None
        effects: list[do.Effect] = []
        num_confirmed, issued_before = len(self.confirmed), core.tickets.serial
        with self.store.transaction():
            for effect in self.decisions(batch, lost):
                self.store.write(effect)
                effects.append(effect)
            self.undecided = [effect for effect in effects if isinstance(effect, OUTGOING)]
            yield from self.before_append()
            if body := encode_rows(effects):
                self.append("transaction", number=self.reader.position.number + 1, body=body)
                yield "appended"
                yield from self.read_back()
                self.store.save_position(self.reader.position)
                yield "counts"
        del self.confirmed[:num_confirmed]
        self.outgoing += self.undecided
        if issued := Counter(
            effect.kind
            for effect in self.undecided
            if isinstance(effect, do.IssueTicket) and int(effect.ticket_id.partition(".")[2]) > issued_before
        ):
            self.world.check_credit(core, issued)

    def before_append(self) -> Iterator[str]:
        yield "written"

    def read_back(self) -> Iterator[str]:
        while self.read_next() is not ReadResult.CONFIRMED:
            self.check()
            yield "reading back"

    def decisions(self, batch: list[bytes], lost: list[str]) -> Iterator[do.Effect]:
        core, now = self.core, self.world.now
        assert core is not None
        if lost:
            yield from core.resend_lost(lost)
        for item in self.confirmed:
            if isinstance(item, do.IssueTicket):
                yield from core.confirm_ticket(item.ticket_id)
            elif isinstance(item, do.Forward):
                yield from core.confirm_forward(item.episode_id, item.policy)
        for body in batch:
            yield from core.take(self.world.decoded(body), body, now)
        if self.decided_at != now:
            yield from core.tick(now)
        yield from core.settle()
        self.decided_at = now

    def publish(self) -> Iterator[str]:
        term = self.reader.position.term
        while self.outgoing:
            item = self.outgoing.popleft()
            message = build_rollout(self.store, item, term=term) if isinstance(item, do.Forward) else None
            yield "built"
            if isinstance(item, do.IssueTicket):
                self.world.tickets[item.kind].append(item.ticket_id)
            elif message:
                self.world.ready[item.policy].append(message)
            yield "published"
            self.confirmed.append(item)


class Hosts:
    """The hosts of a world, where `simulator.World` expects a shell."""

    host_type = Host

    def __init__(self, world: World) -> None:
        self.world = world
        self.log: list[LogEntry] = []
        self.log_begins = 0
        self.bases: list[dict] = []
        self.consumer: Host | None = None
        """The host to which the broker delivers the inbox."""
        self.takeovers = 0
        self.hosts = [self.host_type(self, name) for name in "abc"[:NUM_HOSTS]]
        while self.leader is None:
            next(self.hosts[0].steps)

    @property
    def leader(self) -> Host | None:
        """The host with the newest term, if it leads."""
        leading = [host for host in self.hosts if host.reader.is_leading and host.core]
        return max(leading, key=lambda host: host.reader.position.term, default=None)

    @property
    def core(self) -> Core:
        assert self.leader is not None
        assert self.leader.core is not None
        return self.leader.core

    @property
    def store(self) -> HostStore:
        assert self.leader is not None
        return self.leader.store

    # ---- the broker

    def deliver(self, host: Host) -> list[bytes]:
        if self.consumer is None:
            self.consumer = host
        return self.world.deliver() if self.consumer is host else []

    def acknowledge(self, host: Host, num: int) -> None:
        if self.consumer is host:  # else its session is lost, and with it the acknowledgement
            self.world.acknowledge(num)

    def disconnect(self, host: Host) -> None:
        if self.consumer is host:
            self.consumer = None
            self.world.redeliver()

    def seems_leaderless(self, host: Host) -> bool:
        if self.world.resting:
            return self.consumer is None and not any(one.reader.is_leading for one in self.hosts)
        return self.consumer is None or self.world.rng.random() < SUSPECT

    # ---- what the world does

    def step(self) -> None:
        for _ in range(STRIDE):
            self.stride()

    def stride(self) -> None:
        rng = self.world.rng
        host = rng.choice(self.hosts)
        if host.is_stopped:
            host.is_stopped = rng.random() > WAKE
            return
        where = next(host.steps)
        if rng.random() < (PAUSE_BEFORE_PUBLISH if where == "built" else PAUSE):
            host.is_stopped = True
            if rng.random() < 0.5:
                self.disconnect(host)
        if rng.random() < FORGET and (leader := self.leader) and not leader.store._undo:
            self.log_begins = max(self.log_begins, min(leader.store.position().offset + 1, len(self.log) - 1))

    def crash(self) -> None:
        self.world.rng.choice(self.hosts).kill()

    def catch_up(self) -> None:
        """All hosts work until one leads, has nothing to do, and all have read the log."""
        for host in self.hosts:
            host.is_stopped = False
        idle = 0
        for _ in range(20_000):
            for host in self.hosts:
                where = next(host.steps)
                is_idle = host is self.leader and where == "acknowledged" and not host.outgoing
                if host is self.leader:
                    idle = (
                        idle + 1
                        if is_idle and not self.world.inbox and not self.world.held
                        else idle * (not host.outgoing)
                    )
            if idle > 3 and all(host.reader.position.offset + 1 >= len(self.log) for host in self.hosts):
                return
        raise BrokenError("no host comes to rest")


class ForgetfulLearner(Learner):
    """Knows an episode's id only for a while, as the learner of a long run does: until the collector has taken its report, no copy
    of it waits, and newer episodes of the same collector have come. Takes no rollout of an older term than it has seen."""

    def __init__(self, world: World, policy: str) -> None:
        super().__init__(world, policy)
        self.term = 0
        self.forgotten: set[str] = set()
        self.unreported: dict[str, Rollout] = {}

    def step(self) -> None:
        leader = self.world.shell.leader
        if leader and not leader.store._undo and self.term == leader.reader.position.term:
            waiting = {episode.episode_id for episode in self.world.ready[self.policy]}
            reported = {name for one in self.reports for name in (*one.trained, *one.dropped)}
            settled = {name for name in reported - waiting if leader.store.states[name][0] in {"trained", "dropped"}}
            self.forgotten |= settled
        if self.world.rng.random() < self.world.chaos.crash:
            self.die()
        super().step()

    def die(self) -> None:
        """Lose all that is not in the batch log, which the broker delivers again."""
        self.world.ready[self.policy].extendleft(reversed(self.unreported.values()))
        self.whole.clear()
        for episode_id, episode in self.unreported.items():
            del self.seen[episode_id]
            self.groups.pop(episode.group_id, None)
        self.unreported.clear()

    def report(self, trained: list[str], dropped: dict[str, str]) -> None:
        for episode_id in (*trained, *dropped):
            del self.unreported[episode_id]
        super().report(trained, dropped)

    def take(self, episode: Rollout) -> None:
        if self.is_outdated(episode):
            return
        self.term = max(episode.term, self.term)
        if episode.episode_id in self.forgotten:
            raise BrokenError(f"{episode.episode_id} comes long after its report: it would be trained twice")
        if not any(episode.episode_id in (*one.trained, *one.dropped) for one in self.reports):
            self.unreported[episode.episode_id] = episode
        super().take(msgspec.structs.replace(episode, term=0))

    def is_outdated(self, episode: Rollout) -> bool:
        return episode.term < self.term


class StandbyWorld(World):
    """A world with several hosts. Nobody meddles with its queues."""

    learner_type = ForgetfulLearner

    def __init__(self, seed: int, scene: Scene, hosts: type[Hosts] = Hosts, **given) -> None:
        calm = msgspec.structs.replace(scene, chaos=msgspec.structs.replace(scene.chaos, meddling=0.0))
        super().__init__(seed, calm, hosts, **given)
        self.learners = [self.learner_type(self, policy) for policy in scene.rules.trained]

    def rest(self) -> None:
        super().rest()
        self.now += PAUSE_S  # the last messages may have come after the last tick
        self.shell.catch_up()

    def reckon(self) -> None:
        super().reckon()
        told = [read_states(host.store) for host in self.shell.hosts]
        if any(one != told[0] for one in told):
            raise BrokenError(f"the hosts' ledgers differ: {told}")
