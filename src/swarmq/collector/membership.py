"""The collector publishes the content of the run folder's registries, and edits the registries for engines and proxies on other hosts.

registry files ──every POLL_S──> changed, requested, or REPEAT_S old? ──> `members` event
Registration ──> host invited? URL reachable from here? ──> registry edited ──> `registration` event
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec
import structlog

from swarmq.broker import Broker
from swarmq.config import SwarmJob
from swarmq.errors import ConfigError, SwarmqError
from swarmq.hosts.addresses import split_address
from swarmq.hosts.members import StoredMembership, number_proxy
from swarmq.messages import Event, EventName, Registration
from swarmq.registries.engines import EngineRegistry
from swarmq.registries.hosts import HostRegistry, check_joinable, read_hosts
from swarmq.registries.proxies import ProxyRegistry
from swarmq.runtime.files import FileStamp, read_stamp

POLL_S = 0.5
"""Seconds between two checks whether a registry file has changed."""
REPEAT_S = 5.0
"""Seconds after which an unchanged membership is published again, for listeners that missed an event."""
CONNECT_S = 5.0
SILENT_S = 30.0
"""Seconds without an event after which a proxy on another host counts as lost; proxies emit one every two seconds."""
MAX_ANSWERS = 1024
"""Maximum number of registrations with remembered answers; a registration that is sent again gets the same answer."""

log = structlog.get_logger()


class MembershipKeeper:
    """Publishes the membership of a run, and applies registrations while `run` runs."""

    def __init__(
        self,
        job: SwarmJob,
        broker: Broker,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        poll_s: float = POLL_S,
        repeat_s: float = REPEAT_S,
        connect_s: float = CONNECT_S,
        silent_s: float = SILENT_S,
    ) -> None:
        self._job, self._folder, self._broker, self._clock = job, job.run_folder, broker, clock
        self._poll_s, self._repeat_s, self._connect_s, self._silent_s = poll_s, repeat_s, connect_s, silent_s
        self._monotonic = monotonic
        self._last_event_at: dict[str, float] = {}
        """Source of events -> monotonic time of its last event, in seconds."""
        self._listening_since = monotonic()
        self._asks: list[str] = []
        self._wake = asyncio.Event()
        self._arrived: asyncio.Queue[tuple[Registration, str]] = asyncio.Queue()
        self._answers: OrderedDict[str, dict[str, Any]] = OrderedDict()
        """Registration id -> fields of its answer."""

    def answer(self, ask: str) -> None:
        """Publish the membership now, as the answer to the request with the id `ask`."""
        self._asks.append(ask)
        self._wake.set()

    def take(self, registration: Registration, host: str) -> None:
        """Apply a registration soon, and answer it. `host`: the invited host that sent it; "" for an operator."""
        self._arrived.put_nowait((registration, host))

    def record_event(self, source: str) -> None:
        """Record that `source` has just emitted an event."""
        self._last_event_at[source] = self._monotonic()

    def reset_silence(self) -> None:
        """Restart the count of silent seconds, because this process may have missed events."""
        self._listening_since = self._monotonic()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._publish())
            tasks.create_task(self._watch_proxies())
            tasks.create_task(self._restore_engines())
            applying: dict[str, tuple[str, asyncio.Task[None]]] = {}
            """URL of an engine or proxy -> id of its newest registration, and the task that applies it."""
            while True:
                registration, host = await self._arrived.get()
                prior_id, prior = applying.get(registration.url, ("", None))
                if prior and not prior.done():
                    if prior_id == registration.registration_id:
                        continue
                    prior.cancel()  # the newest registration of a URL decides
                    await asyncio.wait({prior})
                applying[registration.url] = (
                    registration.registration_id,
                    tasks.create_task(self._apply(registration, host)),
                )

    async def _publish(self) -> None:
        membership = StoredMembership(self._job)
        published: list[FileStamp] = []
        due_at = 0.0
        while True:
            self._wake.clear()
            now, stamps = asyncio.get_running_loop().time(), [read_stamp(path) for path in self._folder.registries]
            if self._asks or stamps != published or now >= due_at:
                try:
                    present = membership.read()
                except SwarmqError as error:
                    log.warning("members_unreadable", reason=str(error))
                    await asyncio.sleep(self._repeat_s)
                    continue
                asks = tuple(self._asks)
                if await self._emit("members", msgspec.to_builtins(present) | {"answers": asks}):
                    published, due_at = stamps, now + self._repeat_s
                    del self._asks[: len(asks)]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._poll_s):
                    await self._wake.wait()

    async def _watch_proxies(self) -> None:
        while True:
            await asyncio.sleep(self._silent_s / 4)
            try:
                changes = await asyncio.to_thread(self._update_proxy_list)
            except (SwarmqError, OSError) as error:
                log.warning("hosts_unreadable", reason=str(error))
                continue
            for text in changes:
                log.warning("warning", text=text)
                await self._emit("warning", {"text": text})

    def _update_proxy_list(self) -> list[str]:
        """Add to the registry the proxies of other hosts from which events come, and remove silent ones. Return a text for each change."""
        if not self._folder.hosts.exists():
            return []
        proxies, changes, now = ProxyRegistry(self._folder.proxies), list[str](), self._monotonic()
        with HostRegistry.open(self._folder.hosts) as hosts:
            for host in hosts.entries.values():
                for url in host.proxies:
                    last_event_at = self._last_event_at.get(f"proxy.{number_proxy(url)}", -math.inf)
                    is_listed, which = url in proxies.urls(), f"proxy {url} of host {host.name}"
                    if is_listed and now - max(last_event_at, self._listening_since) > self._silent_s:
                        proxies.remove(url)
                        changes.append(f"{which} is silent: clients are not sent to it until it is heard again")
                    elif not is_listed and now - last_event_at <= self._silent_s:
                        proxies.add(url)
                        changes.append(f"{which} is heard again and back in the list")
        return changes

    async def _restore_engines(self) -> None:
        """Add the engines of other hosts that still serve to the registry. A restarted run begins with the engines of its job."""
        engines = EngineRegistry(self._job)
        try:
            hosts, present = await asyncio.to_thread(read_hosts, self._folder.hosts), engines.urls()
        except SwarmqError as error:
            log.warning("hosts_unreadable", reason=str(error))
            return
        for host in hosts.values():
            for url, policy in host.engines.items():
                if policy not in present or url in present[policy]:
                    continue
                try:
                    await check_reachable(url, connect_s=self._connect_s)
                except ConfigError as error:
                    log.warning("engine_not_restored", engine=url, host=host.name, reason=str(error))
                    continue
                await asyncio.to_thread(engines.add, policy, url)
                log.info("engine_restored", engine=url, host=host.name, policy=policy)

    async def _apply(self, registration: Registration, host: str) -> None:
        answer = self._answers.get(registration.registration_id)
        if answer is None:
            try:
                await self._edit(registration, host)
                answer = {"state": "accepted"}
            except (SwarmqError, OSError) as error:
                answer = {"state": "refused", "text": str(error)}
            facts = {
                name: getattr(registration, name) for name in ("registration_id", "action", "process", "url", "policy")
            }
            answer |= {"host": host, **facts}
            log.info("registration", **answer)
            self._answers[registration.registration_id] = answer
            if len(self._answers) > MAX_ANSWERS:
                self._answers.popitem(last=False)
        self._wake.set()
        await self._emit("registration", answer)

    async def _edit(self, registration: Registration, host: str) -> None:
        """Check a registration and edit the registries. Raises SwarmqError, before any change, if it is refused."""
        if registration.action == "join":
            if registration.process == "engine" and registration.policy not in self._job.policies:
                policies = ", ".join(self._job.policies)
                raise ConfigError(f"there is no policy {registration.policy!r}: the run has {policies}")
            if host:
                hosts = await asyncio.to_thread(read_hosts, self._folder.hosts)
                check_joinable(hosts, host, self._clock())
            for url in filter(None, (registration.url, registration.receiver_url)):
                await check_reachable(url, connect_s=self._connect_s)
        await asyncio.to_thread(self._change, registration, host)  # a command may hold the files' locks for a while

    def _change(self, registration: Registration, host: str) -> None:
        engines, proxies = EngineRegistry(self._job), ProxyRegistry(self._folder.proxies)
        url, policy = registration.url, registration.policy
        with HostRegistry.open(self._folder.hosts) as hosts:
            hosts.drop_url(url)
            if registration.action == "leave":
                if registration.process == "proxy":
                    proxies.remove(url)
                elif policy in self._job.policies:
                    engines.remove(policy, url)
                return
            entry = hosts.entries.get(host)
            if registration.process == "proxy":
                proxies.add(url)
                if entry:
                    hosts.put(msgspec.structs.replace(entry, proxies=(*entry.proxies, url)))
            else:
                engines.add(policy, url)
                if entry:
                    hosts.put(msgspec.structs.replace(entry, engines=entry.engines | {url: policy}))

    async def _emit(self, name: EventName, fields: dict[str, Any]) -> bool:
        event = Event(run=self._job.run, source="collector", name=name, at=self._clock(), fields=fields)
        return await self._broker.emit(event)


async def check_reachable(url: str, *, connect_s: float) -> None:
    """Raise ConfigError if this host cannot connect to host and port of `url` within `connect_s` seconds."""
    host, port = split_address(url)
    try:
        async with asyncio.timeout(connect_s):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError as error:
        raise ConfigError(
            f"{host}:{port} does not answer the run's host within {connect_s:g} s: is a firewall between them?"
        ) from error
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)
        raise ConfigError(
            f"the run's host cannot connect to {host}:{port} ({reason}): announce an address that it reaches"
        ) from error
    writer.close()
