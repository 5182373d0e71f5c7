"""Parts that break one rule each, for the negative controls: `python -m benchmarks.faults.broken ROLE JOB RULE`.

A test that cannot fail proves nothing, so the proof must find each of these out. They are made of the product's own
parts with one of them replaced; nothing is patched. Windows that are microseconds wide in the product are made wide
enough here that a run of a minute meets them.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, closing
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from aio_pika.exceptions import DeliveryError

from swarmq import keys
from swarmq.broker import Delivery
from swarmq.broker.amqp import AmqpBroker
from swarmq.broker.deliveries import Settler
from swarmq.broker.publisher import Publisher, send_once
from swarmq.broker.reconnect import BrokerLink
from swarmq.collector.decide.effects import Effect, WinSlot
from swarmq.collector.main import _stop_on_signals
from swarmq.collector.service import Collector
from swarmq.collector.store import Store
from swarmq.config import SwarmJob
from swarmq.engine.client.vllm import VllmEngine
from swarmq.errors import BrokerError, BrokerLostError
from swarmq.learner.feed import process
from swarmq.learner.store.records import Hello
from swarmq.messages import DeliveryReport, EpisodeEnd, Event, Message, Turn
from swarmq.proxy.http.app import create_app
from swarmq.runtime import logs

RULES = {
    "answer-before-confirm": "proxy",
    "acknowledge-before-commit": "collector",
    "no-slot-key": "collector",
    "take-turns-as-answered": "collector",
    "ends-do-not-wait": "collector",
    "acknowledge-before-log": "learner",
    "no-dedup": "learner",
    "take-lost-for-confirmed": "proxy",
    "no-dedup-after-failover": "learner",
}
"""Rule -> the part that breaks it."""

DAWDLE_S = 0.3
HASTY_S = 2.0
"""Seconds between the choice of a connection and a publish, so that most calls are in between when connections are lost."""
LATE_S = 20.0
"""Seconds that a batch in the log stays unacknowledged: longer than the learner goes on without further rollouts, so that there always is
one when a failover comes."""


class Answers:
    """A publisher for the proxy that says `confirmed` at once and publishes a little later."""

    def __init__(self, broker: AmqpBroker, tasks: asyncio.TaskGroup) -> None:
        self._broker, self._tasks = broker, tasks

    async def publish(self, queue: str, message: Message, *, deadline_s: float | None = None) -> None:
        self._tasks.create_task(self._later(queue, message, deadline_s))

    async def _later(self, queue: str, message: Message, deadline_s: float | None) -> None:
        if isinstance(message, Turn):
            await asyncio.sleep(DAWDLE_S)
        with contextlib.suppress(BrokerError):
            await self._broker.publish(queue, message, deadline_s=deadline_s)

    async def emit(self, event: Event) -> None:
        await self._broker.emit(event)


class HastyPublisher(Publisher):
    """Takes a message for confirmed that was rejected, or whose session was lost before the confirm."""

    async def _attempt(self, queue: str, body: bytes, *, kind: str, headers: dict[str, Any]) -> bool:
        session = await self._link.session()
        await asyncio.sleep(HASTY_S)
        with contextlib.suppress(BrokerLostError, DeliveryError):
            await session.call(send_once(session, queue, body, kind=kind, headers=headers))
        return True


class HastyBroker(AmqpBroker):
    def __init__(self, url: str, *, link: BrokerLink, **given: Any) -> None:
        super().__init__(url, link=link, **given)
        self._publisher = HastyPublisher(link)


class Eager:
    """Deliveries that are acknowledged as they come, before anybody has worked on them."""

    def __init__(self, deliveries: Any) -> None:
        self._deliveries = deliveries

    def __aiter__(self) -> AsyncIterator[Delivery]:
        """Those that come one by one are commands, no episodes: as they are."""
        return aiter(self._deliveries)

    async def batch(self, limit: int) -> list[Delivery]:
        batch: list[Delivery] = await self._deliveries.batch(limit)
        if batch:
            with contextlib.suppress(BrokerError):
                await self._deliveries.ack_through(batch[-1])
            await asyncio.sleep(DAWDLE_S)
        return batch

    async def ack_through(self, last: Delivery) -> None:
        with contextlib.suppress(BrokerError):
            await self._deliveries.ack_through(last)


class EagerBroker:
    """A broker whose consumers are eager; all else is the real one."""

    def __init__(self, broker: AmqpBroker) -> None:
        self._broker = broker

    def __getattr__(self, name: str) -> Any:
        return getattr(self._broker, name)

    @contextlib.asynccontextmanager
    async def consume(self, queue: str, *, prefetch: int) -> AsyncIterator[Eager]:
        async with self._broker.consume(queue, prefetch=prefetch) as deliveries:
            yield Eager(deliveries)


class Gullible:
    """Deliveries without a word on whether an answer was received."""

    def __init__(self, deliveries: Any, rewrite: Callable[[Message], Message]) -> None:
        self._deliveries, self._rewrite = deliveries, rewrite

    def __aiter__(self) -> AsyncIterator[Delivery]:
        return aiter(self._deliveries)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._deliveries, name)

    async def batch(self, limit: int) -> list[Delivery]:
        return [Delivery(one.arrival, self._rewrite(one.message)) for one in await self._deliveries.batch(limit)]


class LateSettler:
    """A session whose messages are acknowledged late."""

    def __init__(self, settler: Settler) -> None:
        self._settler = settler
        self._under_way = set[asyncio.Task[None]]()

    async def ack(self, tag: int, *, through: bool) -> None:
        task = asyncio.create_task(self._ack(tag, through=through))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _ack(self, tag: int, *, through: bool) -> None:
        await asyncio.sleep(LATE_S)
        with contextlib.suppress(BrokerError):
            await self._settler.ack(tag, through=through)

    async def reject(self, tag: int) -> None:
        await self._settler.reject(tag)


class Late(Eager):
    """Deliveries that are acknowledged late."""

    async def batch(self, limit: int) -> list[Delivery]:
        return [
            Delivery(one.arrival._replace(settler=LateSettler(one.arrival.settler)), one.message)
            for one in await self._deliveries.batch(limit)
        ]


class LateBroker(EagerBroker):
    @contextlib.asynccontextmanager
    async def consume(self, queue: str, *, prefetch: int) -> AsyncIterator[Late]:
        async with self._broker.consume(queue, prefetch=prefetch) as deliveries:
            yield Late(deliveries)


class GullibleBroker(EagerBroker):
    """One whose pieces are rewritten."""

    def __init__(self, broker: AmqpBroker, rewrite: Callable[[Message], Message]) -> None:
        super().__init__(broker)
        self._rewrite = rewrite

    @contextlib.asynccontextmanager
    async def consume(self, queue: str, *, prefetch: int) -> AsyncIterator[Gullible]:  # type: ignore[override]
        async with self._broker.consume(queue, prefetch=prefetch) as deliveries:
            yield Gullible(deliveries, self._rewrite)


def taken_as_answered(message: Message) -> Message:
    """A turn that stands for itself, as if to be recorded were to be received."""
    match message:
        case Turn():
            return msgspec.structs.replace(message, receipt=False, observed=False)
        case DeliveryReport():
            return msgspec.structs.replace(message, withdrawn={})
        case EpisodeEnd():
            return msgspec.structs.replace(message, calls=None, received=None)
    return message


def told_of_no_other(message: Message) -> Message:
    """Besides, nobody says which turns there must be, so that an end which comes before them counts at once."""
    if isinstance(message, DeliveryReport):
        return msgspec.structs.replace(message, sent={}, withdrawn={})
    return taken_as_answered(message)


REWRITES = {"take-turns-as-answered": taken_as_answered, "ends-do-not-wait": told_of_no_other}


class SlotlessStore(Store):
    """Knows of no winner, so every attempt that finishes is trained."""

    def write(self, effect: Effect) -> None:
        if not isinstance(effect, WinSlot):
            super().write(effect)

    def winner(self, _: str) -> None:
        return None

    def group_closed(self, _: str) -> bool:
        return False


class Forgetful(process.BatchFeeder):
    """Takes in what is in the log already, as if it were new."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.intake.known = _Nothing()


