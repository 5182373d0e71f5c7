"""The grouping `slot`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from swarmq.config import Train
from swarmq.messages import Rollout


def slot(episodes: Sequence[Rollout], _: Train) -> list[list[Rollout]]:
    """Return the groups that the collector formed: the attempts at one task, as many as the group size."""
    return [list(group) for _, group in groupby(episodes, key=lambda episode: episode.group_id)]
