"""Groupings: which episodes of a batch are compared with each other. One file for each built-in one, with a function of the file's
name. Without torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from swarmq.config import Train
from swarmq.errors import LearnerError
from swarmq.learner.methods.registry import find_method
from swarmq.messages import Rollout


class GroupingFunction(Protocol):
    """A grouping. Returns the batch's episodes in groups, each episode in one of them, and no group with two task kinds, which may have
    different advantages. In `episodes` the attempts at one slot are adjacent."""

    def __call__(self, episodes: Sequence[Rollout], train: Train, /) -> Sequence[Sequence[Rollout]]: ...


def form_groups(episodes: Sequence[Rollout], train: Train) -> list[list[Rollout]]:
    """Return the groups whose members are compared with each other. Raises LearnerError if the grouping is no partition."""
    group: GroupingFunction = find_method("grouping", train.grouping)
    groups = [list(each) for each in group(episodes, train)]
    if flaw := find_grouping_flaw(episodes, groups):
        raise LearnerError(f"train.grouping: {train.grouping}: {flaw}")
    return groups


def find_grouping_flaw(episodes: Sequence[Rollout], groups: Sequence[Sequence[Rollout]]) -> str:
    """Return what is wrong with the groups; "" if nothing is."""
    given = {episode.episode_id for episode in episodes}
    found = Counter(episode.episode_id for group in groups for episode in group)
    if twice := next((episode for episode, count in found.items() if count > 1), ""):
        return f"episode {twice} is in {found[twice]} groups"
    if missing := given - found.keys():
        return f"{len(missing)} of {len(given)} episodes are in no group"
    if strange := found.keys() - given:
        return f"episode {min(strange)} is not in the batch"
    for group in groups:
        if len(kinds := {episode.kind for episode in group}) != 1:
            return f"a group has episodes of the kinds {', '.join(sorted(kinds))}" if kinds else "a group is empty"
    return ""
