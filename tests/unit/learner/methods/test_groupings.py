"""Groupings: what is compared with what, and what is refused."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from support.episodes import make_group
from support.own_methods import GROUPING, write_own_methods
from swarmq.config import GROUPINGS, Train
from swarmq.errors import LearnerError
from swarmq.learner.feed.batcher import Batcher, BatchLimits
from swarmq.learner.methods import registry
from swarmq.learner.methods.check import check_method
from swarmq.learner.methods.credit import compute_advantages, group_by_slot
from swarmq.learner.methods.registry import AdoptedMethod, find_method
from swarmq.learner.store.records import MethodCode
from swarmq.messages import Rollout

OWN = Train(grouping=GROUPING)


@pytest.fixture(autouse=True)
def _own(tmp_path: Path) -> None:
    write_own_methods(tmp_path)
    registry.read_own(OWN, str(tmp_path))


def two_slots(*rewards: tuple[float, ...], kind: str = "default") -> list[Rollout]:
    """Slots of one task."""
    slots = [make_group(f"slot{n}", each, turns=1, kind=kind) for n, each in enumerate(rewards)]
    return [
        msgspec.structs.replace(e, slot=msgspec.structs.replace(e.slot, task_id=f"{kind} task"))
        for slot in slots
        for e in slot
    ]


def flaws(function: Any) -> dict[str, str]:
    return {check.name: check.flaw for check in check_method("grouping", function, Train()) if check.flaw}


@pytest.mark.parametrize("name", [*GROUPINGS, GROUPING])
def test_every_built_in_grouping_and_that_of_the_page_passes(name: str) -> None:
    assert flaws(find_method("grouping", name)) == {}


def test_attempts_are_compared_with_those_of_their_slot_or_with_whom_an_own_grouping_says() -> None:
    rewards = [(0.0, 1.0), (3.0, 8.0)]
    batch = two_slots(*rewards)
    by_slot, joined = (compute_advantages(group_by_slot(batch), train) for train in (Train(), OWN))
    assert [by_slot[e.episode_id] for e in batch] == [[-1.0], [1.0], [-5.0], [5.0]]
    every = [reward for slot in rewards for reward in slot]
    wanted = [r - statistics.fmean([*every[:i], *every[i + 1 :]]) for i, r in enumerate(every)]
    assert [joined[e.episode_id][0] for e in batch] == pytest.approx(wanted)


def test_slots_with_equal_rewards_are_trained_if_others_are_in_their_group() -> None:
    episodes = two_slots((1.0, 1.0), (0.0, 0.0))

    def batch(train: Train) -> tuple[Rollout, ...]:
        batcher = Batcher(BatchLimits(groups_per_batch=2, mix={"default": 1.0}, max_staleness=1, train=train))
        for episode in episodes:
            assert batcher.accept(episode)
        record = batcher.take(version=0, at=0.0, settings=train)
        return record.episodes if record else ()

    assert batch(Train()) == ()
    assert sorted(e.episode_id for e in batch(OWN)) == sorted(e.episode_id for e in episodes)
    advantages = compute_advantages(group_by_slot(batch(OWN)), OWN)
    assert all(advantages[e.episode_id][0] * (e.reward - 0.5) > 0 for e in episodes)  # type: ignore[operator]
    flat = compute_advantages(group_by_slot(two_slots((1.0, 1.0), (1.0, 1.0))), OWN)
    assert [value for values in flat.values() for value in values] == [None] * 4


class Remembering:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, episodes: Sequence[Rollout], _: Train) -> list[list[Rollout]]:
        self.calls += 1
        return [[each] for each in episodes] if self.calls % 2 else group_by_slot(episodes)


def by_place(episodes: Sequence[Rollout], _: Train) -> list[list[Rollout]]:
    """The first attempt apart from the others."""
    return [list(episodes[:1]), *group_by_slot(episodes[1:])]


@pytest.mark.parametrize(
    ("grouping", "check", "says"),
    [
        (lambda e, t: list(e), "shape", "not groups of episodes"),
        (lambda e, t: [[each.episode_id] for each in e], "shape", "not groups of episodes"),
        (lambda e, t: [list(e)], "shape", "a group has episodes of the kinds code, default"),
        (lambda e, t: group_by_slot(e)[1:], "shape", "episodes are in no group"),
        (lambda e, t: [*group_by_slot(e), [e[0]]], "shape", "is in 2 groups"),
        (lambda e, t: [*group_by_slot(e), []], "shape", "a group is empty"),
        (lambda e, t: [*group_by_slot(e), make_group("other")], "shape", "episode other-0 is not in the batch"),
        (Remembering(), "no state", "two calls with equal inputs"),
        (by_place, "order of slots", "if the slots come in another order"),
    ],
)  # fmt: skip
def test_a_wrong_grouping_is_refused_with_the_reason(grouping: Callable[..., Any], check: str, says: str) -> None:
    assert says in flaws(grouping).get(check, "passed")


def test_a_grouping_that_fails_on_a_batch_ends_the_step_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = AdoptedMethod(MethodCode(kind="grouping", name="m:lose", sha256="0"), lambda e, _: group_by_slot(e[1:]))
    monkeypatch.setitem(registry._adopted, "m:lose", wrong)
    with pytest.raises(LearnerError, match=r"train\.grouping: m:lose: 1 of 4 episodes are in no group"):
        compute_advantages(group_by_slot(two_slots((0.0, 1.0), (0.0, 1.0))), Train(grouping="m:lose"))