class Trusting(process.BatchFeeder):
    """Never asks for what it lacks: the collector would send it again, and what was acknowledged too early come back."""

    async def _ask_collector(self) -> None:
        self.asked_collector = True


class _Nothing(OrderedDict[str, None]):
    def __setitem__(self, *_: Any) -> None:
        return


async def proxy(job: SwarmJob, rule: str) -> None:
    async with AsyncExitStack() as stack:
        assert job.broker.url
        is_hasty = rule == "take-lost-for-confirmed"
        broker_type = HastyBroker if is_hasty else AmqpBroker
        broker = await stack.enter_async_context(broker_type.open(job.broker.url, name="proxy", deadline_s=None))
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        engines = {
            name: [await stack.enter_async_context(VllmEngine.open(url, deadline_s=30)) for url in policy.engine.urls]
            for name, policy in job.policies.items()
        }
        root = keys.load_root(job.run_folder.root_secret)
        app = create_app(job, root=root, engines=engines, broker=broker if is_hasty else Answers(broker, tasks))
        await uvicorn.Server(uvicorn.Config(app, port=job.proxy.port, log_config=None, access_log=False)).serve()


async def collector(job: SwarmJob, rule: str) -> None:
    stop = _stop_on_signals()
    store_type = SlotlessStore if rule == "no-slot-key" else Store
    with closing(store_type(job.run_folder.inbox, run=job.run)) as store:
        assert job.broker.url
        async with AmqpBroker.open(job.broker.url, name="collector", deadline_s=None) as broker:
            chosen: Any = EagerBroker(broker) if rule == "acknowledge-before-commit" else broker
            if rewrite := REWRITES.get(rule):
                chosen = GullibleBroker(broker, rewrite)
            await Collector(job, chosen, store).run(stop)


