"""What a step saw of every token it trained, for people: log-probability under the trained weights, advantage, and what
the loss did to its gradient.

    <folder>/000000042.0.msgpack.zst       version after the step, rank that computed these turns

Lies beside the batch log, which has all the rest. Nothing computes with it, so it is best effort: written after the
step, never synced, written again by a replay, and without it the learner does the same. No torch in here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import structlog
import zstandard

SUFFIX = ".msgpack.zst"
log = structlog.get_logger()


class TurnTrace(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The sampled tokens of one turn."""

    call_id: str
    advantage: float | None
    """That the loss used for all of them; None where it has one for each, or none at all."""
    logprobs: bytes
    """Packed float32, natural log under the weights before the step, one per sampled token."""
    left_out: bytes = b""
    """One byte per sampled token, 1 where a filter left it out; empty where none was."""
    advantages: bytes = b""
    """Packed float32, one per sampled token, where the loss has its own for each (`distill`); else empty."""
    effects: bytes = b""
    """One byte per sampled token, what the loss did to its policy gradient (algorithms/effects.py); empty where nothing."""


class EpisodeTrace(msgspec.Struct, frozen=True, kw_only=True):
    episode_id: str
    turns: tuple[TurnTrace, ...]


def write_trace(folder: Path, version: int, rank: int, episodes: Sequence[EpisodeTrace]) -> None:
    """Best effort: a full disk costs the record, not the run."""
    path = folder / f"{version:09d}.{rank}{SUFFIX}"
    draft = path.with_suffix(".new")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(zstandard.compress(msgspec.msgpack.encode(episodes), 3))
        draft.replace(path)
    except OSError as error:
        log.warning("token_log_not_written", path=str(path), error=str(error))


def find_trace(folder: Path, version: int, episode_id: str) -> EpisodeTrace | None:
    """What the step to `version` saw of an episode, whose turns several ranks may have computed; None where it was
    not recorded or cannot be read."""
    turns = [turn for one in _read(folder, version) if one.episode_id == episode_id for turn in one.turns]
    return EpisodeTrace(episode_id=episode_id, turns=tuple(turns)) if turns else None


def prune_traces(folder: Path, version: int) -> None:
    """Remove the records of steps up to `version`."""
    for path in folder.glob(f"*{SUFFIX}"):
        if int(path.name.partition(".")[0]) <= version:
            path.unlink(missing_ok=True)


def _read(folder: Path, version: int) -> Iterator[EpisodeTrace]:
    for path in sorted(folder.glob(f"{version:09d}.*{SUFFIX}")):
        try:
            yield from msgspec.msgpack.decode(zstandard.decompress(path.read_bytes()), type=list[EpisodeTrace])
        except (OSError, zstandard.ZstdError, msgspec.MsgspecError) as error:
            log.warning("token_log_not_readable", path=str(path), error=str(error))
