"""Deltas, stop strings, memory and lanes."""

from hypothesis import given
from hypothesis import strategies as st

from swarmq.proxy.deltas import StopTrim, extend
from swarmq.proxy.memory import Episodes
from swarmq.proxy.pool import Pool
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


def test_idle_episodes_are_forgotten():
    now = 0.0
    episodes = Episodes(idle_s=10, clock=lambda: now)
    first = episodes.of("a")
    now = 8.0
    second = episodes.of("b")
    now = 12.0
    episodes.sweep()
    assert (len(episodes), episodes.of("b") is second, episodes.of("a") is first) == (1, True, False)


def test_memory_is_bounded_and_the_least_recently_used_goes_first():
    episodes = Episodes(idle_s=1000, limit_bytes=2500)
    kept = [episodes.of(name) for name in "abc"]
    episodes.of("a")
    episodes.sweep()
    assert len(episodes) == 2
    assert episodes.of("a") is kept[0]
    assert episodes.of("b") is not kept[1]


def test_a_new_episode_goes_where_least_is_open_and_never_first_to_a_failed_engine():
    pool = Pool([ScriptedEngine(url=str(i)) for i in range(3)])
    with pool.lanes[0].occupied(), pool.lanes[1].occupied(), pool.lanes[0].occupied():
        assert [lane.engine.url for lane in pool.order(None)] == ["2", "1", "0"]
        assert pool.order(pool.lanes[0])[0] is pool.lanes[0]
        pool.lanes[1].fail()
        assert [lane.engine.url for lane in pool.order(None)] == ["2", "0", "1"]


def test_what_was_forgotten_is_known_to_be_forgotten():
    episodes = Episodes(idle_s=1000, limit_bytes=0, is_home=lambda name: name != "moved")
    assert [episodes.of(name).lost for name in ("a", "moved")] == [False, True]
    episodes.sweep()
    assert (len(episodes), episodes.of("a").lost) == (0, True)
