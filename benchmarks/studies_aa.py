"""Simulated studies: how many false discoveries there are, and whether an effect is found with the power that was announced.

    python -m benchmarks.studies_aa

Each study has a baseline and three arms, A/A trials first, then as many seeds as these ask for. False discoveries are counted
by study: one arm of three is enough. `naive` looks after every seed by t-tests, as is common, and shows what the shipped ways avoid.
Decides by the functions that decide in a study's report (swarmq.studies.statistics). Writes its figures beside those of
benchmarks/studies.py into results/studies.json.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from benchmarks.report import kept, parser, save, table
from swarmq.studies.statistics import Rule, adjust_p, estimate_noise, paired_power, power_with_looks, seeds_needed

ARMS = 3
SEEDS = 10
PILOT = 8
"""Number of A/A trials of a study."""
ALPHA = 0.05
EFFECT = 0.1
"""Effect of the arm that differs, and the smallest effect of interest."""
SD = 0.07
"""SD of a trial's score between seeds, over its run and its tasks."""
TASKS = 16
FIRST_NAIVE_LOOK = 3
MAX_SEEDS = 100

Noise = Callable[[np.random.Generator, tuple[int, ...]], NDArray[np.float64]]


def collapsing(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Return scores of trainings, one in eight of which collapses."""
    return np.asarray(0.7 + rng.normal(0, 0.03, shape) - 0.2 * (rng.random(shape) < 1 / 8))


def few_tasks(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Return the share of right answers to 16 tasks, of a policy whose success differs between runs."""
    return np.asarray(rng.binomial(TASKS, np.clip(rng.normal(0.6, 0.05, shape), 0, 1)) / TASKS)


NOISES: dict[str, Noise] = {
    "normal": lambda rng, shape: rng.normal(0.6, SD, shape),
    "one training in eight collapses": collapsing,
    "16 tasks, right or wrong": few_tasks,
}
ONCE, LOOKS = Rule(smallest_effect=EFFECT, alpha=ALPHA), Rule(smallest_effect=EFFECT, alpha=ALPHA, looks=True)


def false_discoveries(noise: Noise, studies: int, rng: np.random.Generator) -> tuple[float, float, float]:
    """Return the share of studies without any effect that claim one: after all seeds, with valid looks, with naive looks."""
    found = np.zeros(3)
    for _ in range(studies):
        scores = noise(rng, (ARMS + 1, SEEDS))
        differences = [*(scores[1:] - scores[0])]
        found[0] += _discovers(differences, ONCE)
        # the largest e-value so far decides, so that the last look knows of all
        found[1] += _discovers(differences, LOOKS)
        found[2] += any(_discovers([d[:n] for d in differences], ONCE) for n in range(FIRST_NAIVE_LOOK, SEEDS + 1))
    once, looks, naive = found / studies
    return once, looks, naive


def powers(studies: int, rng: np.random.Generator) -> dict[str, tuple[float, float]]:
    """Return, for each way of deciding, the mean power announced after the A/A trials, and the share of studies that found the effect."""
    announced: dict[str, list[float]] = {"once": [], "looks": []}
    seen: dict[str, list[bool]] = {"once": [], "looks": []}
    for number in range(studies):
        noise = estimate_noise(rng.normal(0.6, SD, PILOT))
        seeds = min(seeds_needed(EFFECT, noise.sd, power=0.8, dof=noise.dof), MAX_SEEDS)
        announced["once"].append(paired_power(EFFECT, noise.sd, seeds, dof=noise.dof))
        by_looks, _ = power_with_looks(EFFECT, noise.sd, seeds, dof=noise.dof, draws=1_000, seed=number)
        announced["looks"].append(by_looks)
        differences = rng.normal(0.6 + EFFECT, SD, seeds) - rng.normal(0.6, SD, seeds)
        seen["once"].append(_discovers([differences], ONCE))
        seen["looks"].append(_discovers([differences], LOOKS))
    return {way: (float(np.mean(announced[way])), float(np.mean(seen[way]))) for way in announced}


def _discovers(differences: list[NDArray[np.float64]], rule: Rule) -> bool:
    return min(p_holm for _, p_holm in adjust_p(differences, rule)) <= rule.alpha


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--studies", type=int, default=2_000, help="simulated studies of each kind")
    given = options.parse_args()
    rng = np.random.default_rng(20)
    false = {name: false_discoveries(noise, given.studies, rng) for name, noise in NOISES.items()}
    print(
        table(("noise", "after all seeds", "valid looks", "naive looks"), [(name, *row) for name, row in false.items()])
    )
    power = powers(given.studies, rng)
    print(table(("decides", "power announced", "power seen"), [(name, *row) for name, row in power.items()]))
    figures, detail = kept("studies", out=given.out)
    figures |= {
        "studies_simulated": given.studies,
        "false_discovery_rate": max(once for once, _, _ in false.values()),
        "false_discovery_rate_looks": max(looks for _, looks, _ in false.values()),
        "false_discovery_rate_naive_looks": max(naive for _, _, naive in false.values()),
        "power_announced": power["once"][0],
        "power_seen": power["once"][1],
        "power_announced_looks": power["looks"][0],
        "power_seen_looks": power["looks"][1],
    }
    detail |= {"false_discoveries": false, "powers": power}
    save("studies", figures, detail=detail, out=given.out)


if __name__ == "__main__":
    main()
