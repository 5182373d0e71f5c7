"""A client process of the demo: `python -m swarmq.demo.client --reward honest --ledger FILE`, invited by $SWARMQ_INVITE.

It works on the task queues of all kinds with the demo's agent, and writes a ledger with a line for each outcome that the broker
has confirmed. The final account compares that ledger with what was trained.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
from openai import OpenAI

from swarmq import AsyncSwarmClient, Episode
from swarmq.client.runners.attempts import RunnerOptions
from swarmq.client.runners.worker import EVAL_SHARE, Worker
from swarmq.demo.agent import AgentResult, Reward, attempt, concise_score
from swarmq.demo.problems import Problem, score

REWARDS: dict[str, Reward] = {"honest": score, "concise": concise_score}

Agent = Callable[[Episode], None]


class LedgerEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a client's ledger: the start of an attempt, or its confirmed outcome with the reward."""

    episode_id: str
    slot: str
    kind: str
    reward: float | None = None


class ClientLedger:
    """A ledger whose lines survive a SIGKILL of the process that wrote them."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._lock = threading.Lock()

    def add(self, entry: LedgerEntry) -> None:
        with self._lock:
            self._file.write(msgspec.json.encode(entry) + b"\n")

    def close(self) -> None:
        self._file.close()


def read_ledger(path: Path) -> list[LedgerEntry]:
    """Return the entries of a ledger, without a last line that was cut."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [msgspec.json.decode(line, type=LedgerEntry) for line in lines if line.endswith(b"\n")]


class Solver:
    """Callable that runs the demo's agent in an episode; all episodes share one connection pool."""

    def __init__(self, base_url: str) -> None:
        self._openai = OpenAI(base_url=base_url, api_key="set per episode", max_retries=4, timeout=120.0)

    def __call__(self, ep: Episode, reward: Reward = score) -> AgentResult:
        client = self._openai.with_options(base_url=ep.base_url, api_key=ep.api_key)
        return attempt(client, ep.model, msgspec.convert(ep.payload, Problem), reward=reward)


def with_ledger(solver: Solver, reward: Reward, ledger: ClientLedger) -> Agent:
    """Return the agent function for a worker: attempt, end the episode, and only then write the outcome to the ledger."""

    def run(ep: Episode) -> None:
        ledger.add(LedgerEntry(episode_id=ep.episode_id, slot=ep.slot.id, kind=ep.kind))
        done = solver(ep, reward)
        ep.end(done.reward, success=done.success, metrics={"turns": done.turns, "tool_calls": done.tool_calls})
        ledger.add(LedgerEntry(episode_id=ep.episode_id, slot=ep.slot.id, kind=ep.kind, reward=done.reward))

    return run


def make_evaluator(solver: Solver) -> Agent:
    """Return the agent function for evaluation: the honest score, and no ledger, because nothing of it is trained."""

    def run(ep: Episode) -> None:
        done = solver(ep)
        ep.end(done.reward, success=done.success, metrics={"turns": done.turns, "tool_calls": done.tool_calls})

    return run


def make_workers(client: AsyncSwarmClient, agent: Agent, evaluator: Agent, concurrency: int) -> list[Worker]:
    """Return a worker for the tasks of each kind, and one for its evaluation."""
    kinds = client.invite.kinds
    lanes = max(1, concurrency // len(kinds))
    options = RunnerOptions(concurrency=lanes, progress=False)
    evaluation = RunnerOptions(concurrency=max(1, lanes // EVAL_SHARE), progress=False)
    return [
        *(Worker(client, agent, kind=kind, options=options) for kind in kinds),
        *(Worker(client, evaluator, kind=kind, mode="eval", options=evaluation) for kind in kinds),
    ]


async def work(reward: str, ledger_path: Path, concurrency: int) -> None:
    """Work until SIGTERM, then finish the attempts that have begun and return the other tasks to the queues."""
    client = AsyncSwarmClient(code_version=f"reward-{reward}")
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    solver = Solver(client.invite.base_url)
    with contextlib.closing(ClientLedger(ledger_path)) as ledger:
        agent = with_ledger(solver, REWARDS[reward], ledger)
        async with client, asyncio.TaskGroup() as tasks:
            for worker in make_workers(client, agent, make_evaluator(solver), concurrency):
                tasks.create_task(worker.run(stop))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reward", choices=sorted(REWARDS), default="honest")
    parser.add_argument("--ledger", type=Path, required=True)
    parser.add_argument("--concurrency", type=int, default=16)
    options = parser.parse_args()
    asyncio.run(work(options.reward, options.ledger, options.concurrency))


if __name__ == "__main__":
    main()
