"""A pause that outlasts every push has lost its owner: whole weights are served again, doubtful ones never."""

from __future__ import annotations

import pytest

from swarmq.engine.server.pause_watchdog import UNRESPONSIVE_S, PauseWatchdog
from swarmq.weights.push.engine_control import EngineControl


@pytest.fixture
async def engine(vllm):
    async with EngineControl(vllm.url) as engine:
        yield engine


async def test_a_push_in_progress_is_left_alone(vllm, engine):
    vllm.paused, vllm.label = True, "updating-3"
    watch = PauseWatchdog(engine)
    assert not await watch.needs_restart(0)
    assert not await watch.needs_restart(engine.timeouts.total_s)
    assert vllm.paused


async def test_an_abandoned_pause_over_whole_weights_is_ended(vllm, engine):
    vllm.paused, vllm.label = True, "3"
    watch = PauseWatchdog(engine)
    await watch.needs_restart(0)
    assert not await watch.needs_restart(engine.timeouts.total_s + 1)
    assert not vllm.paused


async def test_an_abandoned_update_asks_for_a_restart(vllm, engine):
    vllm.paused, vllm.label = True, "updating-3"
    watch = PauseWatchdog(engine)
    await watch.needs_restart(0)
    assert await watch.needs_restart(engine.timeouts.total_s + 1)
    assert vllm.paused


async def test_two_pauses_are_not_taken_for_one(vllm, engine):
    watch = PauseWatchdog(engine)
    vllm.paused = True
    await watch.needs_restart(0)
    vllm.paused = False
    await watch.needs_restart(5)
    vllm.paused = True
    await watch.needs_restart(engine.timeouts.total_s + 1)
    assert vllm.paused


async def test_a_condemned_engine_asks_for_a_restart_at_once(vllm, engine):
    vllm.paused, vllm.label = True, "updating-3-restart"
    watch = PauseWatchdog(engine)
    assert await watch.needs_restart(0)
    assert watch.reason == "was condemned by its learner (updating-3-restart)"


async def test_an_engine_that_does_not_answer_is_given_time_and_then_up():
    async with EngineControl("http://127.0.0.1:9") as gone:
        watch = PauseWatchdog(gone)
        assert not await watch.needs_restart(0)
        assert not await watch.needs_restart(UNRESPONSIVE_S)
        assert await watch.needs_restart(UNRESPONSIVE_S + 1)


async def test_an_answer_ends_the_silence(vllm, engine):
    watch = PauseWatchdog(engine)
    vllm.drop.add("/weight_info")
    await watch.needs_restart(0)
    vllm.drop.clear()
    await watch.needs_restart(UNRESPONSIVE_S)
    vllm.drop.add("/weight_info")
    assert not await watch.needs_restart(2 * UNRESPONSIVE_S)


async def test_a_server_that_answers_late_and_goes_on_computing_is_busy_and_not_dead(vllm, engine):
    vllm.missing.add("/weight_info")
    watch = PauseWatchdog(engine)
    for steps in range(10):
        vllm.metrics = f'vllm:iteration_tokens_total_count{{engine="0"}} {steps}.0\n'
        assert not await watch.needs_restart(steps * UNRESPONSIVE_S)
    assert not await watch.needs_restart(10 * UNRESPONSIVE_S)
    assert await watch.needs_restart(10 * UNRESPONSIVE_S + 1)


async def test_sleep_is_no_pause_without_owner(vllm, engine):
    await engine.sleep()
    watch = PauseWatchdog(engine)
    await watch.needs_restart(0)
    assert not await watch.needs_restart(engine.timeouts.total_s + 1)
    assert vllm.asleep
