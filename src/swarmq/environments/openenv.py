"""`openenv:URL`: an OpenEnv server, e.g. in a container; observations become user messages, answers become JSON actions.

    reset(seed) ──> observation ──user message──> model ──JSON──> step ──> total of the rewards

Every attempt has a session of its own on the server. An answer that does not fit the server's schema of actions is counted and told
to the model. It never reaches the server, so every error of the server is one of the environment, and fails the episode.
"""

from __future__ import annotations

import importlib
import json
import re
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager
from typing import Any

from swarmq.client.ask import ask_async
from swarmq.client.episodes.episode import AsyncEpisode
from swarmq.client.episodes.event_loops import run_in_thread
from swarmq.environments.protocol import Split, Target, describe_error, read_payload, require_package
from swarmq.errors import OutcomeError, RolloutError, TaskError
from swarmq.outcome import Outcome, to_reward

TRAIN_TASKS, EVAL_TASKS = 1000, 100
EVAL_SEED = 1_000_000
"""Difference between the first seeds of the evaluation split and of the training split."""
MAX_STEPS = 50
TIMEOUT_S = 30.0
FENCE = re.compile(r"```(?:json)?\s*(.*?)```", re.DOTALL)
OMITTED_FIELDS = {"done", "reward"}
"""Fields of an observation that are left out of the user message."""


class OpenEnvEnvironment:
    """One OpenEnv server.

    Settings: `max_steps` (50); `tasks` (1000) and `eval_tasks` (100), a seed each; `seed` (0), the first one; `timeout_s` (60)
    for a message to the server. All others are arguments of the server's `reset`.
    """

    def __init__(self, target: Target) -> None:
        for package in ("openenv", "jsonschema"):
            require_package(target, package, "openenv, in a virtual environment of its own")
        if not re.match(r"https?://", target.name):
            raise TaskError(f"{target}: write the address of a server, e.g. openenv:http://localhost:8000")
        self._target = target
        self._url = target.name.rstrip("/")
        self._sizes = {
            "train": target.take_count("tasks", TRAIN_TASKS),
            "eval": target.take_count("eval_tasks", EVAL_TASKS),
        }
        self._seed = target.take_count("seed", 0, least=0)
        self._max_steps = target.take_count("max_steps", MAX_STEPS)
        self._timeout_s = target.take("timeout_s", float, 60.0)
        self._arguments = target.settings

    def tasks(self, split: Split) -> Iterator[dict[str, Any]]:
        first = self._seed + (EVAL_SEED if split == "eval" else 0)
        for seed in range(first, first + self._sizes[split]):
            yield {"id": f"{split}-{seed}", "environment": str(self._target), "seed": seed}

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Read the schema of actions, which also checks that the server answers."""
        try:
            self._schema = (await run_in_thread(_fetch, f"{self._url}/schema"))["action"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TaskError(f"{self._target}: no OpenEnv server answers there: {describe_error(error)}") from error
        yield

    async def attempt(self, ep: AsyncEpisode) -> Outcome:
        (seed,) = read_payload(self._target, ep.payload, {"seed": int})
        client: Any = importlib.import_module("openenv.core")
        rewards: list[float] = []
        steps, illegal = 0, 0
        async with client.GenericEnvClient(base_url=self._url, message_timeout_s=self._timeout_s) as session:
            result = await self._call(session.reset(seed=seed, **self._arguments))
            messages = [
                {"role": "system", "content": self._describe_rules()},
                {"role": "user", "content": _describe_observation(result.observation)},
            ]
            while not result.done and steps + illegal < self._max_steps:
                answer = await ask_async(ep, messages)
                messages.append({"role": "assistant", "content": answer})
                try:
                    action = _read_action(answer, self._schema)
                except ValueError as error:
                    illegal += 1
                    messages.append({"role": "user", "content": f"Illegal action: {error}"})
                    continue
                result = await self._call(session.step(action))
                steps += 1
                if result.reward is not None:
                    rewards.append(to_reward(f"the reward of step {steps} of {self._target}", result.reward))
                messages.append({"role": "user", "content": _describe_observation(result.observation)})
        if result.done and not rewards:  # the protocol has no NaN: it arrives as None
            raise OutcomeError(
                f"{self._target} ended after step {steps} without a reward: none of its steps had a finite one"
            )
        return Outcome(
            reward=sum(rewards), metrics={"steps": steps, "illegal_actions": illegal, "done": float(result.done)}
        )

    async def _call(self, answer: Awaitable[Any]) -> Any:
        """Return the server's answer. Raises RolloutError for every error that the server reports."""
        try:
            return await answer
        except RuntimeError as error:  # openenv's class for them
            raise RolloutError(f"{self._target}: {error}") from error

    def _describe_rules(self) -> str:
        fields = {"properties": self._schema.get("properties", {}), "required": self._schema.get("required", [])}
        fields["properties"] = {name: kind for name, kind in fields["properties"].items() if name != "metadata"}
        return (
            "You act in an environment. Each message shows what you observe. Answer with your next action: a JSON object "
            f"that fits this schema: {json.dumps(fields, ensure_ascii=False)}"
        )


def _fetch(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:  # noqa: S310 - http or https, as the target was checked
        return json.loads(answer.read())


def _read_action(answer: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Return the action in an answer: a JSON object, also in a fence, or the bare value of a schema's only required field.

    Raises ValueError with a sentence for the model.
    """
    import jsonschema  # noqa: PLC0415 - comes with openenv

    fenced = FENCE.findall(answer)
    text = (fenced[-1] if fenced else answer).strip()
    try:
        value: Any = json.loads(text)
    except json.JSONDecodeError:
        value = text
    required: list[str] = schema.get("required", [])
    if not isinstance(value, dict):
        if len(required) != 1 or not text:
            raise ValueError("write a JSON object and nothing else")
        value = {required[0]: value}
    if error := jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(schema).iter_errors(value)):
        raise ValueError(f"{error.json_path}: {error.message}")
    action: dict[str, Any] = value
    return action


def _describe_observation(observation: Any) -> str:
    if not isinstance(observation, dict):
        return str(observation)
    shown = {
        name: value for name, value in observation.items() if name not in OMITTED_FIELDS and value not in (None, {}, [])
    }
    if len(shown) == 1 and isinstance(text := next(iter(shown.values())), str):
        return text
    return json.dumps(shown, ensure_ascii=False)
