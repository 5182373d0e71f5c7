"""The benchmark of foreign clients notices an answer that the recorded tokens do not spell."""

import pytest
from benchmarks.clients.__main__ import verdict
from benchmarks.clients.compare import Answer, ToolCall, compare, spell

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": 3}}\n</tool_call>'
ROW = {"errors": [], "unequal": [], "refused": [], "unreported": [], "answered": 1, "turns": 1}


def add(**arguments):
    return ToolCall(name="add", arguments=arguments)


def test_tokens_spell_text_and_calls():
    assert spell("Zwölf 🙂.") == Answer(text="Zwölf 🙂.")
    assert spell(CALL + CALL) == Answer(calls=(add(a=12, b=3), add(a=12, b=3)))


@pytest.mark.parametrize(
    ("reported", "recorded"),
    [
        (Answer(text="Zwölf 🙂."), "Zwölf 🙂."),
        (Answer(calls=(add(b=3, a=12),)), CALL),
        (Answer(calls=(ToolCall(name="add", arguments='{"a": 12, "b": 3}'),)), CALL),
        (Answer(parsed={"right": True}), '{"right":true}'),
        (Answer(parsed={"a": 12, "b": 3}), CALL),
    ],
)
def test_an_answer_as_it_was_sampled_is_equal(reported, recorded):
    compared = compare([reported], [recorded])
    assert (compared.equal, compared.unequal, compared.unreported) == (1, (), ())


@pytest.mark.parametrize(
    ("reported", "recorded"),
    [
        (Answer(text="Zwölf 🙂."), "Zwölf 🙁."),
        (Answer(text="Zwölf."), "Zwölf. "),
        (Answer(text="Zwölf."), CALL),
        (Answer(calls=(add(a=12, b=4),)), CALL),
        (Answer(calls=(ToolCall(name="sub", arguments={"a": 12, "b": 3}),)), CALL),
        (Answer(calls=(add(a=12, b=3),)), CALL + CALL),
        (Answer(calls=(ToolCall(name="add", arguments='{"a": 12'),)), CALL),
        (Answer(parsed={"right": True}), '{"right":false}'),
        (Answer(parsed={"right": True}), '{"right":tr'),
    ],
)
def test_one_changed_token_is_unequal(reported, recorded):
    compared = compare([reported], [recorded])
    assert (compared.equal, compared.unequal, compared.unreported) == (0, (reported,), (recorded,))
    assert verdict(ROW | {"unequal": list(compared.unequal)}).startswith("unequal")


def test_a_turn_proves_one_answer_alone():
    compared = compare([Answer(text="a"), Answer(text="a")], ["a"])
    assert (compared.equal, len(compared.unequal)) == (1, 1)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "equal"),
        ({"errors": ["plain: it broke"]}, "it broke"),
        ({"refused": ["400 no"]}, "refused: 400 no"),
        ({"turns": 2}, "1 calls answered, 2 turns recorded"),
        ({"unreported": ["x"]}, "1 recorded turns were not reported"),
        ({"answered": 0, "turns": 0}, "no call"),
    ],
)
def test_a_failing_client_is_shown_as_failing(fields, words):
    assert words in verdict(ROW | fields)
