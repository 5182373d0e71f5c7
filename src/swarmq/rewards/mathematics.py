"""Comparison of mathematical answers, by the package math-verify."""

from __future__ import annotations

from typing import Any

from swarmq.errors import RewardError
from swarmq.rewards.helper import check_in_helper
from swarmq.rewards.score import Score, wrong

MAX_CHARS = 100_000
TAIL_CHARS = 2_000
"""Characters at the end of an answer in which its result is looked for."""


def math_match(answer: str, expected: str, *, boxed: bool = False, digits: int = 6, timeout_s: float = 5.0) -> Score:
    r"""Return 1 if the answer's result is mathematically equal to the expected one, else 0.

    The result is what math-verify finds in the last 2,000 characters: the content of `\boxed{...}`, else LaTeX or a number after
    words such as "the answer is", else the last number. Two boxes with different contents are a set of two values. `boxed`: only
    a box counts. `digits`: decimal places that must agree. `timeout_s`: CPU time, in a helper process; safe in threads and
    coroutines (`await asyncio.to_thread(math_match, ...)`); an answer that takes longer is wrong.

    Raises RewardError if the expected text has no mathematical value, and MissingExtraError without math-verify.
    """
    given: Any = expected
    if not isinstance(given, str) or not given.strip():
        raise RewardError(f"expected is {expected!r}: give a number, an expression or LaTeX")
    if len(answer) > MAX_CHARS:
        return wrong(f"the answer has {len(answer)} characters")
    tail = answer[-TAIL_CHARS:]
    if boxed and "\\boxed" not in tail:
        return wrong(f"no \\boxed{{...}} in the last {TAIL_CHARS:,} characters")
    return check_in_helper("math", {"expected": expected, "boxed": boxed, "digits": digits}, tail, timeout_s=timeout_s)
