"""Program of a helper process: reads requests, one JSON object a line, and answers each on standard output.

Runs as a script, without swarmq. See helper.py.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import resource
import sys
import warnings
from collections.abc import Callable
from typing import Any

WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{4}")
"""A word, which LaTeX would read as a product of its letters."""
SPARE_S = 20
"""CPU seconds for imports, which are not counted as time of a check."""


class UnusableError(Exception):
    """The expected answer or the schema is invalid, so that no answer can be checked with it."""


def main() -> None:
    memory = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable()
    warnings.simplefilter("ignore")
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no reply

    def reply(value: dict[str, Any]) -> None:
        replies.write(json.dumps(value) + "\n")
        replies.flush()

    for line in sys.stdin:
        request = json.loads(line)
        limit_cpu(SPARE_S)
        try:
            prepare = PREPARE[request["check"]]()
        except ImportError as error:
            reply({"missing": PACKAGES.get(str(error.name).partition(".")[0], str(error.name))})
            continue
        limit_cpu(request["timeout_s"])
        try:
            score = prepare(**request["expected"])
        except UnusableError as error:
            reply({"unusable": str(error)})
            continue
        except Exception as error:
            reply({"unusable": f"the expected value cannot be used: {type(error).__name__}: {error}"})
            continue
        reply({"usable": True})
        limit_cpu(request["timeout_s"])
        try:
            reason = score(request["answer"])
        except UnusableError as error:
            reply({"unusable": str(error)})
            continue
        except MemoryError:
            reason = "the check ran out of memory"
        except RecursionError:
            reason = "the answer is nested too deeply"
        except Exception as error:  # any answer may trip a parser
            reason = f"the answer cannot be read: {type(error).__name__}"
        reply({"score": 0.0 if reason else 1.0, "reason": reason})


def limit_cpu(seconds: float) -> None:
    """Let the kernel end this process after `seconds` further seconds of CPU time, also inside C code."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used.ru_utime + used.ru_stime + seconds), hard))


Scorer = Callable[[str], str]
"""Function from an answer to what is wrong with it, or "" if nothing is."""


def prepare_math() -> Callable[..., Scorer]:
    import math_verify  # noqa: PLC0415 - slow, and needed by this check alone

    def prepare(expected: str, *, boxed: bool, digits: int) -> Scorer:
        # Both of math-verify's own timeouts use SIGALRM; ours is the limit on CPU time.
        targets = (math_verify.LatexExtractionConfig(boxed_match_priority=0), math_verify.ExprExtractionConfig())
        try:
            wanted = math_verify.parse(expected, parsing_timeout=None)
            if not wanted and not WORD.search(expected):
                wanted = math_verify.parse(f"${expected}$", parsing_timeout=None)
        except Exception as error:
            raise UnusableError(f"expected is {expected!r}: {error}") from error
        if not wanted:
            raise UnusableError(
                f"expected is {expected!r}, in which math-verify finds no value: give a number or LaTeX"
            )

        def score(answer: str) -> str:
            if boxed:
                answer = answer[answer.rindex("\\boxed") :]
            found = math_verify.parse(answer, targets, parsing_timeout=None)
            if not found:
                return "no mathematical result in the answer"
            if math_verify.verify(wanted, found, float_rounding=digits, timeout_seconds=None):
                return ""
            return f"the result is {str(found[-1])[:80]!r}"

        return score

    return prepare


def prepare_regex() -> Callable[..., Scorer]:
    def prepare(pattern: str, flags: int) -> Scorer:
        compiled = re.compile(pattern, flags)
        return lambda answer: "" if compiled.fullmatch(answer) else "the answer does not match the pattern"

    return prepare


def prepare_schema() -> Callable[..., Scorer]:
    import jsonschema  # noqa: PLC0415 - needed by this check alone
    import jsonschema_specifications  # noqa: PLC0415
    import referencing.exceptions  # noqa: PLC0415

    def prepare(schema: dict[str, Any]) -> Scorer:
        kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        try:
            kind.check_schema(schema)
        except jsonschema.SchemaError as error:
            raise UnusableError(f"schema: at {error.json_path}: {error.message}") from error
        # A registry of our own fetches nothing.
        validator = kind(schema, registry=jsonschema_specifications.REGISTRY)

        def score(answer: str) -> str:
            try:
                first = jsonschema.exceptions.best_match(validator.iter_errors(json.loads(answer)))
            except referencing.exceptions.Unresolvable as error:
                raise UnusableError(f"schema: {error}; other documents are not fetched") from error
            return f"at {first.json_path}: {first.message[:200]}" if first else ""

        return score

    return prepare


PREPARE = {"math": prepare_math, "regex": prepare_regex, "schema": prepare_schema}
PACKAGES = {"math_verify": "math-verify", "latex2sympy2_extended": "math-verify"}

if __name__ == "__main__":
    main()
