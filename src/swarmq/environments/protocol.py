"""What every environment offers, and the targets by which users name environments: `scheme:NAME?key=value&key=value`."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal, Protocol, TypeVar

import msgspec

from swarmq.client.data.readers import parse_settings
from swarmq.client.episodes.episode import AsyncEpisode
from swarmq.errors import MissingExtraError, TaskError
from swarmq.outcome import Outcome

Split = Literal["train", "eval"]
T = TypeVar("T")


class Environment(Protocol):
    """Tasks, rollout and rewards of somebody's environment."""

    def tasks(self, split: Split) -> Iterator[dict[str, Any]]:
        """Yield the tasks of a split, each with an `id`. No task is in both splits. Raises TaskError."""
        ...

    def serving(self) -> AbstractAsyncContextManager[None]:
        """Start what attempts share, such as tool servers, while the context is open. Raises TaskError if the environment cannot run."""
        ...

    async def attempt(self, ep: AsyncEpisode) -> Outcome:
        """Run one rollout and return its rewards. Raises whatever broke, which fails the episode."""
        ...


class Target(msgspec.Struct, frozen=True):
    """A parsed target, e.g. `gymnasium:FrozenLake-v1?max_steps=20`."""

    scheme: str
    name: str
    settings: dict[str, Any]
    """The part after `?`; values are JSON, or text."""

    def __str__(self) -> str:
        return f"{self.scheme}:{self.name}"

    def take(self, key: str, kind: type[T], default: T) -> T:
        """Remove a setting that swarmq reads itself and return it. Raises TaskError for a value of another type."""
        if key not in self.settings:
            return default
        value = self.settings.pop(key)
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            raise TaskError(f"{self}: {key} is {value!r}: {error}") from error

    def take_count(self, key: str, default: int, *, least: int = 1) -> int:
        """Remove a setting that is a whole number and return it. Raises TaskError for any other value."""
        count = self.take(key, int, default)
        if count < least:
            raise TaskError(f"{self}: {key} is {count}: at least {least} is needed")
        return count


def parse_target(text: str) -> Target:
    """Parse `scheme:NAME?key=value&key=value`. Raises TaskError if the part after `?` is malformed."""
    target, settings = parse_settings(text)
    scheme, _, name = target.partition(":")
    return Target(scheme, name, settings)


def require_package(target: Target, package: str, extra: str) -> None:
    """Raise MissingExtraError that names the `pip` command if a package is not installed."""
    if importlib.util.find_spec(package) is None:
        raise MissingExtraError(f"{target} needs {package}: pip install {extra}")


def describe_error(error: BaseException) -> str:
    """Return an error and its cause in one line; of a long one, such as a program's traceback, the beginning and the end."""
    text = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
    because = f" (because: {describe_error(error.__cause__)})" if error.__cause__ else ""
    return f"{type(error).__name__}: {text if len(text) < 600 else f'{text[:300]} ... {text[-300:]}'}{because}"


def read_payload(target: Target, payload: Any, fields: Mapping[str, type]) -> list[Any]:
    """Return the named fields of a task's payload. Raises TaskError for a task that another environment or data set made."""
    if not isinstance(payload, dict) or payload.get("environment") != str(target):
        made_by = payload.get("environment") if isinstance(payload, dict) else type(payload).__name__
        raise TaskError(
            f"the task is not of {target} but of {made_by}: feed this kind with `swarmq feed RUN {target}`, or start the "
            "worker with the environment that was fed"
        )
    try:
        return [msgspec.convert(payload[name], kind) for name, kind in fields.items()]
    except (KeyError, msgspec.ValidationError) as error:
        raise TaskError(f"a task of {target} is damaged: {error}") from error
