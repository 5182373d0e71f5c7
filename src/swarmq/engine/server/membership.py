"""The `swarmq engine` commands: list, add, remove and start engines of a live run, and serve an engine that a job names.

They edit the roster in the run folder, which proxies and learners follow. On another host they register with the collector, which
edits it.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec

from swarmq.config import Policy, RunFolder, SwarmJob, make_folder
from swarmq.engine.client.identity import check_like_others, identify_all
from swarmq.engine.client.protocol import EngineIdentity
from swarmq.engine.client.tokenizer_compat import check_same_token_ids, tokenize_with_all
from swarmq.engine.server.launch import ENGINE_ALONE_SHARE, EngineProcess, get_installed_vllm
from swarmq.errors import ConfigError, EngineError
from swarmq.hosts.addresses import ListenAddress, check_announced, replace_port, resolve, split_address
from swarmq.hosts.follow import choose_address, is_run_on_this_host, join_run
from swarmq.hosts.members import build_job, check_model_files
from swarmq.hosts.register import keep_registered
from swarmq.keys import HostInvite
from swarmq.registries.engines import EngineRegistry
from swarmq.registries.hosts import HostRegistry
from swarmq.runtime.processes import read_tail, reserve_port
from swarmq.weights.push.engine_control import EngineControl
from swarmq.weights.receiver.process import keep_receiver

DRAIN_S = 600.0
"""Maximum seconds to wait for the open requests of an engine that is being removed."""
POLL_S = 0.5
UNPROTECTED_WARNING = (
    "{url} accepts callers without the secret: start it with --middleware swarmq.weights.vllm_plugin.middleware.SecretMiddleware and $SWARMQ_ENGINE_SECRET "
    "(docs/how-to/access.md)"
)


class EngineListing(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `swarmq engine list`."""

    policy: str
    url: str
    weights: str
    """Version label of the served weights; `default`: the weights that the engine loaded at its start."""
    state: str


async def list_engines(roster: EngineRegistry) -> list[EngineListing]:
    """List the engines of all policies."""
    return [
        await _describe_engine(policy, url, roster.secret()) for policy, urls in roster.urls().items() for url in urls
    ]


async def add_engine(roster: EngineRegistry, policy: str, url: str) -> str:
    """Add an engine and return a warning, or "". Raises EngineError, before any change, if `url` is no engine of this run, or has
    another version, model or tokenizer than the policy's engines."""
    url = url.rstrip("/")
    async with EngineControl(url, secret=roster.secret()) as engine:
        await engine.status()
        is_unprotected = await engine.is_unprotected()
    await _check_like_others(url, roster.urls()[policy], roster.secret())
    roster.add(policy, url)
    return UNPROTECTED_WARNING.format(url=url) if is_unprotected else ""


async def _check_like_others(url: str, others: Sequence[str], secret: str) -> None:
    """Raise EngineError if the engine at `url` has another version, model or tokenizer than one of `others` that answers."""
    check_like_others(url, await identify_all([url, *others], secret=secret))
    answers = await tokenize_with_all([url, *others], secret=secret)
    if ids := answers.pop(url, None):
        check_same_token_ids(url, ids, answers)


async def find_unprotected_engines(urls: Sequence[str], secret: str) -> list[str]:
    """Return a warning for each engine that accepts callers without the secret; engines that do not answer are left out."""
    lines = []
    for url in urls:
        with contextlib.suppress(EngineError):
            async with EngineControl(url, secret=secret) as engine:
                lines += [UNPROTECTED_WARNING.format(url=url)] if await engine.is_unprotected() else []
    return lines


def remove_engine(roster: EngineRegistry, policy: str, url: str) -> None:
    """Remove an engine. Raises ConfigError if the engine is unknown or the policy's only one."""
    present = [one.rstrip("/") for one in roster.urls()[policy]]
    if url.rstrip("/") not in present:
        raise ConfigError(f"{url} does not serve {policy}: its engines are {', '.join(present)}")
    if len(present) == 1:
        raise ConfigError(f"{url} is the only engine of {policy}: add another one first")
    with HostRegistry.open(roster.folder.hosts) as hosts:
        hosts.drop_url(url.rstrip("/"))
        roster.remove(policy, url.rstrip("/"))


async def serve_extra_engine(
    job: SwarmJob,
    policy: str,
    folder: RunFolder,
    *,
    host: str,
    port: int,
    gpus: Sequence[int] | None,
    report: Callable[[str], None],
) -> None:
    """Run one more engine until cancelled, then remove it and stop it once its requests are done. Raises EngineError if it
    ends by itself."""
    port = port or reserve_port(host)
    roster = EngineRegistry(job, folder)
    engine = EngineProcess(
        job.policies[policy],
        host=host,
        port=port,
        log_path=folder.logs / f"engine.{policy}.{port}.log",
        secret=roster.secret(),
        progress=report,
        gpus=gpus,
    )
    check_announced(engine.url, is_run_on_this_host=True)
    async with engine:
        await _serve_listed(engine, _keep_listed(roster, policy, engine.url), policy, job.proxy.probe_every_s, report)


def _with_whole_gpus(policy: Policy) -> Policy:
    """Return the policy with the share of GPU memory for an engine without a learner beside it, unless the job sets a share."""
    engine = policy.engine
    share = engine.gpu_memory_utilization or ENGINE_ALONE_SHARE
    return msgspec.structs.replace(policy, engine=msgspec.structs.replace(engine, gpu_memory_utilization=share))


