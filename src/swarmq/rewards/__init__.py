"""Helpers with which agents score themselves, in the client's process; each takes effect only where an agent calls it.

from swarmq.rewards import Judge, TextChecks, combine, length_penalty, math_match

Answers are hostile: what an answer could stall runs in helper processes (`helper`), programs run in a `Sandbox`. A wrong or hostile answer is a score of 0 with
a reason. RewardError and JudgeError mean that the expected answer or the machine is at fault: do not catch them, the episode fails.
"""

from swarmq.rewards.code import asserts_pass, extract_code, outputs_match
from swarmq.rewards.endpoint import Budget, ChatEndpoint
from swarmq.rewards.judge import Judge
from swarmq.rewards.matches import exact_match, fuzzy_match, normalise
from swarmq.rewards.mathematics import math_match
from swarmq.rewards.rubric import Agreement, Example, Rubric, derive_rubric, measure_agreement
from swarmq.rewards.sandbox import Limits, ProgramRun, Sandbox
from swarmq.rewards.score import Score
from swarmq.rewards.shaping import clip, combine, length_penalty, potential_differences
from swarmq.rewards.structure import extract_json, extract_tag, regex_match, schema_match, tags_match
from swarmq.rewards.text_checks import TextChecks, loops, nonsense_share, repeated_share

__all__ = [
    "Agreement",
    "Budget",
    "ChatEndpoint",
    "Example",
    "Judge",
    "Limits",
    "ProgramRun",
    "Rubric",
    "Sandbox",
    "Score",
    "TextChecks",
    "asserts_pass",
    "clip",
    "combine",
    "derive_rubric",
    "exact_match",
    "extract_code",
    "extract_json",
    "extract_tag",
    "fuzzy_match",
    "length_penalty",
    "loops",
    "math_match",
    "measure_agreement",
    "nonsense_share",
    "normalise",
    "outputs_match",
    "potential_differences",
    "regex_match",
    "repeated_share",
    "schema_match",
    "tags_match",
]
