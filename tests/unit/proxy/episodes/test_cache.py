"""What is remembered of episodes is bounded, and what was forgotten is never continued with other tokens."""

from __future__ import annotations

import asyncio
import tracemalloc

import msgspec
import pytest

from support.proxy import token
from swarmq.messages import Event, new_id
from swarmq.proxy.episodes.cache import MAX_GONE, OVERHEAD_BYTES, EpisodeCache
from swarmq.proxy.episodes.conversation_graph import Stitched, TurnNode, digest, hash_answer, history_of, next_key
from swarmq.proxy.http.agent_routes import GoneError, cancel_if_gone
from swarmq.proxy.http_errors import RefusedError

HI = {"role": "user", "content": "hi"}
MORE = {"role": "user", "content": "more"}
ONE = {"role": "assistant", "content": "one"}


def ended(episode, *, source="collector", name="episode"):
    return Event(run="r", source=source, name=name, at=0.0, fields={"episode_id": episode, "status": "finished"})


def converse(episodes, episode, *, turns=1, tokens=0):
    """Calls that continue each other."""
    memory, said, parent = episodes.open_call(episode), [HI], None
    for number in range(turns):
        history, answer = history_of({"messages": said}), {"role": "assistant", "content": f"{episode} {number}"}
        parent = TurnNode(
            call_id=f"{episode}.{number}", request_id=f"{episode}{number}", key=next_key(history.keys[-1], answer),
            base=history.base, answer=hash_answer(answer), depth=len(said) + 1, parent=parent, shared=0, prompt=b"",
            sampled=bytes(4 * tokens), repaired=False, fresh_bytes=0, fresh_digest=digest(said[-1]["content"].encode()), cut=False,
        )  # fmt: skip
        memory.graph("main").add(parent, Stitched(prompt=b""), history)
        said = [*said, answer, MORE]
    episodes.close_call(memory)
    return memory


def test_idle_episodes_are_forgotten():
    now = 0.0
    episodes = EpisodeCache(idle_s=10, clock=lambda: now)
    first = episodes.of("a")
    now = 8.0
    second = episodes.of("b")
    now = 12.0
    episodes.sweep()
    assert (len(episodes), episodes.of("b") is second, episodes.of("a") is first) == (1, True, False)
    assert episodes.counts == {"idle": 1}


def test_memory_is_bounded_and_the_least_recently_used_goes_first():
    episodes = EpisodeCache(idle_s=1000, limit_bytes=6 * OVERHEAD_BYTES)
    kept = {name: converse(episodes, name) for name in "ab"}
    episodes.of("a")
    converse(episodes, "c", tokens=500)
    assert episodes.of("a") is kept["a"]
    assert episodes.of("b") is not kept["b"]
    assert episodes.counts == {"room": 1}


def test_the_bound_holds_after_every_call_and_not_only_when_somebody_sweeps():
    episodes = EpisodeCache(idle_s=1000, limit_bytes=50_000)
    for number in range(200):
        converse(episodes, f"e{number}", turns=3, tokens=100)
        assert episodes.size_bytes <= 50_000
    assert len(episodes) + episodes.counts["room"] == 200


def test_an_episode_with_an_open_call_is_not_forgotten_for_others():
    now = 0.0
    episodes = EpisodeCache(idle_s=10, limit_bytes=2 * OVERHEAD_BYTES, clock=lambda: now)
    busy = episodes.open_call("busy")
    now = 100.0
    for number in range(9):
        converse(episodes, f"e{number}", tokens=500)
    episodes.sweep()
    assert episodes.of("busy") is busy
    episodes.close_call(busy)
    now = 200.0
    episodes.sweep()
    assert (len(episodes), episodes.size_bytes) == (0, 0)


def test_what_was_forgotten_is_known_to_be_forgotten():
    episodes = EpisodeCache(idle_s=1000, limit_bytes=0, is_home=lambda name: name != "moved")
    assert [episodes.of(name).lost for name in ("a", "moved")] == [False, True]
    episodes.sweep()
    assert (len(episodes), episodes.of("a").lost) == (0, True)


def test_a_forgotten_episode_keeps_its_budget():
    episodes = EpisodeCache(idle_s=1000, limit_bytes=0)
    episodes.of("a").budget.calls = 7
    episodes.sweep()
    assert episodes.of("a").budget.calls == 7


def test_of_an_ended_episode_nothing_is_kept_but_that_it_has_ended():
    episodes = EpisodeCache(idle_s=1000)
    converse(episodes, "a", turns=5)
    episodes.handle_event(ended("a", source="learner.main"))
    episodes.handle_event(ended("a", name="warning"))
    assert len(episodes) == 1
    episodes.handle_event(ended("a"))
    assert (len(episodes), episodes.size_bytes, episodes.counts) == (0, 0, {"ended": 1})
    with pytest.raises(RefusedError, match="episode a has ended") as refused:
        episodes.of("a")
    assert (refused.value.status, refused.value.code) == (403, "episode_ended")


def test_an_end_that_overtakes_an_open_call_frees_its_memory_too():
    episodes = EpisodeCache(idle_s=1000)
    memory = episodes.open_call("a")
    episodes.handle_event(ended("a"))
    episodes.close_call(memory)
    assert (len(episodes), episodes.size_bytes) == (0, 0)


