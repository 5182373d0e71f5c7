"""Which parsers may be given a stream in large portions."""

import pytest

from swarmq.errors import EngineError, EngineRefusedError
from swarmq.proxy.engines.pool import EngineLane
from swarmq.proxy.engines.tool_parser_probe import finds_tool_calls
from swarmq.testing.scripted_engine import ScriptedEngine


class OneThingAtATime(ScriptedEngine):
    """Its parsers tell one call for each portion, whatever else that holds."""

    async def derender_delta(self, *given, finish_reason, state):
        seen, told = state or ([], 0)
        message, seen = await super().derender_delta(*given, finish_reason="stop", state=seen)
        calls = message.pop("tool_calls", [])[told : told + 1]
        return {**message, **({"tool_calls": calls} if calls else {})}, (seen, told + len(calls))


class Refusing(ScriptedEngine):
    async def render(self, chat):
        if any(message.get("tool_calls") for message in chat["messages"]):
            raise EngineRefusedError("one call at a time", status=400)
        return await super().render(chat)


class Broken(ScriptedEngine):
    async def derender(self, *_):
        raise EngineError("it broke")


class Deaf(ScriptedEngine):
    """Without a parser of tool calls."""

    async def derender(self, _chat, _prompt, answers):
        return [{"role": "assistant", "content": "all of it"} for _ in answers]


async def test_parsers_that_find_every_call_however_a_stream_is_cut_are_told():
    assert await finds_tool_calls(ScriptedEngine())


@pytest.mark.parametrize("engine", [OneThingAtATime, Refusing, Broken, Deaf])
async def test_all_others_get_streams_as_they_come(engine):
    assert not await finds_tool_calls(engine())


async def test_an_engine_rehearses_once_until_it_fails():
    class Counting(ScriptedEngine):
        rehearsals = 0

        async def derender(self, *given):
            self.rehearsals += 1
            return await super().derender(*given)

    engine = Counting()
    lane = EngineLane(engine)
    assert [await lane.finds_calls() for _ in range(3)] == [True] * 3
    assert engine.rehearsals == 1
    lane.fail()
    assert await lane.finds_calls()
    assert engine.rehearsals == 2
