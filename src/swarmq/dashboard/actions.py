"""Requests that need the processes of a run: what an operator does to it from the dashboard, and the list of its dead
letters.

Actions are the commands of `swarmq set`, `pause`, `stop`, ... and `swarmq client remove`, sent with the operator's name.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any, Literal

import msgspec

from swarmq.broker.admin.invitations import remove_client
from swarmq.config import RunFolder, SwarmJob
from swarmq.dashboard.access import ForbiddenError
from swarmq.errors import ConfigError, SwarmqError
from swarmq.messages import Event
from swarmq.observe.control_requests import describe_answer, send_command
from swarmq.observe.live_runs import check_up, find_management_api, load_live_run, open_broker

PATIENCE_S = 30.0
"""Seconds to wait for the answers of collector and learners, fewer than browsers wait for a page."""
LETTERS_S = 5.0
CONNECTION = "swarmq dashboard"


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """An operator's request."""

    action: Literal["pause", "resume", "drain", "checkpoint", "set", "stop", "revoke"]
    settings: dict[str, Any] = {}
    """Path -> value, for `set`."""
    policy: str = ""
    """Policy to stop; all trained ones by default."""
    client: str = ""
    """Client to remove, for `revoke`."""


async def list_dead_letters(folder: Path) -> dict[str, Any]:
    """Return the messages of the run that no process could use, or why they cannot be listed."""
    from swarmq.broker.admin.dead_letters import list_letters  # noqa: PLC0415 - slow to import

    try:
        job = await asyncio.to_thread(load_live_run, folder)
        await asyncio.to_thread(check_up, job)
        async with asyncio.timeout(LETTERS_S):
            letters = await list_letters(job.broker.url or "")
    except TimeoutError:
        return {"error": f"RabbitMQ has not answered within {LETTERS_S:g} s"}
    except SwarmqError as error:
        return {"error": str(error)}
    names = ("id", "kind", "sender", "queue", "key", "reason")
    return {
        "rows": [
            {name: getattr(letter, name) for name in names}
            for letter in letters
            if letter.queue.startswith(f"swarmq.{job.run}.") or letter.sender.startswith(f"{job.run}.")
        ]
    }


async def act(folder: Path, request: Request, *, sender: str) -> str:
    """Carry out an operator's request and return the result, one line for each answer. The run records it with the name
    `sender`.

    Raises ConfigError if the run refuses it, ForbiddenError if this user may not read the run's secret, and BrokerError.
    """
    if not os.access(RunFolder(folder).root_secret, os.R_OK):
        raise ForbiddenError(f"{folder}: only a user who can read the run's secret may operate the run")
    job = await asyncio.to_thread(load_live_run, folder)
    if request.action == "revoke":
        return await _revoke(job, RunFolder(folder), request.client, sender)
    settings = _settings_of(job, request)
    async with open_broker(job, CONNECTION) as broker:
        await broker.declare(job.run, policies=[], kinds=[], replicas=job.broker.replicas)
        answer = await send_command(broker, job.run, request.action, settings, sender=sender, patience_s=PATIENCE_S)
    return "\n".join(describe_answer(answer))


def _settings_of(job: SwarmJob, request: Request) -> dict[str, Any]:
    """Return the settings that the command carries. Raises ConfigError for missing or superfluous fields of the request."""
    if request.action == "set":
        if not request.settings:
            raise ConfigError("set: name at least one setting, e.g. policies.main.train.learning_rate")
        return request.settings
    if request.settings:
        raise ConfigError(f"{request.action}: takes no settings")
    if request.action != "stop":
        return {}
    if request.policy and request.policy not in job.trained:
        raise ConfigError(f"stop: {request.policy!r} is not a trained policy; choose one of {', '.join(job.trained)}")
    return dict.fromkeys([request.policy] if request.policy else job.trained)


async def _revoke(job: SwarmJob, folder: RunFolder, client: str, sender: str) -> str:
    client = client.partition("@")[0]  # clients of one invite have ids of their own, after its name
    if not client:
        raise ConfigError("revoke: name the client")
    await asyncio.to_thread(
        lambda: remove_client(folder, client, find_management_api(job, folder, os.environ.get("SWARMQ_MANAGEMENT_URL")))
    )
    text = f"removed client {client}"
    fields = {"action": "revoke", "state": "accepted", "sender": sender, "text": text, "client": client}
    async with open_broker(job, CONNECTION) as broker:
        await broker.emit(Event(run=job.run, source="dashboard", name="control", at=time.time(), fields=fields))
    return text