def learner(job: SwarmJob, rule: str) -> None:
    from swarmq.learner.feed.ipc import FeederLink, StopSignal  # noqa: PLC0415
    from swarmq.learner.store.writer_lock import hold_lock  # noqa: PLC0415
    from swarmq.learner.train.loop import Learner  # noqa: PLC0415
    from swarmq.weights.push.pusher import WeightPusher  # noqa: PLC0415  (torch)

    (policy,) = job.policies
    stop, folder = StopSignal(), job.run_folder.path / policy
    pusher = WeightPusher(job.policies[policy].engine.urls, folder / "weights")
    command = [sys.executable, "-m", "benchmarks.faults.broken", "io_process", "-", rule]
    with stop.handle_signals(), hold_lock(folder / "lock"):
        trainer = Learner(job, policy, pusher=pusher, stop=stop)
        with FeederLink(trainer.hello, stop, command=command) as link:
            trainer.run(link)


@contextlib.asynccontextmanager
async def _eager_broker(hello: Hello) -> AsyncIterator[EagerBroker]:
    async with process.open_amqp(hello) as broker:
        assert isinstance(broker, AmqpBroker)
        yield EagerBroker(broker)


@contextlib.asynccontextmanager
async def _late_broker(hello: Hello) -> AsyncIterator[LateBroker]:
    async with process.open_amqp(hello) as broker:
        assert isinstance(broker, AmqpBroker)
        yield LateBroker(broker)


FEEDERS: dict[str, tuple[process.OpenBroker, type[process.BatchFeeder]]] = {
    "acknowledge-before-log": (_eager_broker, Trusting),
    "no-dedup": (process.open_amqp, Forgetful),
    "no-dedup-after-failover": (_late_broker, Forgetful),
}


def main(role: str, job_file: str, rule: str, rest: Sequence[str]) -> None:
    if role == "io_process":
        open_broker, feeder_type = FEEDERS[rule]
        process.main(open_broker, feeder_type=feeder_type)
        return
    assert not rest
    job = SwarmJob.load(Path(job_file))
    logs.configure(role=role, run=job.run)
    if role == "learner":
        learner(job, rule)
    else:
        asyncio.run(proxy(job, rule) if role == "proxy" else collector(job, rule))


if __name__ == "__main__":
    main(*sys.argv[1:4], sys.argv[4:])
