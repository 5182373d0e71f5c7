"""Engines of a run that is up, by hand: look at them, add and remove some, start one more (`swarmq engine`).

The roster in the run folder is all that changes; proxies and learners look at it and follow.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from swarmq.config import RunFolder, SwarmJob
from swarmq.engine.control import EngineControl
from swarmq.engine.launch import EngineProcess
from swarmq.engine.roster import Roster
from swarmq.engine.same_tokens import check_joins, ids_of_all
from swarmq.errors import ConfigError, EngineError
from swarmq.process import held_port, tail

DRAIN_S = 600.0
"""How long an engine that leaves may take for the calls that are open there."""
LOOK_S = 0.5


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """An engine as it is now, for people."""

    policy: str
    url: str
    weights: str
    """The version that it serves; `default`: those it was started with."""
    state: str


async def look(roster: Roster) -> list[Seen]:
    """Every engine of every policy."""
    return [await _seen(policy, url) for policy, urls in roster.urls().items() for url in urls]


async def add(roster: Roster, policy: str, url: str) -> None:
    """Raises EngineError for what is not an engine of ours or of the policy; nothing has changed then."""
    url = url.rstrip("/")
    async with EngineControl(url) as engine:
        await engine.status()
    answers = await ids_of_all([url, *roster.urls()[policy]])
    if told := answers.pop(url, None):
        check_joins(url, told, answers)
    roster.add(policy, url)


def remove(roster: Roster, policy: str, url: str) -> None:
    """Raises ConfigError for an engine that is not there, or is the only one."""
    present = [one.rstrip("/") for one in roster.urls()[policy]]
    if url.rstrip("/") not in present:
        raise ConfigError(f"{url} serves no {policy}: its engines are {', '.join(present)}")
    if len(present) == 1:
        raise ConfigError(f"{url} is the only engine of {policy}: add another one first")
    roster.remove(policy, url.rstrip("/"))


async def serve(
    job: SwarmJob,
    policy: str,
    folder: RunFolder,
    *,
    port: int,
    gpus: Sequence[int] | None,
    report: Callable[[str], None],
) -> None:
    """One more engine until cancelled; then it leaves, and ends when nothing is open there. Raises EngineError."""
    port = port or held_port()
    log_path = folder.logs / f"engine.{policy}.{port}.log"
    async with EngineProcess(job.policies[policy], port=port, log_path=log_path, progress=report, gpus=gpus) as engine:
        roster = Roster(job, folder)
        roster.add(policy, engine.url)
        report(f"{engine.url} serves {policy}; Ctrl-C drains and stops it")
        try:
            status = await engine.wait()
        finally:
            roster.remove(policy, engine.url)
            await _drained(engine.url, job.proxy.probe_every_s, report)
        raise EngineError(f"the engine ended with status {status}; the end of {log_path}:\n{tail(log_path)}")


async def _drained(url: str, probe_every_s: float, report: Callable[[str], None]) -> None:
    """Return when proxies have noticed and nothing is open, or the engine is gone."""
    report(f"{url} gets nothing new; waiting for what is open there")
    await asyncio.sleep(2 * probe_every_s)
    try:
        async with asyncio.timeout(DRAIN_S), EngineControl(url) as engine:
            while await engine.open_requests():  # noqa: ASYNC110 - a server tells nobody that it is idle
                await asyncio.sleep(LOOK_S)
    except (TimeoutError, EngineError):
        return  # it is stopped in any case


async def _seen(policy: str, url: str) -> Seen:
    try:
        async with EngineControl(url) as engine:
            status = await engine.status()
    except EngineError as error:
        return Seen(policy=policy, url=url, weights="", state=str(error))
    states = {"in doubt": status.in_doubt, "asleep": status.asleep, "paused": status.paused, "serves": True}
    return Seen(policy=policy, url=url, weights=status.label, state=next(name for name, so in states.items() if so))
