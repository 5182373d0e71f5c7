"""An episode survives a change of proxy: nothing is stitched to what this one does not know, and the turn says why."""

import pytest

from swarmq.keys import home_proxy_index
from swarmq.messages import new_id, unpack_ids

HI = {"role": "user", "content": "hi"}
MORE = {"role": "user", "content": "more"}


def episode_of(number, count):
    """An episode whose first call belongs to proxy `number`."""
    return next(made for made in iter(new_id, None) if home_proxy_index(made, count) == number)


async def first(stage, key):
    stage.engine.say("one")
    return (await stage.ask(HI, key=key))["choices"][0]["message"]


async def second(stage, key, answer):
    stage.engine.say("two")
    await stage.ask(HI, answer, MORE, key=key)
    return stage.turns()[-1]


async def test_a_conversation_goes_on_at_another_proxy_as_a_branch_and_is_stitched_again_from_there(stages):
    async with stages(count=2, number=0) as one, stages(count=2, number=1) as other:
        key = one.key(episode_of(0, 2))
        answer = await first(one, key)
        turn = await second(other, key, answer)
        assert (turn.parent, turn.shared, turn.branch) == (None, 0, "memory_lost")
        assert unpack_ids(turn.prompt_ids).tolist() == other.engine.requests[0].token_ids
        other.engine.say("three")
        await other.ask(HI, answer, MORE, {"role": "assistant", "content": "two"}, MORE, key=key)
        assert (other.turns()[-1].parent, other.turns()[-1].branch) == (turn.call_id, None)


async def test_a_conversation_that_comes_back_to_a_proxy_continues_what_was_said_there(stages):
    async with stages(count=2, number=0) as one, stages(count=2, number=1) as other:
        key = one.key(episode_of(0, 2))
        answer = await first(one, key)
        await second(other, key, answer)
        turn = await second(one, key, answer)
        assert (turn.parent, turn.branch) == (one.turns()[0].call_id, None)


async def test_a_proxy_that_was_started_again_says_that_it_has_forgotten(stages):
    episode = new_id()
    async with stages() as restarted:
        turn = await second(restarted, restarted.key(episode), {"role": "assistant", "content": "one"})
    assert (turn.parent, turn.branch) == (None, "memory_lost")


@pytest.mark.parametrize("count", [1, 2])
async def test_examples_in_the_first_request_are_no_lost_memory(stages, count):
    async with stages(count=count, number=count - 1) as stage:
        turn = await second(stage, stage.key(episode_of(count - 1, count)), {"role": "assistant", "content": "one"})
    assert (turn.parent, turn.branch) == (None, None)
