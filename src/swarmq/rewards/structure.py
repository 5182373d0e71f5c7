"""Checks of an answer's form: tags, regular expressions, JSON against a schema.

Patterns and schemas run in a helper process, so that an answer made for slow backtracking cannot stall the worker.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from swarmq.errors import RewardError
from swarmq.rewards.helper import check_in_helper
from swarmq.rewards.score import RIGHT, Score, wrong
from swarmq.runtime.wording import count_of

MAX_JSON_CHARS = 1_000_000
_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)^[ \t]*```[ \t]*$", re.MULTILINE | re.DOTALL)


def tags_match(answer: str, tags: Sequence[str], *, only: bool = True) -> Score:
    """Return 1 if each tag occurs exactly once, as `<tag>...</tag>`, in the given order, one after the other and not empty;
    else 0 with the first problem. `only`: nothing but white space may stand outside of the tags."""
    if not tags or len(set(tags)) != len(tags) or not all(re.fullmatch(r"[A-Za-z_][\w-]*", tag) for tag in tags):
        raise RewardError(f"tags is {list(tags)!r}: give different names such as 'think' and 'answer'")
    place, outside = 0, ""
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        if (number := answer.count(opening)) != 1 or answer.count(closing) != 1:
            return wrong(
                f"{opening} occurs {count_of(number, 'time')} and {closing} {count_of(answer.count(closing), 'time')}; once is right"
            )
        start, end = answer.find(opening, place), answer.find(closing, place)
        if start < 0 or end < start:
            return wrong(f"{opening}...{closing} is not in its place")
        if not answer[start + len(opening) : end].strip():
            return wrong(f"{opening} is empty")
        outside += answer[place:start]
        place = end + len(closing)
    outside += answer[place:]
    return wrong(f"text outside of the tags: {outside.strip()[:80]!r}") if only and outside.strip() else RIGHT


def extract_tag(answer: str, tag: str) -> str:
    """Return the text between `<tag>` and `</tag>`, stripped; "" unless the tag occurs exactly once."""
    before, opening, rest = answer.partition(f"<{tag}>")
    inside, closing, after = rest.partition(f"</{tag}>")
    several = f"<{tag}>" in rest or f"</{tag}>" in before + after
    return inside.strip() if opening and closing and not several else ""


def regex_match(answer: str, pattern: str, *, flags: int = 0, timeout_s: float = 2.0) -> Score:
    """Return 1 if the whole answer matches the pattern (`re.fullmatch`), else 0, also if the search takes more than `timeout_s`
    seconds of CPU time. Raises RewardError for an invalid pattern."""
    try:
        re.compile(pattern, flags)
    except re.error as error:
        raise RewardError(f"pattern {pattern!r}: {error}") from error
    return check_in_helper("regex", {"pattern": pattern, "flags": int(flags)}, answer, timeout_s=timeout_s)


def extract_json(answer: str) -> Any:
    """Return the JSON value of an answer: the whole answer, or else its last fenced block without a language or marked `json`.

    Raises ValueError, with the reason, for an answer without one, for NaN, for Infinity, and for an object that has a key twice.
    """
    if len(answer) > MAX_JSON_CHARS:
        raise ValueError(f"the answer has {len(answer)} characters")
    try:
        return _load(answer)
    except json.JSONDecodeError as error:
        blocks = [text for language, text in _FENCE.findall(answer) if language.lower() in ("", "json")]
        if not blocks:
            raise ValueError(f"no JSON: {error}") from error
    return _load(blocks[-1])


def schema_match(answer: str, schema: Mapping[str, Any], *, timeout_s: float = 2.0) -> Score:
    """Return 1 if `extract_json(answer)` satisfies the JSON schema, else 0 with the first problem.

    References to other documents are not fetched. Raises RewardError for an invalid schema, and MissingExtraError without jsonschema.
    """
    try:
        value = json.dumps(extract_json(answer))
    except (ValueError, RecursionError) as error:
        return wrong(f"{error}"[:200])
    return check_in_helper("schema", {"schema": schema}, value, timeout_s=timeout_s)


def _load(text: str) -> Any:
    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("an object has a key twice")
    return result
