"""Log events are names, not prose, and one key explains them everywhere: `reason` says why, `action` what follows or what to do."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import swarmq

LEVELS = {"debug", "info", "warning", "error", "exception"}
OTHER_NAMES_OF_REASON = {"error", "why", "cause", "meaning", "hint", "explanation"}


@cache
def log_calls() -> list[tuple[str, ast.Call]]:
    root, found = Path(swarmq.__file__).parent, list[tuple[str, ast.Call]]()
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Attribute(attr=level, value=logger)) if level in LEVELS:
                    if ast.unparse(logger) in {"log", "logs.log"}:
                        found.append((f"{path.relative_to(root)}:{node.lineno}", node))
    return found


def test_events_are_snake_case_names():
    wrong = []
    for place, call in log_calls():
        match call.args:
            case [ast.Constant(value=str(event))] if not re.fullmatch(r"[a-z][a-z0-9_]*", event):
                wrong.append(f"{place} {event}")
    assert not wrong


def test_events_are_explained_by_reason():
    wrong = [
        f"{place} {keyword.arg}"
        for place, call in log_calls()
        for keyword in call.keywords
        if keyword.arg in OTHER_NAMES_OF_REASON
    ]
    assert not wrong


def test_all_log_calls_are_found():
    assert len(log_calls()) > 100
