"""Deltas, stop strings and lanes."""

from hypothesis import given
from hypothesis import strategies as st

from swarmq.proxy.deltas import StopTrim, extend
from swarmq.proxy.engines.pool import EnginePool
from swarmq.testing.scripted_engine import ScriptedEngine


def test_deltas_add_up_to_the_message():
    message = {"role": "assistant", "content": ""}
    for delta in (
        {"reasoning": "hm"},
        {"content": "a"},
        {"tool_calls": [{"index": 1, "id": "y", "function": {"name": "g"}}]},
        {"tool_calls": [{"index": 0, "id": "x", "function": {"name": "f", "arguments": '{"a"'}}]},
        {"content": "b", "tool_calls": [{"index": 0, "function": {"arguments": ":1}"}}]},
    ):
        extend(message, delta)
    assert message == {
        "role": "assistant",
        "content": "ab",
        "reasoning": "hm",
        "tool_calls": [
            {"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}},
            {"id": "y", "type": "function", "function": {"name": "g", "arguments": ""}},
        ],
    }


@given(st.text("aSTOP", max_size=20).filter(lambda text: "STOP" not in text), st.lists(st.integers(1, 5), max_size=10))
def test_a_stop_string_is_cut_wherever_the_deltas_are_cut(text, sizes):
    trim, out, rest = StopTrim(["STOP", "other"]), "", text
    for size in sizes:  # the delta that completes the stop string is always the last one
        out += trim({"content": rest[:size]}, met=None, ended=False).get("content", "")
        rest = rest[size:]
    out += trim({"content": rest + "STOP and what else its token says"}, met="STOP", ended=True).get("content", "")
    assert out == text


def test_content_held_back_is_given_when_nothing_was_met():
    trim = StopTrim(["STOP"])
    assert trim({"content": "abST"}, met=None, ended=False) == {"content": "a"}
    assert trim({"content": ""}, met=None, ended=True) == {"content": "bST"}


def test_without_stop_strings_nothing_is_held_back():
    assert StopTrim([])({"content": "a"}, met=None, ended=False) == {"content": "a"}


def test_a_new_episode_goes_where_least_is_open_and_never_first_to_a_failed_engine():
    pool = EnginePool([ScriptedEngine(url=str(i)) for i in range(3)])
    with pool.lanes[0].occupy(), pool.lanes[1].occupy(), pool.lanes[0].occupy():
        assert [lane.engine.url for lane in pool.order(None)] == ["2", "1", "0"]
        assert pool.order(pool.lanes[0])[0] is pool.lanes[0]
        pool.lanes[1].fail()
        assert [lane.engine.url for lane in pool.order(None)] == ["2", "0", "1"]
