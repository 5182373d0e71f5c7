"""A tutorial's `example.toml`: what the runner must know that a user reads in its README."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated

import msgspec

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
Positive = Annotated[int, msgspec.Meta(ge=1)]


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Contents of `example.toml`. Functions and modules are named as in the folder: `agent:attempt`; with a dot, as they are."""

    title: str
    gain: float
    """Least rise of the held-out reward; the tutorial has learned if every seed rises by at least this much."""
    steps: Positive
    """Optimizer steps of every trained policy."""
    concurrency: Positive = 24
    held_out_repeats: Positive = 2
    """Attempts at each held-out task, before and after."""
    minutes: float = 10.0
    """Limit of the training."""
    epochs: Positive = 1
    """Times that the training tasks are fed."""
    feeds: dict[str, str]
    """Kind -> function that returns training tasks."""
    held_out: dict[str, str]
    """Kind -> function that returns held-out tasks."""
    agents: dict[str, str] = {}
    """Kind -> agent."""
    commands: dict[str, str] = {}
    """Kind -> arguments of `swarmq run`, for an agent that is a command; `$PWD` is the repository's root."""
    held_out_agents: dict[str, str] = {}
    """Kind -> agent of the held-out attempts, if it is another, e.g. against a fixed opponent."""
    models: dict[str, str] = msgspec.field(default_factory=lambda: {"main": "demonstrations"})
    """Policy -> module of demonstrations; other policies share the first model."""


def names(folder: Path = EXAMPLES) -> list[str]:
    """Return the names of all tutorials in a folder."""
    return sorted(path.parent.name for path in folder.glob("*/example.toml"))


def load(name: str, folder: Path = EXAMPLES) -> Manifest:
    """Return a tutorial's manifest. Raises ValueError with the file's name if it is missing or wrong."""
    path = folder / name / "example.toml"
    try:
        manifest = msgspec.toml.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError as error:
        raise ValueError(
            f"{name}: there is no {path.relative_to(folder.parent)}; tutorials: {', '.join(names(folder))}"
        ) from error
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path.relative_to(folder.parent)}: {error}") from error
    attempted = {**manifest.agents, **manifest.commands}
    kinds = {frozenset(table) for table in (manifest.feeds, manifest.held_out, attempted)}
    if len(kinds) > 1:
        raise ValueError(
            f"{path.relative_to(folder.parent)}: feeds, held_out and agents (with commands) have different kinds"
        )
    if manifest.agents and manifest.commands:
        raise ValueError(f"{path.relative_to(folder.parent)}: has both agents and commands")
    return manifest


def locate(name: str, target: str) -> str:
    """Return the import path of a target of a tutorial's manifest."""
    return target if "." in target.partition(":")[0] else f"examples.{name}.{target}"


def digest(name: str) -> str:
    """Return a digest of a tutorial's programs and settings, to tell whether a finished row is still its own."""
    found = hashlib.sha256()
    for path in sorted((EXAMPLES / name).iterdir()):
        if path.suffix in {".py", ".toml"} and path.name != "job_h200.toml":
            found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()[:12]