async def serve_engine_elsewhere(
    invite: HostInvite,
    place: ListenAddress,
    *,
    choose: Callable[[SwarmJob], str],
    gpus: Sequence[int] | None,
    report: Callable[[str], None],
) -> None:
    """Run an engine for a run on another host, with a weight receiver beside it, until cancelled; then remove it from the run, and stop
    it once its requests are done. `choose`: returns the policy.

    Raises SwarmqError and registers nothing if the invite has expired, the run cannot be reached or does not fit this host, other hosts
    cannot reach the engine, or its version, model or tokenizer differs. Raises SwarmqError and removes the engine from the run if it ends by itself.
    """
    invite.check_current(time.time())
    host = choose_address(invite, place)
    port = place.port or reserve_port(host)
    url = place.announce(host, port)
    check_announced(url, is_run_on_this_host=is_run_on_this_host(invite))
    async with join_run(invite, name=f"swarmq engine {invite.host} {invite.run}") as (broker, known):
        engines = known.urls()
        job = build_job(known.members, engines=engines, proxy={})
        chosen = choose(job)
        check_model_files(known.members, chosen)
        installed = EngineIdentity(vllm=get_installed_vllm())
        check_like_others(url, await identify_all(engines[chosen], secret=invite.engine_secret) | {url: installed})
        folder = Path(tempfile.mkdtemp(prefix=f"swarmq-{invite.run}-{chosen}-"))
        report(f"logs are in {folder}")
        secret = invite.engine_secret
        async with AsyncExitStack() as stack:
            receiver = await stack.enter_async_context(
                keep_receiver(
                    host,
                    port + 1 if place.port else 0,
                    secret=secret,
                    log_path=folder / "receiver.log",
                    tls=place.tls,
                )
            )
            engine = EngineProcess(
                _with_whole_gpus(job.policies[chosen]),
                host=host,
                port=port,
                log_path=folder / "engine.log",
                secret=secret,
                progress=report,
                gpus=gpus,
                tls=place.tls,
                environment=receiver.environment,
            )
            await stack.enter_async_context(engine)
            await _check_like_others(engine.url, engines[chosen], secret)
            await _serve_listed(
                engine,
                keep_registered(
                    broker,
                    invite.run,
                    "engine",
                    url,
                    policy=chosen,
                    receiver_url=replace_port(url, receiver.port),
                ),
                chosen,
                job.proxy.probe_every_s,
                report,
            )


async def serve_named_engine(
    job: SwarmJob, policy: str, *, number: int, gpus: Sequence[int] | None, report: Callable[[str], None]
) -> None:
    """Run the engine that the job names as `engine.urls[number]`, until cancelled. Raises ConfigError if the job names no such
    engine, EngineError if it ends by itself."""
    urls = job.policies[policy].engine.urls
    if number >= len(urls):
        raise ConfigError(
            f"policies.{policy}.engine.urls has {len(urls)} entries, none with number {number}: add the URL by which the run's other "
            "processes reach this engine, such as http://gpu1:8100"
        )
    name, port = split_address(urls[number])
    make_folder(job.run_folder.path)
    engine = EngineProcess(
        job.policies[policy],
        host=resolve(name, port),
        port=port,
        log_path=job.run_folder.logs / f"engine.{policy}.{number}.log",
        secret=EngineRegistry(job).secret(),
        progress=report,
        gpus=gpus,
    )
    async with engine:
        report(f"{urls[number]} serves {policy}; its log is {engine.log_path}")
        raise _describe_end(engine, await engine.wait())


async def _serve_listed(
    engine: EngineProcess,
    listed: AbstractAsyncContextManager[str],
    policy: str,
    probe_every_s: float,
    report: Callable[[str], None],
) -> None:
    """Keep a running engine in the run's list until cancelled, then wait for its open requests. `listed`: keeps the engine in the list
    while it is open, and provides the listed URL. Raises EngineError if the engine ends by itself."""
    is_listed = False
    try:
        async with listed as url:
            is_listed = True
            report(f"{url} serves {policy}; Ctrl-C drains and stops it")
            status = await engine.wait()
    finally:
        if is_listed:
            await _wait_until_drained(engine, probe_every_s, report)
    raise _describe_end(engine, status)


def _describe_end(engine: EngineProcess, status: int) -> EngineError:
    why = engine.kill_reason or f"ended with status {status}"
    return EngineError(f"the engine {why}; the end of {engine.log_path}:\n{read_tail(engine.log_path)}")


@asynccontextmanager
async def _keep_listed(roster: EngineRegistry, policy: str, url: str) -> AsyncIterator[str]:
    roster.add(policy, url)
    try:
        yield url
    finally:
        roster.remove(policy, url)


async def _wait_until_drained(process: EngineProcess, probe_every_s: float, report: Callable[[str], None]) -> None:
    """Wait until proxies have noticed the removal and no requests are open, the engine is gone, or `DRAIN_S` has passed."""
    report(f"{process.url} gets no new calls; waiting for open ones")
    await asyncio.sleep(2 * probe_every_s)
    try:
        async with asyncio.timeout(DRAIN_S), EngineControl(process.url, secret=process.secret) as engine:
            while await engine.count_open_requests():  # noqa: ASYNC110 - vLLM sends no notice when it is idle
                await asyncio.sleep(POLL_S)
    except (TimeoutError, EngineError):
        return  # the caller stops the engine in any case


async def _describe_engine(policy: str, url: str, secret: str) -> EngineListing:
    try:
        async with EngineControl(url, secret=secret) as engine:
            status, is_unprotected = await engine.status(), await engine.is_unprotected()
    except EngineError as error:
        return EngineListing(policy=policy, url=url, weights="", state=str(error))
    states = {"in doubt": status.is_in_doubt, "asleep": status.is_asleep, "paused": status.is_paused, "serves": True}
    state = next(name for name, so in states.items() if so)
    return EngineListing(
        policy=policy,
        url=url,
        weights=status.label,
        state=f"{state}, accepts callers without the secret" if is_unprotected else state,
    )
