"""Whatever reason the code can give for not training an episode, there is a sentence for it."""

import ast
import re
import typing
from pathlib import Path

import pytest

import swarmq
from swarmq.collector.decide.state import TAINTS
from swarmq.messages import EQUAL_REWARDS, Status
from swarmq.observe.reasons import EXPLANATIONS, FAILED, explain

SOURCE = Path(swarmq.__file__).parent
WORD = re.compile(r"[a-z]+(_[a-z]+)*")
GIVERS = {"_drop", "_with_reason", "_make_error", "_add_news", "Close", "TimelineError"}
DECIDERS = {"_find_objection", "find_flaw", "_find_fault"}
MODULES = (
    "collector/decide/episodes.py",
    "collector/decide/groups.py",
    "collector/decide/assemble.py",
    "learner/feed/batcher.py",
    "timeline/turns.py",
    "timeline/pack.py",
)


def words_in(nodes):
    for node in nodes:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Constant) and isinstance(inner.value, str) and WORD.fullmatch(inner.value):
                yield inner.value


def reasons_of(tree):
    """Words that are given to functions that drop, or returned by functions that decide."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in GIVERS:
                yield from words_in(node.args)
        elif isinstance(node, ast.FunctionDef) and node.name in DECIDERS:
            yield from words_in(each.value for each in ast.walk(node) if isinstance(each, ast.Return) and each.value)


@pytest.mark.parametrize("module", MODULES)
def test_every_reason_in_the_code_has_a_sentence(module):
    found = set(reasons_of(ast.parse((SOURCE / module).read_text()))) - {"trained", "dropped", "eval", "g"}
    assert found, "the module gives no reason: name another"
    assert found <= EXPLANATIONS.keys(), found - EXPLANATIONS.keys()


def test_the_reasons_that_records_name_have_a_sentence():
    assert {*TAINTS, *typing.get_args(Status), EQUAL_REWARDS, *FAILED} - {""} <= EXPLANATIONS.keys()


def test_a_sentence_is_one_and_ends():
    for reason, text in EXPLANATIONS.items():
        assert text[0].isupper(), reason
        assert text.endswith((".", "?")), reason
        assert text != explain("a reason of tomorrow")
    assert "a reason of tomorrow" in explain("a reason of tomorrow")
