"""A client of the fault run that knows nothing but HTTP: `python -m benchmarks.faults.http_client LEDGER FEEDING NAMES`.

No code of swarmq runs in it but what signs its token. It makes tasks of its own, begins and ends their episodes by the proxy's control
routes, and asks like the agents that lose an answer without noticing: requests are sent again without a retry count, many
episodes are a single question, and an agent that gets an error may end with a reward all the same. With NAMES its ends say which
answers its agents received (`calls`), which is what such a client must do where the network may lose them; without, it speaks to
the proxy directly. It begins episodes while the file FEEDING exists.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from benchmarks.faults.client import THINK_S, Appender, Line, Words, digest, put_clock_wrong, true_time
from swarmq.keys import Invite, Operator, mint_operator

LANES = 4
ANSWER_S = 60.0
PAUSE_S = 0.3
MOST_SENDINGS = 8
TOKEN_LIFETIME_S = 24 * 3600.0

Json = dict[str, Any]


class LostAnswerError(Exception):
    """A request got no whole answer."""


class Agent:
    """One lane: slot after slot, each attempted once."""

    def __init__(self, invite: Invite, ledger: Appender[Line], feeding: Path, *, names: bool) -> None:
        self._invite, self._ledger, self._feeding, self._names = invite, ledger, feeding, names
        self._http = httpx.Client(timeout=ANSWER_S)
        operator = Operator(
            run=invite.run,
            name=invite.client,
            roles=("rollout",),
            by_client=True,
            expires_at=time.time() + TOKEN_LIFETIME_S,
        )
        self._token = mint_operator(invite.secret, operator)

    def run(self, slots: Iterator[tuple[str, int]]) -> None:
        for task, repeat in slots:
            while not self._feeding.exists():
                time.sleep(PAUSE_S)
            self._attempt(task, repeat)

    def _attempt(self, task: str, repeat: int) -> None:
        episode_id = uuid.uuid4().hex
        asked = {
            "episode_id": episode_id,
            "task_id": task,
            "repeat": repeat,
            "wait_s": 5,
            "client_id": self._invite.client,
        }
        begun = self._control("episodes", asked, until_fed=True)
        if begun is None:
            self._control(f"episodes/{episode_id}/abort", {"outcome_id": "unused"})
            return
        answers: dict[str, str] = {}
        reward = self._play(begun, task, answers)
        self._note("ending", episode_id, task, repeat, answers)
        outcome: Json = {"reward": reward, "outcome_id": "the-end"}
        if self._names:
            outcome["calls"] = list(answers)
        if self._control(f"episodes/{episode_id}/end", outcome) is not None:
            self._note("confirmed", episode_id, task, repeat, answers)

    def _control(self, route: str, body: Json, *, until_fed: bool = False) -> Json | None:
        """Send until it is answered. None when it is refused, or when `until_fed` and nothing is to be begun any more."""
        url = f"{self._invite.base_url}/control/{route}"
        while not until_fed or self._feeding.exists():
            try:
                answer = self._http.post(url, json=body, headers={"Authorization": f"Bearer {self._token}"})
            except httpx.HTTPError:
                time.sleep(PAUSE_S)
                continue
            if answer.is_success:
                found: Json = answer.json()
                return found
            if answer.status_code != 429 and answer.status_code < 500:
                print(route, answer.status_code, answer.text, file=sys.stderr, flush=True)
                return None
            time.sleep(PAUSE_S)
        return None

    def _play(self, begun: Json, task: str, answers: dict[str, str]) -> float:
        """One to three questions, mostly one. An error is sent again, or endured: the reward is given all the same."""
        messages = [{"role": "user", "content": f"task {task}"}]
        total = 0
        for _ in range(random.choice((1, 1, 2, 3))):
            text = self._insist(begun, messages, answers, sendings=random.choice((1, 2, MOST_SENDINGS)))
            if text is None:
                break
            total += len(text)
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "again"}]
            time.sleep(random.expovariate(1 / THINK_S))
        return total + random.random()

    def _insist(self, begun: Json, messages: list[Json], answers: dict[str, str], *, sendings: int) -> str | None:
        for _ in range(sendings):
            try:
                call_id, text = self._ask(begun, messages)
            except (httpx.HTTPError, LostAnswerError):
                time.sleep(PAUSE_S)
            else:
                answers[call_id] = digest(text)
                return text
        return None

    def _ask(self, begun: Json, messages: list[Json]) -> tuple[str, str]:
        """Id and text of an answer that has come to its last byte."""
        url = f"{self._invite.base_url}/chat/completions"
        headers = {"Authorization": f"Bearer {begun['api_key']}"}
        request: Json = {"model": begun["model"], "messages": messages, "max_tokens": 12}
        if random.random() < 0.5:
            answer = self._http.post(url, json=request, headers=headers)
            if not answer.is_success:
                raise LostAnswerError(answer.text)
            completion = answer.json()
            return completion["id"], completion["choices"][0]["message"]["content"] or ""
        parts, call_id, done = [], "", False
        with self._http.stream("POST", url, json={**request, "stream": True}, headers=headers) as stream:
            if not stream.is_success:
                raise LostAnswerError(str(stream.status_code))
            for line in stream.iter_lines():
                data = line.removeprefix("data: ")
                done |= data == "[DONE]"
                if line.startswith("data: {"):
                    chunk = json.loads(data)
                    if "error" in chunk:
                        raise LostAnswerError(data)
                    call_id = chunk["id"]
                    parts += [choice["delta"].get("content") or "" for choice in chunk["choices"]]
        if not done:
            raise LostAnswerError("the stream ended before its answer")
        return call_id, "".join(parts)

    def _note(self, event: Words, episode_id: str, task: str, repeat: int, answers: dict[str, str]) -> None:
        self._ledger.add(
            Line(
                event=event,
                episode_id=episode_id,
                slot=f"{task}.{repeat}",
                at=true_time(),
                answers=dict(answers),
                names=self._names,
            )
        )


class Slots:
    """The repeats of one new task after another, for lanes that share them."""

    def __init__(self, client: str, group_size: int) -> None:
        self._client, self._size, self._lock, self._number = client, group_size, threading.Lock(), 0
        self._start = uuid.uuid4().hex[:8]

    def __iter__(self) -> Iterator[tuple[str, int]]:
        while True:
            with self._lock:
                number, self._number = self._number, self._number + 1
            yield f"{self._client}.{self._start}.{number // self._size}", number % self._size


def main(ledger: str, feeding: str, names: str = "") -> None:
    put_clock_wrong(Path(ledger))
    invite = Invite.decode(os.environ["SWARMQ_INVITE"])
    lines, slots = Appender[Line](Path(ledger)), Slots(invite.client, invite.group_size)
    for _ in range(LANES):
        agent = Agent(invite, lines, Path(feeding), names=bool(names))
        threading.Thread(target=agent.run, args=(iter(slots),), daemon=True).start()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    stop.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
