"""Engines of a run that is up, by hand: look at them, add and remove some, start one more (`swarmq engine`).

The roster in the run folder is all that changes; proxies and learners look at it and follow.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

import msgspec

from swarmq.config import RunFolder, SwarmJob
from swarmq.engine.client.tokenizer_compat import check_same_token_ids, tokenize_with_all
from swarmq.engine.server.launch import EngineProcess
from swarmq.errors import ConfigError, EngineError
from swarmq.registries.engines import EngineRegistry
from swarmq.runtime.processes import read_tail, reserve_port
from swarmq.weights.push.engine_control import EngineControl

DRAIN_S = 600.0
"""How long an engine that leaves may take for the calls that are open there."""
POLL_S = 0.5
UNPROTECTED_WARNING = (
    "{url} obeys everybody who reaches it: start it with --middleware swarmq.weights.vllm_plugin.middleware.SecretMiddleware and $SWARMQ_ENGINE_SECRET "
    "(docs/access.md)"
)


class EngineListing(msgspec.Struct, frozen=True, kw_only=True):
    """An engine as it is now, for people."""

    policy: str
    url: str
    weights: str
    """The version that it serves; `default`: those it was started with."""
    state: str


async def list_engines(roster: EngineRegistry) -> list[EngineListing]:
    """Every engine of every policy."""
    return [
        await _describe_engine(policy, url, roster.secret()) for policy, urls in roster.urls().items() for url in urls
    ]


async def add_engine(roster: EngineRegistry, policy: str, url: str) -> str:
    """What to warn of; empty for nothing. Raises EngineError for what is not an engine of ours or of the policy; nothing has changed
    then."""
    url = url.rstrip("/")
    async with EngineControl(url, secret=roster.secret()) as engine:
        await engine.status()
        is_unprotected = await engine.is_unprotected()
    answers = await tokenize_with_all([url, *roster.urls()[policy]], secret=roster.secret())
    if told := answers.pop(url, None):
        check_same_token_ids(url, told, answers)
    roster.add(policy, url)
    return UNPROTECTED_WARNING.format(url=url) if is_unprotected else ""


async def find_unprotected_engines(urls: Sequence[str], secret: str) -> list[str]:
    """A line for each engine that obeys everybody; those that do not answer yet are left out."""
    lines = []
    for url in urls:
        with contextlib.suppress(EngineError):
            async with EngineControl(url, secret=secret) as engine:
                lines += [UNPROTECTED_WARNING.format(url=url)] if await engine.is_unprotected() else []
    return lines


def remove_engine(roster: EngineRegistry, policy: str, url: str) -> None:
    """Raises ConfigError for an engine that is not there, or is the only one."""
    present = [one.rstrip("/") for one in roster.urls()[policy]]
    if url.rstrip("/") not in present:
        raise ConfigError(f"{url} serves no {policy}: its engines are {', '.join(present)}")
    if len(present) == 1:
        raise ConfigError(f"{url} is the only engine of {policy}: add another one first")
    roster.remove(policy, url.rstrip("/"))


async def serve_extra_engine(
    job: SwarmJob,
    policy: str,
    folder: RunFolder,
    *,
    port: int,
    gpus: Sequence[int] | None,
    report: Callable[[str], None],
) -> None:
    """One more engine until cancelled; then it leaves, and ends when nothing is open there. Raises EngineError."""
    port = port or reserve_port()
    log_path = folder.logs / f"engine.{policy}.{port}.log"
    roster = EngineRegistry(job, folder)
    async with EngineProcess(
        job.policies[policy], port=port, log_path=log_path, secret=roster.secret(), progress=report, gpus=gpus
    ) as engine:
        roster.add(policy, engine.url)
        report(f"{engine.url} serves {policy}; Ctrl-C drains and stops it")
        try:
            status = await engine.wait()
        finally:
            roster.remove(policy, engine.url)
            await _wait_until_drained(engine, job.proxy.probe_every_s, report)
        why = engine.kill_reason or f"ended with status {status}"
        raise EngineError(f"the engine {why}; the end of {log_path}:\n{read_tail(log_path)}")


async def _wait_until_drained(process: EngineProcess, probe_every_s: float, report: Callable[[str], None]) -> None:
    """Return when proxies have noticed and nothing is open, or the engine is gone."""
    report(f"{process.url} gets nothing new; waiting for what is open there")
    await asyncio.sleep(2 * probe_every_s)
    try:
        async with asyncio.timeout(DRAIN_S), EngineControl(process.url, secret=process.secret) as engine:
            while await engine.count_open_requests():  # noqa: ASYNC110 - a server tells nobody that it is idle
                await asyncio.sleep(POLL_S)
    except (TimeoutError, EngineError):
        return  # it is stopped in any case


async def _describe_engine(policy: str, url: str, secret: str) -> EngineListing:
    try:
        async with EngineControl(url, secret=secret) as engine:
            status, is_unprotected = await engine.status(), await engine.is_unprotected()
    except EngineError as error:
        return EngineListing(policy=policy, url=url, weights="", state=str(error))
    states = {"in doubt": status.is_in_doubt, "asleep": status.is_asleep, "paused": status.is_paused, "serves": True}
    state = next(name for name, so in states.items() if so)
    return EngineListing(
        policy=policy, url=url, weights=status.label, state=f"{state}, open to everybody" if is_unprotected else state
    )
