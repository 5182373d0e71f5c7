"""Bodies that would hold up everybody are refused for what they look like, before they are decoded."""

import json

import pytest

from swarmq.proxy.dialects import body_checks
from swarmq.proxy.dialects.body_checks import MAX_CONTAINERS, MAX_DEPTH, check_arguments, decode_object
from swarmq.proxy.http_errors import RefusedError


@pytest.mark.parametrize("part", ["[]", "{}", '{"role": "user", "content": "x"}', '["\\"[", []]'])
def test_too_many_parts_are_refused_before_they_are_decoded(part, monkeypatch):
    raw = f'{{"messages": [{", ".join([part] * (MAX_CONTAINERS + 1))}]}}'.encode()
    monkeypatch.setattr(body_checks.msgspec.json, "decode", lambda _: pytest.fail("it was decoded"))
    with pytest.raises(RefusedError, match="objects and lists"):
        decode_object(raw)


@pytest.mark.parametrize("text", ["[{" * MAX_CONTAINERS, '"[\\' * MAX_CONTAINERS])
def test_brackets_that_are_said_are_no_parts(text):
    assert decode_object(json.dumps({"prompt": text}).encode()) == {"prompt": text}


@pytest.mark.parametrize("raw", [b'"' + b"[" * 10**6, b'{"a": "' + b"\\" * 10**6 + b"[" * 10**5])
def test_text_without_an_end_is_no_json(raw):
    with pytest.raises(RefusedError, match=r"JSON|objects and lists"):
        decode_object(raw)


def called(arguments):
    return [{"role": "user"}, {"role": "assistant", "tool_calls": [{"function": {"arguments": arguments}}]}]


@pytest.mark.parametrize("arguments", ["[" * 5000, "[" * (MAX_DEPTH + 2) + "]" * (MAX_DEPTH + 2)])
def test_arguments_whose_brackets_are_too_deep_are_refused_by_name(arguments):
    with pytest.raises(RefusedError, match="brackets") as caught:
        check_arguments(called(arguments))
    assert caught.value.param == "messages[1].tool_calls"


@pytest.mark.parametrize("arguments", ["{}", "[" * MAX_DEPTH + "]" * MAX_DEPTH, "[]" * 500, "no JSON {", None, 7])
def test_other_arguments_are_the_engine_s_to_judge(arguments):
    check_arguments(called(arguments))
    check_arguments([{"tool_calls": "x"}, {"tool_calls": [None, {"function": "f"}]}])
