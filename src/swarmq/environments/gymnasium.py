"""`gymnasium:ID` or `gymnasium:MODULE:ID`: one game of a gymnasium environment; observations become user messages, answers become actions.

    seed ──reset──> observation ──to_text──> user message ──model──> answer ──to_action──> step ──> total reward

Spaces of numbers (Discrete) and of text need no code, neither do environments that can draw themselves as text (`ansi`). For all
others, a user gives two functions in the target: `?to_text=my:text&to_action=my:action`.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

from swarmq.client.ask import ask
from swarmq.client.data.targets import load_object
from swarmq.client.episodes.episode import AsyncEpisode, Episode
from swarmq.client.episodes.event_loops import run_in_thread
from swarmq.environments.protocol import Split, Target, describe_error, read_payload, require_package
from swarmq.errors import TaskError
from swarmq.outcome import Outcome, to_reward

TRAIN_TASKS, EVAL_TASKS = 1000, 100
EVAL_SEED = 1_000_000
"""Difference between the first seeds of the evaluation split and of the training split."""
MAX_STEPS = 100
"""Maximum number of steps of a game whose environment has no limit of its own."""
HIGHLIGHT = re.compile(r"\x1b\[[0-9;]*m(.*?)\x1b\[0m", re.DOTALL)
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class GymnasiumEnvironment:
    """One gymnasium environment.

    Settings: `to_text` and `to_action` (module:function); `instructions` (text, or module:name of a text); `actions` (names of
    the actions of a Discrete space, separated by commas); `max_steps`; `tasks` (1000) and `eval_tasks` (100), a seed each;
    `seed` (0), the first one. All others are arguments of `gymnasium.make`.
    """

    def __init__(self, target: Target) -> None:
        require_package(target, "gymnasium", "'swarmq[environments]'")
        self._target = target
        self._sizes = {
            "train": target.take_count("tasks", TRAIN_TASKS),
            "eval": target.take_count("eval_tasks", EVAL_TASKS),
        }
        self._seed = target.take_count("seed", 0, least=0)
        max_steps = target.take_count("max_steps", 0, least=0)
        to_text, to_action = (_load_function(target, key) for key in ("to_text", "to_action"))
        names = [name.strip() for name in target.take("actions", str, "").split(",") if name.strip()]
        instructions = target.take("instructions", str, "")
        self._arguments = target.settings
        game = self._make(draws=to_text is None)
        try:
            spec = game.spec
            self._max_steps = max_steps or (spec and spec.max_episode_steps) or MAX_STEPS
            self._draws = to_text is None and game.render_mode == "ansi"
            self._to_text = to_text or (_clean_drawing if self._draws else _choose_to_text(target, game))
            self._to_action = to_action or _choose_to_action(target, game, names)
            self._legal = ", ".join(names) if names else _describe_space(game.action_space)
            self._instructions = _load_text(instructions) or _describe_rules(target, self._legal, own=bool(to_action))
        finally:
            game.close()

    def tasks(self, split: Split) -> Iterator[dict[str, Any]]:
        first = self._seed + (EVAL_SEED if split == "eval" else 0)
        for seed in range(first, first + self._sizes[split]):
            yield {"id": f"{self._target.name}-{seed}", "environment": str(self._target), "seed": seed}

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        yield

    async def attempt(self, ep: AsyncEpisode) -> Outcome:
        return await run_in_thread(self._play, ep.blocking())

    def _play(self, ep: Episode) -> Outcome:
        (seed,) = read_payload(self._target, ep.payload, {"seed": int})
        game = self._make(draws=self._draws)
        try:
            observation, info = game.reset(seed=seed)
            messages = [
                {"role": "system", "content": self._instructions},
                {"role": "user", "content": self._describe(game, observation)},
            ]
            total, steps, illegal, terminated, truncated = 0.0, 0, 0, False, False
            while not (terminated or truncated) and steps + illegal < self._max_steps:
                answer = ask(ep, messages)
                messages.append({"role": "assistant", "content": answer})
                action, refusal = self._read_action(game, answer)
                if refusal:
                    illegal += 1
                    messages.append({"role": "user", "content": refusal})
                    continue
                observation, reward, terminated, truncated, info = game.step(action)
                steps += 1
                total += to_reward(f"the reward of step {steps} of {self._target}", reward)
                messages.append({"role": "user", "content": self._describe(game, observation)})
        finally:
            game.close()
        success = info.get("is_success", info.get("success"))
        return Outcome(
            reward=total,
            success=bool(success) if success is not None else None,
            metrics={"steps": steps, "illegal_actions": illegal, "terminated": terminated, "truncated": truncated},
        )

    def _describe(self, game: Any, observation: Any) -> str:
        text: Any = self._to_text(game.render() if self._draws else observation)
        if not isinstance(text, str):
            raise TaskError(f"{self._target}: to_text returned {text!r} of type {type(text).__name__}, not text")
        return text

    def _read_action(self, game: Any, answer: str) -> tuple[Any, str]:
        """Return the action that an answer names, and what to tell the model if it names none that is legal."""
        try:
            action = self._to_action(answer)
        except ValueError as error:
            return None, f"Illegal action: {error}"
        if action is None or not game.action_space.contains(action):
            return None, f"Illegal action. Legal actions: {self._legal}."
        return action, ""

    def _make(self, *, draws: bool) -> Any:
        import gymnasium  # noqa: PLC0415 - an optional package

        arguments = dict(self._arguments)
        module, _, name = self._target.name.rpartition(":")
        try:
            if module:
                importlib.import_module(module)
            if draws and "render_mode" not in arguments:
                modes = _find_render_modes(gymnasium, name)
                arguments |= {"render_mode": "ansi"} if "ansi" in modes else {}
            return gymnasium.make(name, disable_env_checker=True, **arguments)
        except Exception as error:  # an environment is somebody's Python package
            raise TaskError(f"{self._target}: cannot be made: {describe_error(error)}") from error


def _find_render_modes(gymnasium: Any, name: str) -> list[str]:
    """Return the ways in which an environment draws itself."""
    spec = gymnasium.spec(name)
    maker = (
        gymnasium.envs.registration.load_env_creator(spec.entry_point)
        if isinstance(spec.entry_point, str)
        else spec.entry_point
    )
    return list(getattr(maker, "metadata", {}).get("render_modes", ()))


def _clean_drawing(drawing: str) -> str:
    """Return a drawing without colours; what was highlighted stands in brackets."""
    return COLOUR.sub("", HIGHLIGHT.sub(r"[\1]", drawing)).strip("\n")


def _choose_to_text(target: Target, game: Any) -> Callable[[Any], str]:
    from gymnasium import spaces  # noqa: PLC0415 - an optional package

    if isinstance(game.observation_space, spaces.Text | spaces.Discrete):
        return str
    raise TaskError(
        f"{target}: observations of {_describe_space(game.observation_space)} have no text of their own: write a function and "
        "name it, e.g. ?to_text=my_module:to_text"
    )


def _choose_to_action(target: Target, game: Any, names: list[str]) -> Callable[[str], Any]:
    from gymnasium import spaces  # noqa: PLC0415 - an optional package

    space = game.action_space
    if isinstance(space, spaces.Text) and not names:
        return str.strip
    if not isinstance(space, spaces.Discrete):
        raise TaskError(
            f"{target}: actions of {_describe_space(space)} cannot be read from text: write a function and name it, e.g. "
            "?to_action=my_module:to_action"
        )
    start, count = int(space.start), int(space.n)
    if names and len(names) != count:
        raise TaskError(f"{target}: actions names {len(names)} actions, but the environment has {count}")
    legal = {name.lower(): start + number for number, name in enumerate(names)} or {
        str(number): number for number in range(start, start + count)
    }
    pattern = (
        re.compile(r"\b(?:" + "|".join(map(re.escape, sorted(legal, key=len, reverse=True))) + r")\b")
        if names
        else re.compile(r"-?\d+")
    )

    def read(answer: str) -> Any:
        found = pattern.findall(answer.lower())
        return legal.get(found[-1]) if found else None

    return read


def _describe_rules(target: Target, legal: str, *, own: bool) -> str:
    how = "" if own else f" Legal actions: {legal}. The last action in your answer is taken."
    return f"You play {target.name}. Each message shows the present state. Answer with your next action.{how}"


def _describe_space(space: Any) -> str:
    from gymnasium import spaces  # noqa: PLC0415 - an optional package

    if isinstance(space, spaces.Discrete):
        return f"the numbers {space.start} to {space.start + space.n - 1}"
    return str(space)


def _load_function(target: Target, key: str) -> Callable[[Any], Any] | None:
    name = target.take(key, str, "")
    if not name:
        return None
    function: Callable[[Any], Any] = load_object(name)
    if not callable(function):
        raise TaskError(f"{target}: {key} names {name}, which is no function")
    return function


def _load_text(given: str) -> str:
    """Return the text itself, or the text that `module:name` names."""
    return str(load_object(given)) if re.fullmatch(r"[\w.]+:[\w.]+", given) else given
