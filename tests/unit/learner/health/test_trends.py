"""A trend is told where there is one, and noise is not taken for one."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from swarmq.learner.health.signs import SignWatch, find_signs
from swarmq.learner.health.trends import REWARD, TRENDS, find_trends, mann_kendall

EPISODES = 16
SHAPES: dict[str, Callable[[float], float]] = {
    "straight": lambda part: part,
    "soon": lambda part: (1 - math.exp(-3 * part)) / (1 - math.exp(-3)),
    "late": lambda part: part**2,
    "in the middle": lambda part: 1 / (1 + math.exp(-8 * (part - 0.5))),
}


def step(
    version: int, *, reward: float = 0.5, turns: float = 80, entropy: float = 0.5, tokens: float = 50
) -> dict[str, Any]:
    return {
        "version": version, "reward": reward, "turns": turns, "entropy": entropy, "tokens_sampled": tokens * turns,
        "episodes": EPISODES, "groups": 2, "kl_k3": 0.001, "grad_norm": 1.0, "truncated": 0.0,
    }  # fmt: skip


def falling(count: int, shape: str, noise: float, dice: random.Random) -> list[dict[str, Any]]:
    """What a run of the trial showed: over 17 steps the reward fell from 0.135 to 0.09, turns from 76 to 32, entropy from 0.12 to 0.08."""

    def at(begin: float, end: float, part: float) -> float:
        return begin + (end - begin) * (SHAPES[shape](part) + dice.gauss(0, noise))

    parts = [number / (count - 1) for number in range(count)]
    return [
        step(n, reward=at(0.135, 0.09, p), turns=at(76, 32, p), entropy=at(0.12, 0.08, p))
        for n, p in enumerate(parts, 1)
    ]


def still(count: int, dice: random.Random, *, memory: float = 0.0) -> list[dict[str, Any]]:
    """Figures without a trend, with so much noise as small batches have; each step remembers a part of the one before."""

    def noise(size: float) -> Iterator[float]:
        value = dice.gauss(0, size)
        while True:
            yield value
            value = memory * value + math.sqrt(1 - memory**2) * dice.gauss(0, size)

    rewards, turns, entropies, tokens = noise(0.04), noise(0.15), noise(0.1), noise(0.15)
    return [
        step(
            version,
            reward=0.13 + next(rewards),
            turns=80 * math.exp(next(turns)),
            entropy=0.12 * math.exp(next(entropies)),
            tokens=50 * math.exp(next(tokens)),
        )
        for version in range(1, count + 1)
    ]


def find_warnings(steps: list[dict[str, Any]]) -> set[str]:
    """Return the trends of which a learner warns while it trains these steps."""
    names, lookout = {trend.name for trend in (REWARD, *TRENDS)}, SignWatch()
    return {finding.check for fields in steps for finding in lookout.step(fields, 4)} & names


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(5))
def test_the_run_of_the_trial_is_told_of_by_learner_and_doctor(shape: str, seed: int) -> None:
    steps = falling(17, shape, 0.05, random.Random(seed))
    names = {"falling reward", "fewer turns", "falling entropy"}
    assert find_warnings(steps) == names
    assert {finding.check for finding in find_signs(steps, 4) if finding.level == "warning"} == names


def test_evidence_is_the_figures_and_the_steps_that_were_compared() -> None:
    (finding,) = (f for f in find_signs(falling(17, "straight", 0.0, random.Random(0)), 4) if f.check == "fewer turns")
    assert finding.line.startswith("fewer turns: turns per episode 5 -> 2.17")
    assert " from step 1 to 17 (-5" in finding.text
    assert "inspect RUN --step N" in finding.text
    (sound,) = (f for f in find_trends([step(version) for version in range(1, 18)]) if f.check == "falling reward")
    assert sound.line == "reward 0.5 -> 0.5 from step 1 to 17 (z 0.0; falling reward from -10% and z below -4 on)"


@pytest.mark.slow
@pytest.mark.parametrize(("memory", "most"), [(0.0, 1), (0.3, 4)])
def test_noise_is_told_of_in_few_of_50_trainings(memory: float, most: int) -> None:
    dice = random.Random(0)
    assert sum(bool(find_warnings(still(200, dice, memory=memory))) for _ in range(50)) <= most


def test_of_trainings_that_went_well_nothing_is_told() -> None:
    """Nine of `benchmarks.learns`: rewards rose from 0.4 to 0.98, and entropy fell to a fifth."""
    path = Path(__file__).parents[4] / "benchmarks" / "results" / "learns_h200.json"
    runs = json.loads(path.read_text())["detail"]["runs"]
    columns = ("rewards", "rewards_by_kind", "entropy")
    curves = [list(zip(*(run[name] for name in columns), strict=True)) for run in runs]
    assert len(curves) == 9
    for curve in curves:
        figures = [
            {"version": version, "reward": reward, "reward_by_kind": kinds, "entropy": entropy}
            for version, (reward, kinds, entropy) in enumerate(curve, 1)
        ]
        lookout = SignWatch()
        assert [f.line for fields in figures for f in lookout.step(fields, 4)] == []


def test_what_falls_slowly_is_seen_in_means_of_steps() -> None:
    dice = random.Random(0)
    slow = [step(n, reward=0.5 - n / 2000 + dice.gauss(0, 0.1)) for n in range(1, 321)]
    (finding,) = (f for f in find_trends(slow) if f.check == "falling reward")
    assert finding.level == "warning"
    assert "from step 1 to 320" in finding.text


@pytest.mark.parametrize("after", [20, 30])
def test_a_reward_that_falls_at_once_is_seen(after: int) -> None:
    dice = random.Random(0)
    fallen = [step(n, reward=(0.6 if n <= 100 else 0.2) + dice.gauss(0, 0.05)) for n in range(1, 101 + after)]
    assert find_warnings(fallen) == {"falling reward"}


@pytest.mark.parametrize(
    ("figures", "name"),
    [
        ({"tokens": 0.5}, "shorter answers"),
        ({"tokens": 2.0}, "longer answers"),
        ({"turns": 0.5}, "fewer turns"),
        ({"entropy": 0.5}, "falling entropy"),
    ],
)
def test_other_answers_are_a_sign_unless_the_reward_rises_or_the_mix_changes(
    figures: dict[str, float], name: str
) -> None:
    dice, usual = random.Random(0), {"tokens": 50.0, "turns": 80.0, "entropy": 0.5}

    def at(n: int, **more: Any) -> dict[str, Any]:
        own = {key: usual[key] * factor ** (n / 30) for key, factor in figures.items()}
        return step(n, **own, **more)

    steps = [at(n, reward=0.5 + dice.gauss(0, 0.02)) for n in range(1, 31)]
    assert find_warnings(steps) == {name}
    assert find_warnings([at(n, reward=n / 30 + dice.gauss(0, 0.02)) for n in range(1, 31)]) == set(), "it learns"
    shares = [{"groups_by_kind": {"a": n, "b": 31 - n}} for n in range(1, 31)]
    assert find_warnings([fields | mix for fields, mix in zip(steps, shares, strict=True)]) == set(), "other tasks"


def test_another_mix_or_other_client_code_is_no_falling_reward() -> None:
    """A kind that is rewarded less has more and more of each batch; a reward function that gives less is trained from step 31 on."""
    kinds = {"reward_by_kind": {"easy": 0.9, "hard": 0.1}}
    assert find_warnings([step(n, reward=0.9 - n / 50) | kinds for n in range(1, 31)]) == set()
    before = [step(n, reward=0.9) | {"code_versions": {"old": 8}} for n in range(1, 31)]
    after = [step(n, reward=0.1) | {"code_versions": {"new": 8}} for n in range(31, 61)]
    assert find_warnings(before + after) == set()


def test_rewards_below_zero_fall_like_others() -> None:
    assert find_warnings([step(n, reward=-0.2 - n / 40) for n in range(1, 31)]) == {"falling reward"}
    assert find_warnings([step(n, reward=0.3 - n / 40) for n in range(1, 31)]) == {"falling reward"}
    assert find_warnings([step(n, reward=-1 + n / 40) for n in range(1, 31)]) == set()


def test_groups_that_lose_members_are_a_sign() -> None:
    assert find_warnings([step(n) | {"episodes": 16 - n // 3} for n in range(1, 31)]) == {"fewer episodes"}


def test_figures_that_are_missing_or_not_finite_make_no_trend() -> None:
    broken = [
        step(n) | dict.fromkeys(("entropy", "reward", "turns"), value) for n, value in enumerate([None, math.nan] * 20)
    ]
    assert find_warnings(broken) == set()
    assert list(find_trends([{} for _ in range(40)])) == []


@pytest.mark.parametrize(
    ("values", "z"),
    [
        ([1.0, 2.0, 3.0, 4.0, 5.0], 9 / math.sqrt(50 / 3)),
        ([1.0, 1.0, 2.0, 2.0], 3 / math.sqrt(20 / 3)),
        ([1.0] * 9, 0.0),
    ],
)
def test_the_test_is_that_of_mann_and_kendall_with_ties(values: list[float], z: float) -> None:
    assert mann_kendall(values) == pytest.approx(z)
    assert mann_kendall(values[::-1]) == pytest.approx(-z)
