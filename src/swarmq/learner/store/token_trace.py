"""Traces of every trained token, for inspection: log-probability under the learner's weights, advantage, and the effect of the
loss on its gradient.

<folder>/000000042.0.msgpack.zst       version after the step; earlier versions of swarmq wrote a file per rank: .0, .1, ...

The files lie beside the batch log. No computation needs them, so they are best effort: written after the step, never synced,
and written again by a replay. Without torch.
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
    """Trace of the sampled tokens of one turn."""

    call_id: str
    advantage: float | None
    """Advantage of all tokens of the turn; None if the loss has an advantage per token, or no advantages."""
    logprobs: bytes
    """Packed float32: natural log-probability of each sampled token under the weights before the step."""
    entropies: bytes = b""
    """Packed float16: entropy in nats of the learner's distribution at each sampled token, under the same weights; empty in
    traces of older versions."""
    left_out: bytes = b""
    """One byte per sampled token, 1 if a filter removed the token; empty if no token was removed."""
    advantages: bytes = b""
    """Packed float32 per sampled token, if the loss has an advantage for each (`distill`); else empty."""
    effects: bytes = b""
    """One byte per sampled token, the LossEffect on its policy gradient (algorithms/loss_effects.py); empty if there is no
    effect."""


class EpisodeTrace(msgspec.Struct, frozen=True, kw_only=True):
    episode_id: str
    turns: tuple[TurnTrace, ...]


def write_trace(folder: Path, version: int, episodes: Sequence[EpisodeTrace]) -> None:
    """Write the traces of a step. An episode may occur several times, with turns of different ranks. If the write fails, a warning is
    logged and training goes on."""
    path = folder / f"{version:09d}.0{SUFFIX}"
    draft = path.with_suffix(".new")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(zstandard.compress(msgspec.msgpack.encode(episodes), 3))
        draft.replace(path)
    except OSError as error:
        log.warning("token_log_not_written", path=str(path), reason=str(error))


def find_trace(folder: Path, version: int, episode_id: str) -> EpisodeTrace | None:
    """Return an episode's trace in the step to `version`, merged over the ranks that computed its turns; None if there is none
    or it cannot be read."""
    turns = [turn for one in _read(folder, version) if one.episode_id == episode_id for turn in one.turns]
    return EpisodeTrace(episode_id=episode_id, turns=tuple(turns)) if turns else None


def prune_traces(folder: Path, version: int) -> None:
    """Remove the traces of steps up to `version`."""
    for path in folder.glob(f"*{SUFFIX}"):
        if int(path.name.partition(".")[0]) <= version:
            path.unlink(missing_ok=True)


def _read(folder: Path, version: int) -> Iterator[EpisodeTrace]:
    for path in sorted(folder.glob(f"{version:09d}.*{SUFFIX}")):
        try:
            yield from msgspec.msgpack.decode(zstandard.decompress(path.read_bytes()), type=list[EpisodeTrace])
        except (OSError, zstandard.ZstdError, msgspec.MsgspecError) as error:
            log.warning("token_log_not_readable", path=str(path), reason=str(error))
