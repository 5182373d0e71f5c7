"""Registrations: an engine or proxy on another host joins or leaves a run, and the collector answers.

  Registration ──> <run>.control (durable) ──> collector: checks, edits the registry
     ^──────────── `registration` event: accepted or refused ────────┘

A registration without an answer is sent again under the same id. A process that stops waiting for the answer to a join sends a
leave after it, so that a collector which starts later does not register a process that has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import structlog

from swarmq.broker import Broker, topology
from swarmq.errors import BrokerError, ConfigError, SwarmqError
from swarmq.messages import JoiningProcess, Registration, new_id

AGAIN_S = 5.0
PATIENCE_S = 30.0
WITHDRAW_S = 5.0

log = structlog.get_logger()


@asynccontextmanager
async def keep_registered(
    broker: Broker, run: str, process: JoiningProcess, url: str, *, policy: str = "", receiver_url: str = ""
) -> AsyncIterator[str]:
    """Keep the engine or proxy at `url` in the run's registry while the block runs. Raises what `join` raises."""
    await join(broker, run, process, url, policy=policy, receiver_url=receiver_url)
    try:
        yield url
    finally:
        if not await leave(broker, run, process, url, policy=policy):
            log.warning(
                "leave_unconfirmed", url=url, action="the collector removes it from the run's list when it is back"
            )


async def join(
    broker: Broker,
    run: str,
    process: JoiningProcess,
    url: str,
    *,
    policy: str = "",
    receiver_url: str = "",
    patience_s: float = PATIENCE_S,
) -> None:
    """Register the engine or proxy at `url`, and return once the collector has registered it.

    Raises ConfigError with the reason if the collector refuses, SwarmqError if it does not answer within `patience_s` seconds.
    """
    joining = Registration(
        run=run,
        registration_id=new_id(),
        action="join",
        process=process,
        url=url,
        policy=policy,
        receiver_url=receiver_url,
    )
    try:
        answer = await _send(broker, joining, patience_s)
    except BaseException as error:
        with contextlib.suppress(BrokerError):
            withdrawal = msgspec.structs.replace(joining, registration_id=new_id(), action="leave")
            await broker.publish(topology.control(run), withdrawal, deadline_s=WITHDRAW_S)
        if isinstance(error, TimeoutError):
            raise SwarmqError(
                f"the collector of run {run!r} has not answered the registration of {url} within {patience_s:g} s: check that the run is "
                "up; nothing was registered"
            ) from error
        raise
    if answer["state"] == "refused":
        raise ConfigError(f"run {run!r} refuses {url}: {answer['text']}")


async def leave(
    broker: Broker, run: str, process: JoiningProcess, url: str, *, policy: str = "", patience_s: float = PATIENCE_S
) -> bool:
    """Remove the engine or proxy at `url` from the run's registry, and return whether the collector has confirmed it within
    `patience_s` seconds. If not, the registration waits in the queue until the collector applies it."""
    registration = Registration(
        run=run, process=process, url=url, policy=policy, registration_id=new_id(), action="leave"
    )
    try:
        await _send(broker, registration, patience_s)
    except (BrokerError, TimeoutError):
        return False
    return True


async def _send(broker: Broker, registration: Registration, patience_s: float) -> dict[str, Any]:
    """Send a registration until it is answered, and return the fields of the answer. Raises TimeoutError after `patience_s`
    seconds, BrokerError if RabbitMQ refuses it."""

    async def send() -> dict[str, Any]:
        while True:
            await broker.publish(topology.control(registration.run), registration)
            await asyncio.sleep(AGAIN_S)

    async def receive() -> dict[str, Any]:
        async for event in events:
            if event.name == "registration" and event.fields["registration_id"] == registration.registration_id:
                return event.fields
        raise TimeoutError

    async with asyncio.timeout(patience_s), broker.events(registration.run) as events:
        tasks = {asyncio.create_task(send()), asyncio.create_task(receive())}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return next(iter(done)).result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
