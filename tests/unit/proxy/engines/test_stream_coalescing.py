"""Parsing of streams: how often, how soon, and that nothing is lost by waiting. On a clock that is a number."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

import pytest

from support.virtual_time import run
from swarmq.engine.client.protocol import Delta, RenderedPrompt, RoutedExperts
from swarmq.errors import EngineError
from swarmq.proxy.deltas import extend
from swarmq.proxy.engines.stream_coalescing import MAX_PAUSE_S, CoalescingPace, coalesce
from swarmq.testing.scripted_engine import ScriptedEngine, encode_characters

TOKEN_S = 0.01
REPLAY_S = 100e-6
"""Parsing costs so much for every token of the answer so far."""


class SlowEngine(ScriptedEngine):
    """Samples a token every `TOKEN_S`; its parsers take longer the more there is."""

    def __init__(self, replay_s: float = REPLAY_S) -> None:
        super().__init__()
        self.replay_s = replay_s
        self.parsed_at: list[float] = []
        self.parsing_s = 0.0
        self.stall_after, self.stall_s = -1, 0.0

    async def generate(
        self, rendered: RenderedPrompt, *, stream: bool, detailed: bool = False
    ) -> AsyncGenerator[list[Delta], None]:
        now = asyncio.get_running_loop().time
        told, at = 0, now()
        async for portion in super().generate(rendered, stream=stream, detailed=detailed):
            at += self.stall_s if told == self.stall_after else TOKEN_S
            await asyncio.sleep(max(at - now(), 0.0))  # it samples on while nobody reads
            told += 1
            yield portion

    async def derender_delta(self, chat, prompt, token_ids: Sequence[int], *, finish_reason, state):
        self.parsed_at.append(asyncio.get_running_loop().time())
        cost_s = self.replay_s * (len(state or ()) + len(token_ids))
        self.parsing_s += cost_s
        await asyncio.sleep(cost_s)
        return await super().derender_delta(chat, prompt, token_ids, finish_reason=finish_reason, state=state)

    def talk(self, num_choices: int = 1, num_tokens: int = 100_000) -> AsyncGenerator[list[Delta], None]:
        sampling = {"n": num_choices, "max_tokens": num_tokens}
        return self.generate(RenderedPrompt(token_ids=[1], sampling=sampling), stream=True)


class ReceivedAnswer:
    """The part of an answer that an agent has received."""

    def __init__(self) -> None:
        self.messages: dict[int, dict] = {}
        self.token_ids: dict[int, list[int]] = {}
        self.at: list[float] = []
        self.ended_at: dict[int, float] = {}

    async def receive(self, engine: SlowEngine, deltas: AsyncGenerator[list[Delta], None]) -> None:
        now = asyncio.get_running_loop().time
        pace, states = CoalescingPace(now), {}
        async for portion in coalesce(deltas, pace):
            for delta in portion:
                with pace.work():
                    gain, states[delta.index] = await engine.derender_delta(
                        {}, [], delta.token_ids, finish_reason=delta.finish_reason, state=states.get(delta.index)
                    )
                extend(self.messages.setdefault(delta.index, {}), gain)
                self.token_ids.setdefault(delta.index, []).extend(delta.token_ids)
                self.at.append(now())
                if delta.finish_reason:
                    self.ended_at[delta.index] = now()

    @property
    def longest_gap_s(self) -> float:
        return max(later - sooner for sooner, later in zip(self.at, self.at[1:], strict=False))


async def receive_texts(*texts: str, engine: SlowEngine | None = None) -> tuple[SlowEngine, ReceivedAnswer]:
    engine = engine or SlowEngine()
    for text in texts:
        engine.say(text, tokens=encode_characters(text), finish_reason="length")
    agent = ReceivedAnswer()
    await agent.receive(engine, engine.talk(len(texts)))
    return engine, agent


def test_parsing_a_stream_costs_a_share_of_its_time_however_long_it_is():
    for num_tokens in (100, 1_000):
        engine, agent = run(receive_texts("x" * num_tokens))
        assert agent.messages[0]["content"] == "x" * num_tokens
        assert engine.parsing_s < agent.at[-1] / 8
        assert agent.longest_gap_s < 11 * num_tokens * REPLAY_S + TOKEN_S


def test_no_rest_is_longer_than_the_longest():
    _, agent = run(receive_texts("x" * 1_000, engine=SlowEngine(replay_s=1e-3)))
    assert MAX_PAUSE_S < agent.longest_gap_s < MAX_PAUSE_S + 1_000 * 1e-3 + TOKEN_S


def test_five_times_the_tokens_are_far_from_five_times_the_portions():
    counts = [len(run(receive_texts("x" * num_tokens))[0].parsed_at) for num_tokens in (200, 1_000)]
    assert counts[1] < 2.5 * counts[0]


def test_the_first_token_is_parsed_at_once():
    engine, _ = run(receive_texts("x" * 20))
    assert engine.parsed_at[0] == pytest.approx(TOKEN_S)


def test_the_last_token_of_a_choice_does_not_wait_for_the_rest_to_end():
    _, agent = run(receive_texts("x" * 500, "y" * 20))
    assert agent.ended_at[0] == pytest.approx(500 * TOKEN_S, abs=3 * 500 * REPLAY_S)
    assert agent.ended_at[1] == pytest.approx(520 * TOKEN_S, abs=3 * 20 * REPLAY_S)


def test_tokens_do_not_wait_for_an_engine_that_stalls():
    engine = SlowEngine()
    engine.stall_after, engine.stall_s = 200, 60.0
    run(receive_texts("x" * 210, engine=engine))
    assert any(200 * TOKEN_S < at < 200 * TOKEN_S + MAX_PAUSE_S for at in engine.parsed_at)


def test_every_choice_gets_all_of_its_tokens_in_order():
    texts = ("x" * 100, "<think>a thought</think>and an answer", "y")
    _, agent = run(receive_texts(*texts))
    assert {index: agent.token_ids[index] for index in range(3)} == {
        i: encode_characters(text) for i, text in enumerate(texts)
    }
    assert [agent.messages[i]["content"] for i in range(3)] == [texts[0], "and an answer", "y"]
    assert agent.messages[1]["reasoning"] == "a thought"


def test_what_is_merged_keeps_its_numbers_and_how_it_ended():
    async def main() -> list[list[Delta]]:
        engine = SlowEngine()
        engine.say("abc", tokens=encode_characters("abc"), finish_reason="length")
        pace = CoalescingPace(asyncio.get_running_loop().time)
        portions = []
        async for portion in coalesce(engine.talk(), pace):
            portions.append(portion)
            with pace.work():
                await asyncio.sleep(MAX_PAUSE_S)
        return portions

    [[first], [last]] = run(main())
    assert (first.text, first.finish_reason) == ("a", None)
    assert (last.text, last.token_ids, last.finish_reason) == ("bc", encode_characters("bc"), "length")
    assert len(last.logprobs) == 2
    assert last.versions


def test_routed_experts_come_with_the_last_portion_whatever_it_is_merged_of():
    experts = RoutedExperts(num_tokens=2, ids=b"ab")

    async def sample() -> AsyncGenerator[list[Delta], None]:
        yield [Delta(index=0, text="a", token_ids=[1], logprobs=[-0.5])]
        last = Delta(index=0, text="b", token_ids=[2], logprobs=[-0.5], finish_reason="length", routed_experts=experts)
        yield [last]

    async def main() -> list[list[Delta]]:
        pace = CoalescingPace(asyncio.get_running_loop().time)
        with pace.work():
            await asyncio.sleep(MAX_PAUSE_S)
        return [portion async for portion in coalesce(sample(), pace)]

    [[merged]] = run(main())
    assert (merged.text, merged.routed_experts) == ("ab", experts)


def test_an_agent_that_hangs_up_while_a_stream_rests_cancels_it():
    async def main() -> SlowEngine:
        engine = SlowEngine()
        engine.say("x" * 300, tokens=encode_characters("x" * 300))
        listening = asyncio.create_task(ReceivedAnswer().receive(engine, engine.talk()))
        await asyncio.sleep(200 * TOKEN_S)
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        assert listening.cancelled()
        return engine

    assert run(main()).cancelled.is_set()


def test_closing_what_waits_closes_the_engine_s_stream_at_once():
    async def main() -> SlowEngine:
        engine = SlowEngine()
        engine.stall_after, engine.stall_s = 1, 3600.0
        engine.say("x" * 10, tokens=encode_characters("x" * 10))
        portions = coalesce(engine.talk(), CoalescingPace(asyncio.get_running_loop().time))
        await anext(portions)
        await asyncio.sleep(TOKEN_S)
        await portions.aclose()
        assert asyncio.get_running_loop().time() < 1
        return engine

    assert run(main()).cancelled.is_set()


def test_an_engine_that_fails_in_the_middle_is_heard_of():
    async def main() -> None:
        engine = SlowEngine()
        engine.say("xyz", error="it broke")
        await ReceivedAnswer().receive(engine, engine.talk())

    with pytest.raises(EngineError, match="it broke"):
        run(main())


def test_a_stream_that_ends_without_an_ending_gives_all_it_had():
    async def broken_off() -> AsyncGenerator[list[Delta], None]:
        for token in encode_characters("abc"):
            yield [Delta(index=0, text="", token_ids=[token], logprobs=[-1.0])]

    async def main() -> ReceivedAnswer:
        agent = ReceivedAnswer()
        await agent.receive(SlowEngine(), broken_off())
        return agent

    assert run(main()).token_ids[0] == encode_characters("abc")
