"""A pause that outlasts every push has lost its owner: whole weights are served again, doubtful ones never."""

from __future__ import annotations

import pytest

from swarmq.engine.server.pause_watchdog import SILENCE_S, PauseWatch
from swarmq.weights.push.engine_control import EngineControl


@pytest.fixture
async def engine(vllm):
    async with EngineControl(vllm.url) as engine:
        yield engine


async def test_a_push_in_progress_is_left_alone(vllm, engine):
    vllm.paused, vllm.label = True, "updating-3"
    watch = PauseWatch(engine)
    assert not await watch.look(0)
    assert not await watch.look(engine.timeouts.total_s)
    assert vllm.paused


async def test_an_abandoned_pause_over_whole_weights_is_ended(vllm, engine):
    vllm.paused, vllm.label = True, "3"
    watch = PauseWatch(engine)
    await watch.look(0)
    assert not await watch.look(engine.timeouts.total_s + 1)
    assert not vllm.paused


async def test_an_abandoned_update_asks_for_a_restart(vllm, engine):
    vllm.paused, vllm.label = True, "updating-3"
    watch = PauseWatch(engine)
    await watch.look(0)
    assert await watch.look(engine.timeouts.total_s + 1)
    assert vllm.paused


async def test_two_pauses_are_not_taken_for_one(vllm, engine):
    watch = PauseWatch(engine)
    vllm.paused = True
    await watch.look(0)
    vllm.paused = False
    await watch.look(5)
    vllm.paused = True
    await watch.look(engine.timeouts.total_s + 1)
    assert vllm.paused


async def test_a_condemned_engine_asks_for_a_restart_at_once(vllm, engine):
    vllm.paused, vllm.label = True, "updating-3-restart"
    watch = PauseWatch(engine)
    assert await watch.look(0)
    assert watch.reason == "was given up by its learner (updating-3-restart)"


async def test_an_engine_that_does_not_answer_is_given_time_and_then_up():
    async with EngineControl("http://127.0.0.1:9") as gone:
        watch = PauseWatch(gone)
        assert not await watch.look(0)
        assert not await watch.look(SILENCE_S)
        assert await watch.look(SILENCE_S + 1)


async def test_an_answer_ends_the_silence(vllm, engine):
    watch = PauseWatch(engine)
    vllm.drop.add("/weight_info")
    await watch.look(0)
    vllm.drop.clear()
    await watch.look(SILENCE_S)
    vllm.drop.add("/weight_info")
    assert not await watch.look(2 * SILENCE_S)


async def test_a_server_that_answers_late_and_goes_on_computing_is_busy_and_not_dead(vllm, engine):
    vllm.missing.add("/weight_info")
    watch = PauseWatch(engine)
    for look in range(10):
        vllm.metrics = f'vllm:iteration_tokens_total_count{{engine="0"}} {look}.0\n'
        assert not await watch.look(look * SILENCE_S)
    assert not await watch.look(10 * SILENCE_S)
    assert await watch.look(10 * SILENCE_S + 1)


async def test_sleep_is_no_pause_without_owner(vllm, engine):
    await engine.sleep()
    watch = PauseWatch(engine)
    await watch.look(0)
    assert not await watch.look(engine.timeouts.total_s + 1)
    assert vllm.asleep
