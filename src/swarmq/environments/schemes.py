"""Schemes of targets, and the agent that `swarmq worker` calls for an environment."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from swarmq.client.episodes.episode import AsyncEpisode
from swarmq.environments.protocol import Environment, Target, parse_target
from swarmq.errors import TaskError
from swarmq.outcome import Outcome

_SCHEMES = {
    "gymnasium": "swarmq.environments.gymnasium:GymnasiumEnvironment",
    "openenv": "swarmq.environments.openenv:OpenEnvEnvironment",
    "reasoning-gym": "swarmq.environments.reasoning_gym:ReasoningGymEnvironment",
    "verifiers": "swarmq.environments.verifiers:VerifiersEnvironment",
}


class EnvironmentAgent:
    """An environment as the function of a worker. It can be sent to other processes, which load the environment again."""

    def __init__(self, text: str, environment: Environment) -> None:
        self.text = text
        self.environment = environment
        self.__qualname__ = text

    async def __call__(self, ep: AsyncEpisode) -> Outcome:
        return await self.environment.attempt(ep)

    def serving(self) -> AbstractAsyncContextManager[None]:
        return self.environment.serving()

    def __reduce__(self) -> tuple[Callable[[str], EnvironmentAgent], tuple[str]]:
        return load_agent, (self.text,)


def is_environment(text: str) -> bool:
    """Return whether a text names an environment rather than a file or `module:function`."""
    scheme, colon, rest = text.partition(":")
    return bool(colon and rest and scheme in _SCHEMES)


def load_environment(text: str) -> Environment:
    """Load the environment that a target names, also from the working directory. Raises TaskError if it cannot be loaded."""
    if not is_environment(text):
        raise TaskError(f"{text!r} is no environment: write {', '.join(f'{scheme}:NAME' for scheme in _SCHEMES)}")
    here = os.getcwd()  # noqa: PTH109 - sys.path holds text
    if here not in sys.path:
        sys.path.insert(0, here)
    target = parse_target(text)
    if not target.name:
        raise TaskError(f"{text!r} has no name: write {target.scheme}:NAME")
    module, _, name = _SCHEMES[target.scheme].partition(":")
    make: Callable[[Target], Any] = getattr(importlib.import_module(module), name)
    environment: Environment = make(target)
    return environment


def load_agent(text: str) -> EnvironmentAgent:
    """Load an environment as the function of a worker. Raises TaskError if it cannot be loaded."""
    return EnvironmentAgent(text, load_environment(text))
