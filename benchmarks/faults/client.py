"""One of the clients of the fault run: `python -m benchmarks.faults.client LEDGER`, invited by $SWARMQ_INVITE.

A worker on the task queue with an agent of ordinary Python around the `openai` SDK. It keeps a ledger of its own, a
line before an outcome is sent and a line after the broker has confirmed it, with the ids and the texts of exactly the
answers that the agent received. The proof compares that with what was trained.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import sys
import threading
import time
from pathlib import Path
from typing import Generic, Literal, TypeVar

import msgspec
from openai import OpenAI

from swarmq import AsyncSwarmClient, Episode
from swarmq.client.runners.attempts import RunnerOptions
from swarmq.client.runners.worker_processes import run_workers

CONCURRENCY = 6
MAX_ATTEMPTS = 50
"""Attempts fail because we break things; giving a slot up is not what is measured."""
ENDURING = 0.25
"""Share of the agents that catch an error of a call and end with a reward."""
THINK_S = 0.05
"""Mean time an environment takes between two calls."""


Words = Literal["ending", "confirmed", "failed"]
T = TypeVar("T")


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a client's ledger."""

    event: Words
    episode_id: str
    slot: str
    at: float
    """Unix time."""
    answers: dict[str, str] = {}
    """Call id -> digest of the text that the agent received to its end."""
    names: bool = True
    """The client says which answers its agents received, or is one of ours, which does so by itself."""


class Appender(Generic[T]):
    """A file of JSON lines that survive a SIGKILL of the process that writes them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.touch()
        whole = path.read_bytes().rfind(b"\n") + 1
        os.truncate(path, whole)  # a line that a kill has cut would spoil the next one
        self._lock = threading.Lock()

    def add(self, line: T) -> None:
        with self._lock, self._path.open("ab", buffering=0) as file:
            file.write(msgspec.json.encode(line) + b"\n")


class Lines(Appender[T]):
    """One whose lines, those of earlier processes too, are in `found`."""

    def __init__(self, path: Path, kind: type[T]) -> None:
        self.found = read_lines(path, kind)
        super().__init__(path)

    def add(self, line: T) -> None:
        self.found.append(line)
        super().add(line)


def read_lines(path: Path, kind: type[T]) -> list[T]:
    """The whole lines of a file; one that a kill has cut is left out."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [msgspec.json.decode(line, type=kind) for line in lines if line.endswith(b"\n")]


def clock_of(ledger: Path) -> Path:
    """The file that says by how many seconds the clock of a ledger's client is wrong."""
    return ledger.with_suffix(".clock")


def put_clock_wrong(ledger: Path) -> None:
    """As that file says, in this process."""
    with contextlib.suppress(FileNotFoundError):
        offset_s = float(clock_of(ledger).read_text())
        time.time = lambda: true_time() + offset_s


def true_time() -> float:
    """Unix time, also where this process's clock was put wrong."""
    return time.clock_gettime(time.CLOCK_REALTIME)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Player:
    """The agent: one to three turns of chat, streamed or not, and a reward that depends on the answers.

    One in four lives with errors: where a question gets no answer it ends with the reward that it has by then.
    """

    def __init__(self, base_url: str, ledger: Appender[Line]) -> None:
        self._openai = OpenAI(base_url=base_url, api_key="set per episode", max_retries=6, timeout=20.0)
        self._ledger = ledger

    def __call__(self, ep: Episode) -> None:
        answers: dict[str, str] = {}
        try:
            reward = self._play(ep, answers)
        except Exception:
            self._note("failed", ep, answers)
            raise
        self._note("ending", ep, answers)
        ep.end(reward)
        self._note("confirmed", ep, answers)
        time.sleep(random.expovariate(1 / THINK_S))  # the environment is torn down; the task is still held

    def _note(self, event: Words, ep: Episode, answers: dict[str, str]) -> None:
        self._ledger.add(
            Line(event=event, episode_id=ep.episode_id, slot=ep.slot.id, at=true_time(), answers=dict(answers))
        )

    def _play(self, ep: Episode, answers: dict[str, str]) -> float:
        client = self._openai.with_options(api_key=ep.api_key)
        messages: list[dict[str, str]] = [{"role": "user", "content": f"task {ep.task.id}"}]
        text = ""
        endures = random.random() < ENDURING
        for _ in range(random.randint(1, 3)):
            try:
                call_id, text = self._ask(client, ep.model, messages)
            except Exception:
                if endures and answers:
                    break
                raise
            answers[call_id] = digest(text)
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "again"}]
            time.sleep(random.expovariate(1 / THINK_S))
        return float(len(text)) + random.random()

    def _ask(self, client: OpenAI, model: str, messages: list[dict[str, str]]) -> tuple[str, str]:
        """Id and text of an answer, received whole. A stream that breaks fails the attempt: agents cannot resume it."""
        request = {"model": model, "messages": messages, "max_tokens": 12}
        if random.random() < 0.5:
            completion = client.chat.completions.create(**request)
            return completion.id, completion.choices[0].message.content or ""
        parts, call_id, finished = [], "", False
        with client.chat.completions.create(**request, stream=True) as stream:
            for chunk in stream:
                call_id = chunk.id
                for choice in chunk.choices:
                    parts.append(choice.delta.content or "")
                    finished |= choice.finish_reason is not None
        if not finished:
            raise ConnectionError("the stream ended before its answer")
        return call_id, "".join(parts)


def main() -> None:
    put_clock_wrong(Path(sys.argv[1]))
    client = AsyncSwarmClient(code_version="faults")
    player = Player(client.invite.base_url, Appender(Path(sys.argv[1])))
    run_workers(
        client, {None: player}, RunnerOptions(concurrency=CONCURRENCY, max_attempts=MAX_ATTEMPTS, progress=False)
    )


if __name__ == "__main__":
    main()
