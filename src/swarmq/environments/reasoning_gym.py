"""`reasoning-gym:NAME?size=500&seed=1`: procedural problems, asked and scored by `reasoning-gym`'s own code.

    seed ──> train: problems 0 .. size-1             seed + EVAL_SEED ──> eval: problems that training does not have

A worker makes the problem again from the settings that its task carries, because some scores compare types (tuples) that do not
survive a queue.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

from swarmq.client.ask import ask_async
from swarmq.client.data.readers import create_gym_dataset
from swarmq.client.episodes.episode import AsyncEpisode
from swarmq.client.episodes.event_loops import run_in_thread
from swarmq.environments.protocol import Split, Target, read_payload, require_package
from swarmq.errors import TaskError
from swarmq.outcome import Outcome, to_reward

EVAL_SEED = 1_000_003
"""Difference between the seeds of the evaluation split and of the training split."""
EVAL_SIZE = 100
MAX_DATASETS = 64
"""Maximum number of data sets, one for each combination of settings, that a worker keeps in memory."""


class ReasoningGymEnvironment:
    """One data set of `reasoning-gym`.

    Settings are those of the data set, and `eval_size` (100) problems for evaluation; `system` names one of
    `reasoning_gym.utils.SYSTEM_PROMPTS`.
    """

    def __init__(self, target: Target) -> None:
        require_package(target, "reasoning_gym", "'swarmq[environments]'")
        self._target = target
        self._eval_size = target.take_count("eval_size", EVAL_SIZE)
        system = target.take("system", str, "default")
        self._settings: dict[str, Any] = {"seed": 0, **target.settings}
        self._datasets: dict[str, Any] = {}
        self._create(self._settings)
        from reasoning_gym.utils import SYSTEM_PROMPTS  # noqa: PLC0415 - an optional package

        if system not in SYSTEM_PROMPTS:
            raise TaskError(f"{target}: system is {system!r}: choose one of {', '.join(SYSTEM_PROMPTS)}")
        self._system: str = SYSTEM_PROMPTS[system]

    def tasks(self, split: Split) -> Iterator[dict[str, Any]]:
        training = self._create(self._settings)
        if split == "train":
            yield from self._describe(training, self._settings, range(len(training)))
            return
        known = {entry["question"] for entry in training}
        settings = {**self._settings, "seed": self._settings["seed"] + EVAL_SEED, "size": self._eval_size}
        entries = self._create(settings)
        fresh = [number for number, entry in enumerate(entries) if entry["question"] not in known]
        if not fresh:
            raise TaskError(
                f"{self._target}: all {len(known)} problems of training include every problem drawn for evaluation: choose "
                "harder settings or a smaller size, or feed held-out problems from a file"
            )
        yield from self._describe(entries, settings, fresh)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        yield

    async def attempt(self, ep: AsyncEpisode) -> Outcome:
        settings, index, question = read_payload(
            self._target, ep.payload, {"settings": dict, "index": int, "question": str}
        )
        dataset = self._create(settings)
        entry = await run_in_thread(dataset.__getitem__, index)
        if entry["question"] != question:
            raise TaskError(
                f"{self._target}: problem {index} differs from the one that was fed: `swarmq feed` and `swarmq worker` need "
                "the same version of reasoning-gym"
            )
        messages = [{"role": "system", "content": self._system}, {"role": "user", "content": question}]
        text = await ask_async(ep, messages)
        answer = _extract_answer(text)
        reward = await run_in_thread(lambda: dataset.score_answer(answer=answer, entry=entry))
        reward = to_reward(f"the score of {self._target}", reward)
        return Outcome(
            reward=reward, success=reward >= 1, metrics={"score": reward, "answered": float(answer is not None)}
        )

    def _create(self, settings: dict[str, Any]) -> Any:
        key = json.dumps(settings, sort_keys=True, default=str)
        if key not in self._datasets:
            if len(self._datasets) >= MAX_DATASETS:
                self._datasets.clear()
            self._datasets[key] = create_gym_dataset(self._target.name, settings, self._target.name)
        return self._datasets[key]

    def _describe(self, entries: Any, settings: dict[str, Any], numbers: Any) -> Iterator[dict[str, Any]]:
        for number in numbers:
            yield {
                **entries[number],
                "id": f"{self._target.name}-{settings['seed']}-{number}",
                "environment": str(self._target),
                "dataset": self._target.name,
                "settings": settings,
                "index": number,
            }


def _extract_answer(text: str) -> str | None:
    from reasoning_gym.utils import extract_answer  # noqa: PLC0415 - loaded with the environment

    answer: str | None = extract_answer(text)
    return answer
