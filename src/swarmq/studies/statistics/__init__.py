"""Statistics of studies: pure functions on numbers, without clock, files or ledger.

    A/A trials ──noise──> SD of a paired difference ──power──> seeds needed, said before money is spent
    scores ──pairs──> differences of seeds ──intervals, looks, mixed──> p-values ──Holm──> verdict of each arm

The seed is the unit: one training run gives one number, however many tasks it is evaluated on. An arm is compared with the
baseline seed by seed and task by task. Needs the extra `swarmq[studies]`; `swarmq.studies` imports it only when it analyses.
"""

from swarmq.studies.statistics.intervals import Interval, bootstrap_interval, permutation_interval, t_interval
from swarmq.studies.statistics.looks import confidence_sequence, e_values
from swarmq.studies.statistics.mixed import MixedEffect, mixed_effect
from swarmq.studies.statistics.noise import Noise, estimate_noise
from swarmq.studies.statistics.power import Plan, paired_power, plan, power_with_looks, seeds_needed
from swarmq.studies.statistics.verdicts import ArmComparison, Rule, adjust_p, compare_arms, pair

__all__ = [
    "ArmComparison",
    "Interval",
    "MixedEffect",
    "Noise",
    "Plan",
    "Rule",
    "adjust_p",
    "bootstrap_interval",
    "compare_arms",
    "confidence_sequence",
    "e_values",
    "estimate_noise",
    "mixed_effect",
    "pair",
    "paired_power",
    "permutation_interval",
    "plan",
    "power_with_looks",
    "seeds_needed",
    "t_interval",
]
