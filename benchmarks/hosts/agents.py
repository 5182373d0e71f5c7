"""The agents of the joint run: `python -m benchmarks.hosts.agents INVITE_FILE FOLDER`, until the file FOLDER/stop is there.

Each attempt is noted in FOLDER/ledger.jsonl before its end is sent, and again once that is confirmed.
"""

from __future__ import annotations

import hashlib
import random
import sys
import time
from pathlib import Path

from openai import OpenAI, Timeout

from benchmarks.faults.client import Appender, Line, Words
from swarmq import Episode, SwarmClient

CONCURRENCY = 16
MAX_ATTEMPTS = 1000
"""Attempts fail because hosts are cut off and killed; giving a slot up is not what is measured."""
TASKS = 4
TIMEOUT = Timeout(30.0, connect=3.0)


class RewardLine(Line, frozen=True, kw_only=True):
    """A line of the ledger, with the attempt's reward once it has one."""

    reward: float = 0.0


def score(text: str) -> float:
    """Return 1 for an answer that begins with a lower-case letter, as do more than a quarter of the tiny model's tokens, else 0, and up
    to 0.1 by chance: groups of equal rewards are not trained, and training is to go on when the policy has learned."""
    return float("a" <= text[:1] <= "z") + 0.1 * random.random()


class Writer:
    """The agent: one question, and a reward for the answer."""

    def __init__(self, ledger: Appender[RewardLine]) -> None:
        self._openai = OpenAI(base_url="set per episode", api_key="set per episode", max_retries=4, timeout=TIMEOUT)
        self._ledger = ledger

    def __call__(self, ep: Episode) -> None:
        answers: dict[str, str] = {}
        try:
            openai = self._openai.with_options(base_url=ep.base_url, api_key=ep.api_key)
            asked = openai.chat.completions.create(model=ep.model, messages=[{"role": "user", "content": "write"}])
            text = asked.choices[0].message.content or ""
            answers[asked.id] = hashlib.sha256(text.encode()).hexdigest()
        except Exception:
            self._note("failed", ep, answers)
            raise
        reward = score(text)
        self._note("ending", ep, answers, reward)
        ep.end(reward)
        self._note("confirmed", ep, answers, reward)

    def _note(self, event: Words, ep: Episode, answers: dict[str, str], reward: float = 0.0) -> None:
        line = RewardLine(
            event=event, episode_id=ep.episode_id, slot=ep.slot.id, at=time.time(), answers=answers, reward=reward
        )
        self._ledger.add(line)


def main(invite: Path, folder: Path) -> None:
    writer = Writer(Appender(folder / "ledger.jsonl"))
    with SwarmClient(invite.read_text().strip(), spool=folder / "spool") as client:
        while not (folder / "stop").exists():
            tasks = [{"id": f"{time.time_ns()}-{number}"} for number in range(TASKS)]
            client.run_episodes_until_all_complete(
                tasks, writer, concurrency=CONCURRENCY, max_attempts=MAX_ATTEMPTS, progress=False
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