def test_an_episode_that_was_forgotten_before_it_ended_is_refused_as_well():
    episodes = EpisodeCache(idle_s=1000, limit_bytes=0)
    converse(episodes, "a")
    episodes.handle_event(ended("a"))
    with pytest.raises(RefusedError):
        episodes.of("a")


@pytest.mark.slow
def test_ended_episodes_leave_less_and_less_and_then_nothing():
    episodes = EpisodeCache(idle_s=1e9)

    def play(num):
        for _ in range(num):
            episodes.of(name := new_id())
            episodes.end(name)
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        early = play(2 * MAX_GONE)
        late = play(MAX_GONE)
    finally:
        tracemalloc.stop()
    assert late - early < 100_000, "an episode leaves more than its place in a full table"
    assert len(episodes) == 0


def test_what_memories_are_said_to_take_is_what_they_take():
    tracemalloc.start()
    try:
        episodes = EpisodeCache(idle_s=1000)
        for number in range(100):
            converse(episodes, f"e{number}", turns=20, tokens=100)
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 0.8 < episodes.size_bytes / taken < 1.25


def test_people_are_told_when_open_episodes_are_forgotten_and_again_when_it_has_doubled():
    episodes = EpisodeCache(idle_s=1000, limit_bytes=0)
    told = []
    for number in range(8):
        converse(episodes, f"e{number}")
        told.append(len(episodes.alerts()))
    assert told == [1, 1, 0, 1, 0, 0, 0, 1]


def test_an_episode_stays_its_client_s_even_when_it_was_forgotten():
    now = 0.0
    episodes = EpisodeCache(idle_s=10, clock=lambda: now)
    episodes.of("e1", "alice")
    now = 20.0
    episodes.sweep()
    assert len(episodes) == 0
    with pytest.raises(RefusedError, match="another client"):
        episodes.of("e1", "eve")
    assert episodes.of("e1", "alice").client == "alice"


async def test_a_conversation_that_was_forgotten_goes_on_as_a_branch_with_exactly_the_rendered_tokens(stages):
    async with stages(max_memory_bytes=1) as stage:
        for text in ("one", "two"):
            stage.engine.say(text)
        await stage.ask(HI)
        await stage.ask(HI, ONE, MORE)
        first, second = stage.turns()
    assert (first.branch, second.branch) == (None, "memory_lost")
    assert (second.parent, second.shared) == (None, 0)


async def test_a_conversation_within_the_bound_is_stitched(stages):
    async with stages(max_memory_bytes=100_000) as stage:
        for text in ("one", "two"):
            stage.engine.say(text)
        await stage.ask(HI)
        await stage.ask(HI, ONE, MORE)
        first, second = stage.turns()
    assert (second.parent, second.branch) == (first.call_id, None)


async def test_people_can_see_what_was_forgotten(stages):
    async with stages(max_memory_bytes=1) as stage, stage.broker.events("r") as events, asyncio.timeout(60):
        stage.engine.say("one")
        await stage.ask(HI)
        state = await anext(event async for event in events if event.name == "state" and event.fields["forgotten"])
        warning = await anext(event async for event in events if event.name == "warning")
        headers = {"authorization": f"Bearer {token('read')}"}
        async with stage.http.get(f"{stage.url}/metrics", headers=headers) as response:
            metrics = await response.text()
    assert state.fields["forgotten"] == {"room": 1}
    assert "proxy.max_memory_bytes (1) does not hold" in warning.fields["text"]
    assert 'swarmq_episodes_forgotten_total{reason="room"} 1.0' in metrics
    assert "swarmq_memory_bytes 0.0" in metrics


@pytest.mark.parametrize("name", ["episode", "eval"])
async def test_a_call_after_the_end_is_refused_and_costs_no_tokens(stages, name):
    async with stages() as stage:
        stage.engine.say("one")
        await stage.ask(HI)
        stage.episodes.handle_event(ended("e1", name=name))
        status, error = await stage.refused({"model": "main", "messages": [HI, ONE, MORE]})
        assert (status, error["code"]) == (403, "episode_ended")
        assert len(stage.engine.requests) == 1


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_agent_that_hangs_up_leaves_no_place_taken(stages, streamed):
    """While its answer is waited for, or between its first token and the rest."""
    async with stages(max_open_calls=1, max_waiting_calls=0) as stage:
        body = msgspec.json.encode({"model": "main", "messages": [HI], "stream": streamed})
        arriving, begun = [{"type": "http.request", "body": body}], asyncio.Event()

        async def receive():
            if arriving:
                return arriving.pop()
            await (begun if streamed else stage.engine.sampling_began).wait()
            return {"type": "http.disconnect"}

        async def send(_):
            begun.set()
            await asyncio.Event().wait()

        headers = [(b"authorization", f"Bearer {stage.key()}".encode())]
        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers}
        stage.engine.say("one", gate=None if streamed else asyncio.Event())
        await stage.app({**scope, "query_string": b"", "http_version": "1.1", "app": stage.app}, receive, send)
        stage.engine.say("two")
        assert (await stage.ask(HI))["choices"][0]["message"]["content"] == "two"
        assert stage.turns() == stage.turns()[-1:]


async def test_work_for_an_agent_that_is_gone_already_never_begins():
    async def receive():
        return {"type": "http.disconnect"}

    async def work():
        raise AssertionError("it began")

    with pytest.raises(GoneError):
        await cancel_if_gone(receive, work())
