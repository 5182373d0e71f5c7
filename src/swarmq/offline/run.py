"""Episodes of an agent in this process, with the real client and proxy, a broker in memory and recorded answers.

agent ──HTTP──> proxy ──> RecordedEngine          one episode at a time, so that calls belong to it
  └─> client ──> MemoryBroker <──turns── proxy    what was recorded is printed and forgotten
"""

from __future__ import annotations

import contextlib
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from swarmq import AsyncSwarmClient, SwarmTask, keys
from swarmq.broker import declare_run, topology
from swarmq.client.episodes.client import EpisodeOptions
from swarmq.client.episodes.event_loops import LoopThread
from swarmq.client.runners.attempts import Agent, AgentFunction, AttemptResult, RunnerOptions, attempt
from swarmq.client.runners.progress import describe_failure, locate_failure
from swarmq.client.runners.report import Tally
from swarmq.client.runners.worker_processes import keep_serving
from swarmq.config import SwarmJob
from swarmq.messages import EpisodeEnd, Turn, decode
from swarmq.offline.engine import RecordedEngine
from swarmq.offline.recording import Recording
from swarmq.proxy.http.app import create_app
from swarmq.proxy.main import server_config
from swarmq.testing import MemoryBroker
from swarmq.testing.app_server import serve_app

CLIENT = "offline"
CONNECTIONS = 256
SHOWN_CHARACTERS = 400
"""Maximum number of characters that are printed of a message."""

SUCCESS = {None: "", True: ", success", False: ", no success"}

Say = Callable[[str], None]


async def run_offline(
    job: SwarmJob,
    recording: Recording,
    agents: Mapping[str | None, AgentFunction],
    tasks: Sequence[tuple[str | None, SwarmTask]],
    say: Say,
) -> Tally:
    """Attempt each task, given with its kind (None: the task's own, or the only one), once, and return the counts. `say`: prints
    lines."""
    began, tally = time.monotonic(), Tally()
    agent_loop = LoopThread("swarmq-agents")
    try:
        async with keep_serving(agent_loop, agents.values()), _open(job, recording) as (client, broker, engine):
            client.agent_loop = agent_loop
            known: set[str] = set()
            for number, (named, task) in enumerate(tasks, 1):
                kind = client.resolve_kind(named or task.kind)
                say(f"\ntask {task.id} ({number} of {len(tasks)})")
                engine.begin_task(task.id)
                ep = await client.begin(task, EpisodeOptions(kind=kind, group_size=1))
                agent = Agent(agents[kind], loop=agent_loop)
                done = await attempt(client, ep, agent, timeout_s=RunnerOptions().attempt_timeout_s)
                tally.add(done)
                inbox = topology.inbox(job.run)
                turns = [one for stored in broker.stored(inbox) if isinstance(one := decode(stored.body), Turn)]
                broker.purge(inbox)
                for line in (*describe_calls(turns), *describe_outcome(done, ep.outcome, engine.refusals, known)):
                    say(line)
    finally:
        agent_loop.close()
    say(f"\n{tally.summary(time.monotonic() - began)}")
    return tally


@contextlib.asynccontextmanager
async def _open(job: SwarmJob, recording: Recording) -> Any:
    """Open client, broker and engine, with a proxy between them, while the context is open."""
    with tempfile.TemporaryDirectory(prefix="swarmq-offline-") as folder:
        job = simplify_job(job, folder)
        root, broker, engine = secrets.token_bytes(32), MemoryBroker(), RecordedEngine(recording)
        await declare_run(broker, job)
        app = create_app(job, root=root, engines={name: [engine] for name in job.policies}, broker=broker)
        async with serve_app(server_config(app, job.proxy, most_connections=CONNECTIONS)) as port:
            invite = keys.Invite(
                run=job.run,
                client=CLIENT,
                secret=keys.derive_client_secret(root, CLIENT),
                amqp_url="memory:",
                base_url=job.proxy.url(port),
                policies=tuple(job.policies),
                frozen=job.frozen,
                kinds=job.task_kinds,
                group_size=1,
                ticketed=False,
            )
            spool = Path(folder, "spool")
            async with AsyncSwarmClient(
                invite, spool=spool, open_broker=lambda *_: contextlib.nullcontext(broker)
            ) as client:
                yield client, broker, engine


def simplify_job(job: SwarmJob, folder: str) -> SwarmJob:
    """Return a job with the same policies and kinds whose proxy listens on loopback. Limits for tokens are left out, because the
    scripted tokens are not those of the model."""
    policies = {
        name: {"model": policy.model, "aliases": policy.aliases, "trained": policy.trained}
        for name, policy in job.policies.items()
    }
    tree = {"run": job.run, "folder": folder, "mix": job.mix, "policies": policies}
    return SwarmJob.build(tree | {"kinds": {kind: {} for kind in job.task_kinds}})


def describe_calls(turns: Sequence[Turn]) -> Iterator[str]:
    """Yield a line for each message that each call added; its answer is the last. The answer before, which an agent sends back with
    spaces of its own, is not shown again."""
    before = ""
    for number, turn in enumerate(turns, 1):
        *added, answer = msgspec.json.decode(turn.messages)
        for message in added:
            text = _text_of(message)
            if message.get("role") != "assistant" or "".join(text.split()) != "".join(before.split()):
                yield f"  {message.get('role')}: {_shorten(text)}"
        before = _text_of(answer)
        yield f"  call {number}: {_shorten(before)}"


def describe_outcome(
    done: AttemptResult, end: EpisodeEnd | None, refusals: Sequence[str], known: set[str]
) -> Iterator[str]:
    """Yield lines about the end of an episode. `refusals`: why calls were not answered. `known`: failures that were shown in full
    before; this one is added."""
    yield from (f"  no answer: {why}" for why in refusals)
    if done.error is not None:
        failure = describe_failure(done.error)
        if refusals:
            yield f"  failed: {locate_failure(done.error)}, after a call without an answer"
        else:
            yield f"  failed: {f'as before, {locate_failure(done.error)}' if failure in known else failure}"
        known.add(failure)
    elif end is None or not end.rewards:
        yield f"  ended without a reward: {end.reason if end else 'not ended'}"
    else:
        rewards = [f"{policy} {value:g}" for policy, value in end.rewards.items()]
        yield f"  reward {', '.join(rewards)}{SUCCESS[done.success]}"
        if end.metrics:
            yield f"  metrics {', '.join(f'{name} {value:g}' for name, value in end.metrics.items())}"


def _text_of(message: Mapping[str, Any]) -> str:
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    called = [f"-> {one.get('name')}({one.get('arguments')})" for one in calls]
    content = message.get("content") or ""
    return " ".join([content if isinstance(content, str) else msgspec.json.encode(content).decode(), *called]).strip()


def _shorten(text: str) -> str:
    line = text.replace("\n", "\\n")
    return line if len(line) <= SHOWN_CHARACTERS else f"{line[:SHOWN_CHARACTERS]}... ({len(line)} characters)"
