"""Helpers with which agents score themselves, in the client's process; each takes effect only where an agent calls it.

from swarmq.rewards import Judge, TextChecks, combine, length_penalty
"""

from swarmq.rewards.judge import Budget, Judge
from swarmq.rewards.shaping import clip, combine, length_penalty, potential_differences
from swarmq.rewards.text_checks import TextChecks, loops, nonsense_share, repeated_share

__all__ = [
    "Budget",
    "Judge",
    "TextChecks",
    "clip",
    "combine",
    "length_penalty",
    "loops",
    "nonsense_share",
    "potential_differences",
    "repeated_share",
]
