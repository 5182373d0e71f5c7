"""Collection of the token traces of a step, by episode and turn, from its micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from swarmq.learner.batching.micro_batches import MicroBatch
from swarmq.learner.methods.losses import TokenLoss
from swarmq.learner.store.token_trace import EpisodeTrace, TurnTrace
from swarmq.messages import Rollout


class TraceBuilder:
    """Builder of token traces, which stay on the device until they are copied to the host at the end."""

    def __init__(self) -> None:
        self._passes: list[MicroBatch] = []
        self._scored: list[Tensor] = []
        self._judged = True

    def add(self, one: MicroBatch, logprobs: Tensor, entropies: Tensor, loss: TokenLoss, left_out: Tensor) -> None:
        """Add a micro-batch. `logprobs`, `entropies` [S]: in nats; `left_out` [S]: whether a filter removed the token."""
        self._judged = loss.advantages is not None
        used = torch.zeros_like(logprobs) if loss.advantages is None else loss.advantages
        self._passes.append(one)
        self._scored.append(
            torch.stack(
                [
                    logprobs.detach().float(),
                    entropies.detach().float(),
                    left_out.float(),
                    used.float(),
                    loss.effects.float(),
                ]
            )
        )

    def build(self, episodes: Sequence[Rollout]) -> list[EpisodeTrace]:
        """Return the traces. `episodes`: the episodes to which the micro-batches' indices refer."""
        if not self._passes:
            return []
        logprobs, entropies, left_out, used, effects = torch.cat(self._scored, dim=1).cpu().numpy()
        whose, turn, offset = (
            np.concatenate([getattr(one.layout, name) for one in self._passes])
            for name in ("episodes", "turns", "offsets")
        )
        order = np.lexsort((offset, turn, whose))
        edges = np.flatnonzero(np.diff(whose[order]) | np.diff(turn[order])) + 1
        turns: dict[int, list[TurnTrace]] = {}
        for part in np.split(order, edges):
            index, apart = int(whose[part[0]]), bool((used[part] != used[part[0]]).any())
            turns.setdefault(index, []).append(
                TurnTrace(
                    call_id=episodes[index].turns[turn[part[0]]].call_id,
                    advantage=float(used[part[0]]) if self._judged and not apart else None,
                    logprobs=_encode_floats(logprobs[part]),
                    entropies=entropies[part].astype("<f2").tobytes(),
                    left_out=_encode_flags(left_out[part]),
                    advantages=_encode_floats(used[part]) if apart else b"",
                    effects=_encode_flags(effects[part]),
                )
            )
        return [EpisodeTrace(episode_id=episodes[i].episode_id, turns=tuple(of)) for i, of in turns.items()]


def _encode_floats(values: np.ndarray) -> bytes:
    return values.astype("<f4").tobytes()


def _encode_flags(values: np.ndarray) -> bytes:
    """Return one byte per flag, or no bytes if all flags are 0."""
    return values.astype(np.uint8).tobytes() if values.any() else b""
