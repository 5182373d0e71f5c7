"""`swarmq worker` with several kinds of tasks and several processes on one machine.

  swarmq worker math=agents:solve code=agents:write --processes 4

  parent ──spawn──> 4 processes, each with a client of its own ──> one Worker per kind ──> tasks.<kind>

What an agent needs beside it (`ServedAgent`: an environment's tool servers) is started first, so that a failed start is an error
before any episode begins.

If a process dies, no task is lost: RabbitMQ gives its tasks to the other processes, which continue.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

import msgspec

from swarmq.client.episodes.client import EpisodeClient
from swarmq.client.episodes.event_loops import LoopThread
from swarmq.client.runners.attempts import AgentFunction, RunnerOptions, ServedAgent, check_signature
from swarmq.client.runners.report import RunSummary
from swarmq.client.runners.worker import EVAL_SHARE, Worker, load_target, stop_on_signals
from swarmq.errors import SwarmqError, TaskError
from swarmq.keys import Invite
from swarmq.runtime.logs import log, write_lines_whole
from swarmq.runtime.processes import die_with_parent
from swarmq.runtime.terminal import visible
from swarmq.runtime.wording import count_of

Targets = Mapping[str | None, str | AgentFunction]
"""Kind -> its agent, as `module:function` or the function itself. The kind may be None if the run has a single one."""


def parse_targets(texts: Sequence[str], kinds: Sequence[str]) -> dict[str | None, str]:
    """Parse `kind=target ...`, or one target for all given kinds; a target is `module:function` or an environment. Raises
    TaskError for anything else."""
    pairs = [split_kind(text) for text in texts]
    if all(kind is None for kind, _ in pairs):
        if len(texts) != 1:
            raise TaskError(
                f"{len(texts)} functions: say which kind each is for, e.g. math={texts[0]} code={texts[-1]}"
            )
        chosen: list[str | None] = [*kinds] or [None]
        return dict.fromkeys(chosen, texts[0])
    if kinds or any(kind is None for kind, _ in pairs):
        raise TaskError("write either kind=module:function for every kind, or one module:function with --kind")
    targets: dict[str | None, str] = {}
    for (kind, target), text in zip(pairs, texts, strict=True):
        if kind in targets:
            raise TaskError(f"{text}: kind {kind!r} has a function already")
        targets[kind] = target
    return targets


def split_kind(text: str) -> tuple[str | None, str]:
    """Split `kind=target`; the kind is None if the text has none. A target may contain `=` itself, after `?`."""
    kind, equals, target = text.partition("=")
    return (None, text) if not equals or set(kind) & set(":?/") else (kind, target)


def run_workers(client: EpisodeClient, targets: Targets, options: RunnerOptions | None = None) -> dict[str, RunSummary]:
    """Work on all kinds until SIGTERM or SIGINT. The first signal finishes the attempts that have begun, the second kills.

    `client` must not be open yet. Raises TaskError if a function cannot be imported or called with an episode.
    """
    options = options or RunnerOptions()
    functions = {kind: _load_function(target) for kind, target in targets.items()}
    agents = LoopThread("swarmq-agents")

    async def main() -> dict[str, RunSummary]:
        async with keep_serving(agents, functions.values()), client:
            client.agent_loop = agents
            with stop_on_signals() as stop:
                return await work_on_kinds(client, functions, options, stop)

    try:
        return asyncio.run(main())
    finally:
        agents.close()


@contextlib.asynccontextmanager
async def keep_serving(loop: LoopThread, functions: Iterable[AgentFunction]) -> AsyncIterator[None]:
    """Run what the agents need, on their loop, while the context is open. One task enters and leaves all of their contexts."""
    served = [function for function in dict.fromkeys(functions) if isinstance(function, ServedAgent)]
    if not served:
        yield
        return
    ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    own, closing = asyncio.get_running_loop(), asyncio.Event()

    async def hold() -> None:
        async with contextlib.AsyncExitStack() as stack:
            for agent in served:
                await stack.enter_async_context(agent.serving())
            own.call_soon_threadsafe(ready.set_result, None)
            await closing.wait()

    holding = asyncio.ensure_future(loop.call(hold))
    try:
        await asyncio.wait((ready, holding), return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            await holding
        yield
    finally:
        loop.loop.call_soon_threadsafe(closing.set)
        await holding


async def work_on_kinds(
    client: EpisodeClient, functions: Mapping[str | None, AgentFunction], options: RunnerOptions, stop: asyncio.Event
) -> dict[str, RunSummary]:
    """Attempt the tasks of every kind until `stop` is set, with separate lanes for training and evaluation."""
    if len(functions) > 1:
        options = msgspec.structs.replace(options, progress=False)
    workers = {kind: _make_workers(client, kind, function, options) for kind, function in functions.items()}
    running = {}
    async with asyncio.TaskGroup() as tasks:
        for kind, (training, evaluating) in workers.items():
            running[client.resolve_kind(kind)] = tasks.create_task(training.run(stop))
            tasks.create_task(evaluating.run(stop))
    return {kind: task.result() for kind, task in running.items()}


def _make_workers(
    client: EpisodeClient, kind: str | None, function: AgentFunction, options: RunnerOptions
) -> tuple[Worker, Worker]:
    """Return the workers of a kind: one for training, and one for evaluation with its own lanes."""

    evaluation = msgspec.structs.replace(options, concurrency=max(1, options.concurrency // EVAL_SHARE), progress=False)
    return (
        Worker(client, function, kind=kind, mode="train", options=options),
        Worker(client, function, kind=kind, mode="eval", options=evaluation),
    )


def run_processes(invite: Invite, targets: Targets, processes: int, options: RunnerOptions | None = None) -> None:
    """Run `run_workers` in several processes until SIGTERM or SIGINT.

    A function that is given as an object must be importable by its name from another process. Raises EpisodeError for a kind
    that the run does not have, and TaskError if a process died.
    """
    options = msgspec.structs.replace(options or RunnerOptions(), progress=False)
    client = EpisodeClient(invite)
    for kind, target in targets.items():
        client.resolve_kind(kind)
        _check_sendable(target, _load_function(target))
    write_lines_whole()
    context = multiprocessing.get_context("spawn")
    arguments = (invite.encode(), dict(targets), options, os.getpid())
    children = [
        context.Process(target=_run_child, args=arguments, name=f"swarmq-worker-{number}")
        for number in range(processes)
    ]
    with _forward_signals(children) as stopping:
        for child in children:
            child.start()
        died = _wait_for_all(children, stopping)
    if died:
        raise TaskError(
            f"{died} of {count_of(processes, 'worker process', 'worker processes')} died; their tasks went to others"
        )


def _wait_for_all(children: Sequence[BaseProcess], stopping: list[int]) -> int:
    died = 0
    left: dict[object, BaseProcess] = {child.sentinel: child for child in children}
    while left:
        for sentinel in wait([child.sentinel for child in left.values()]):
            child = left.pop(sentinel)
            child.join()
            if child.exitcode and not stopping:
                died += 1
                log.warning("worker_process_died", process=child.name, status=child.exitcode, left=len(left))
    return died


def _run_child(invite: str, targets: Targets, options: RunnerOptions, parent: int) -> None:
    die_with_parent()  # in a session of its own: Ctrl-C reaches only the parent, which forwards it once
    if os.getppid() != parent:
        return
    write_lines_whole()
    name = multiprocessing.current_process().name
    try:
        for kind, summary in run_workers(EpisodeClient(Invite.decode(invite)), targets, options).items():
            sys.stdout.write(f"{name}, {kind}: {summary}\n")
    except SwarmqError as error:
        sys.stderr.write(f"{name}: {visible(str(error))}\n")
        sys.exit(1)


@contextlib.contextmanager
def _forward_signals(children: Sequence[BaseProcess]) -> Iterator[list[int]]:
    """Forward SIGTERM and SIGINT to the children inside the block, and yield the list of signals received so far."""
    came: list[int] = []

    def pass_on(number: int, _frame: object) -> None:
        came.append(number)
        for child in children:
            if child.pid and child.is_alive():
                os.kill(child.pid, number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _load_function(target: str | AgentFunction) -> AgentFunction:
    if isinstance(target, str):
        return load_target(target)
    check_signature(target)
    return target


def _check_sendable(target: str | AgentFunction, function: AgentFunction) -> None:
    if isinstance(target, str):
        return  # each process imports it
    try:
        pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        name = getattr(function, "__qualname__", repr(function))
        raise TaskError(
            f"{name} cannot be given to other processes ({error}): define it at the top of a module, or name it as "
            "'module:function'"
        ) from error
