"""From the passes of a step to what it saw of every token, by episode and turn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from swarmq.learner.passes import Pass
from swarmq.learner.token_log import EpisodeTokens, TurnTokens
from swarmq.messages import Episode


class Seen:
    """Collects on the device what the passes of a step scored; copied once, at the end."""

    def __init__(self) -> None:
        self._passes: list[Pass] = []
        self._scored: list[Tensor] = []

    def add(self, one: Pass, theta: Tensor, kept: Tensor) -> None:
        """`theta` [S] log-probabilities, `kept` [S] whether the token is trained."""
        self._passes.append(one)
        self._scored.append(torch.stack([theta.detach().float(), kept.float()]))

    def by_episode(self, episodes: Sequence[Episode]) -> list[EpisodeTokens]:
        """`episodes` are those that the passes' indices mean."""
        if not self._passes:
            return []
        theta, kept = torch.cat(self._scored, dim=1).cpu().numpy()
        whose, turn, offset = (
            np.concatenate([getattr(one.layout, name) for one in self._passes])
            for name in ("episodes", "turns", "offsets")
        )
        advantage = np.concatenate([one.advantages for one in self._passes])
        order = np.lexsort((offset, turn, whose))
        edges = np.flatnonzero(np.diff(whose[order]) | np.diff(turn[order])) + 1
        turns: dict[int, list[TurnTokens]] = {}
        for part in np.split(order, edges):
            index, left_out = int(whose[part[0]]), (kept[part] == 0).astype(np.uint8)
            turns.setdefault(index, []).append(
                TurnTokens(
                    call_id=episodes[index].turns[turn[part[0]]].call_id,
                    advantage=float(advantage[part[0]]),
                    logprobs=theta[part].astype("<f4").tobytes(),
                    left_out=left_out.tobytes() if left_out.any() else b"",
                )
            )
        return [EpisodeTokens(episode_id=episodes[i].episode_id, turns=tuple(of)) for i, of in turns.items()]
