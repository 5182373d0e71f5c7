"""An engine is led through a push so that every failure leaves it serving whole weights, or held back and recognisable."""

from __future__ import annotations

import pytest

from swarmq.errors import EngineError, EngineRefusedError
from swarmq.weights.push.engine_control import EngineControl, EngineStatus, Payload, Timeouts, UpdatePhase

NEW = Payload(update_info={"path": "new weights"})
NEWER = Payload(update_info={"path": "newer"})


async def test_a_push_ends_in_an_engine_that_serves_the_version(vllm):
    async with EngineControl(vllm.url) as engine:
        pause_s = await engine.update(NEW, 3)
        assert pause_s > 0
        assert engine.phase is UpdatePhase.SERVING
        assert await engine.status() == EngineStatus(label="3", is_paused=False)
    assert vllm.weights == "new weights"


async def test_agents_never_get_weights_under_a_label_that_is_not_theirs(vllm):
    async with EngineControl(vllm.url) as engine:
        await engine.update(NEW, 3)
        await engine.update(NEWER, 4)
    assert vllm.seen_while_serving <= {("default", "on disk"), ("3", "new weights"), ("4", "newer")}


async def test_the_cache_is_cleared_unless_it_is_to_be_kept_and_fits_to_a_version(vllm):
    async with EngineControl(vllm.url) as engine:
        await engine.update(NEW, 3)
        await engine.update(NEWER, 4)
    assert vllm.cleared == [True, True]
    vllm.cleared.clear()
    async with EngineControl(vllm.url, keep_cache=True) as engine:
        await engine.update(NEW, 5)
        vllm.label = "updating-6"  # another pusher died in an update
        await engine.update(NEWER, 7)
        await engine.update(NEW, 8)
        await engine.update(NEWER, 8)
        await engine.update(NEW, 6)  # of another run, or after a return to an older checkpoint
    assert vllm.cleared == [False, True, False, True, True]


@pytest.mark.parametrize("step", ["/pause", "/update_weight_version"])
@pytest.mark.parametrize("how", ["refuses", "breaks off"])
async def test_a_failure_before_the_weights_change_leaves_the_engine_serving_as_before(vllm, step, how):
    if how == "refuses":
        vllm.fail[step] = "no"
    else:
        vllm.drop.add(step)
    async with EngineControl(vllm.url) as engine:
        with pytest.raises(EngineError):
            await engine.update(NEW, 3)
    assert (vllm.label, vllm.paused, vllm.weights) == ("default", False, "on disk")


async def test_weights_that_the_engine_refuses_to_load_leave_it_serving_as_before(vllm):
    async with EngineControl(vllm.url) as engine:
        await engine.update(NEW, 3)
        vllm.fail["/update_weights"] = vllm.untouched()
        with pytest.raises(EngineRefusedError, match="no such file"):
            await engine.update(NEWER, 4)
        assert await engine.status() == EngineStatus(label="3", is_paused=False)


@pytest.mark.parametrize("step", ["/start_weight_update", "/update_weights", "/finish_weight_update"])
async def test_an_engine_whose_weights_are_in_doubt_serves_nobody(vllm, step):
    vllm.drop.add(step)
    async with EngineControl(vllm.url) as engine:
        with pytest.raises(EngineError):
            await engine.update(NEW, 3)
        status = await engine.status()
        assert status.is_paused
        assert status.is_in_doubt
        assert status.version is None
        with pytest.raises(EngineError, match="push again or restart"):
            await engine.release()
    assert vllm.paused


@pytest.mark.parametrize("step", ["/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"])
async def test_the_next_push_repairs_whatever_the_last_one_left(vllm, step):
    vllm.drop.add(step)
    async with EngineControl(vllm.url) as engine:
        with pytest.raises(EngineError):
            await engine.update(NEW, 3)
    vllm.drop.clear()
    async with EngineControl(vllm.url) as engine:
        await engine.update(NEWER, 4)
    assert (vllm.label, vllm.paused, vllm.weights, vllm.active) == ("4", False, "newer", False)


@pytest.mark.parametrize("step", ["/pause", "/update_weight_version", "/sleep", "/wake_up"])
async def test_weights_in_doubt_serve_nobody_when_their_repair_fails(vllm, step):
    async with EngineControl(vllm.url) as engine:
        vllm.paused, vllm.label = True, "updating-3"
        await engine.sleep()
        vllm.drop.add(step)
        with pytest.raises(EngineError):
            await engine.update(NEWER, 4)
        assert (await engine.status()).is_in_doubt
        assert engine.phase is UpdatePhase.UPDATING
    assert vllm.paused


async def test_an_update_that_was_left_open_is_closed_first(vllm):
    vllm.active, vllm.paused, vllm.label = True, True, "updating-3"
    async with EngineControl(vllm.url) as engine:
        await engine.update(NEW, 4)
    assert (vllm.label, vllm.paused, vllm.active) == ("4", False, False)


async def test_refused_weights_do_not_clear_the_doubt_of_an_earlier_push(vllm):
    vllm.paused, vllm.label = True, "updating-3"
    vllm.fail["/update_weights"] = vllm.untouched()
    async with EngineControl(vllm.url) as engine:
        with pytest.raises(EngineRefusedError):
            await engine.update(NEW, 4)
        assert (await engine.status()).is_in_doubt
    assert vllm.paused


async def test_a_pause_without_owner_is_ended_when_the_weights_are_whole(vllm):
    vllm.paused, vllm.label = True, "7"
    async with EngineControl(vllm.url) as engine:
        await engine.release()
        assert await engine.status() == EngineStatus(label="7", is_paused=False)


async def test_an_engine_without_control_endpoints_is_named_with_the_remedy(vllm):
    vllm.missing.add("/weight_info")
    async with EngineControl(vllm.url) as engine:
        with pytest.raises(EngineError, match="VLLM_SERVER_DEV_MODE=1"):
            await engine.update(NEW, 1)
    assert vllm.calls == ["/version", "/weight_info"]


@pytest.mark.parametrize("route", ["/version", "/weight_info", "/is_paused"])
async def test_a_server_that_fails_is_quoted_and_not_taken_for_one_of_another_version(vllm, route):
    vllm.fail[route] = "EngineCore encountered an issue"
    async with EngineControl(vllm.url) as engine:
        with pytest.raises(EngineError, match=f"{vllm.url}: {route} failed: .*EngineCore encountered") as caught:
            await engine.status()
    assert "0.30" not in str(caught.value)
    assert not isinstance(caught.value, EngineRefusedError), "a push would give up at once"


@pytest.mark.parametrize("version", ["0.29.1", "0.40.0"])
async def test_a_server_out_of_the_range_is_refused_with_url_version_and_range(vllm, version):
    vllm.version = version
    async with EngineControl(vllm.url) as engine:
        with pytest.raises(EngineError, match=rf"{vllm.url} runs vLLM {version}; 0\.30 to 0\.33 are supported"):
            await engine.update(NEW, 1)
    assert vllm.calls == ["/version"], "nothing else was touched"


@pytest.mark.parametrize("version", ["", "dev", "0.33.1+cu130"])
async def test_a_server_of_the_range_passes_and_so_does_one_that_does_not_say(vllm, version):
    vllm.version = version
    vllm.missing |= {"/version"} if not version else set()
    async with EngineControl(vllm.url) as engine:
        assert not (await engine.status()).is_paused
        await engine.status()
    assert vllm.calls.count("/version") == 1


async def test_an_engine_that_does_not_answer_ends_in_an_error_that_names_it(vllm):
    async with EngineControl("http://127.0.0.1:9", timeouts=Timeouts(ask_s=5)) as engine:
        assert not await engine.is_healthy()
        with pytest.raises(EngineError, match="127.0.0.1:9 cannot be reached"):
            await engine.status()


async def test_an_engine_sleeps_and_wakes_with_the_version_it_had(vllm):
    async with EngineControl(vllm.url) as engine:
        await engine.update(NEW, 3)
        await engine.sleep()
        assert vllm.asleep
        assert (await engine.status()).version is None
        await engine.wake()
        assert await engine.status() == EngineStatus(label="3", is_paused=False)
        await engine.wake()
    assert not vllm.asleep


async def test_an_engine_to_be_started_again_is_not_put_to_sleep(vllm):
    vllm.paused, vllm.label = True, "updating-3-restart"
    async with EngineControl(vllm.url) as engine:
        with pytest.raises(EngineError, match="must be restarted"):
            await engine.sleep()
    assert not vllm.asleep


async def test_an_engine_in_doubt_that_cannot_sleep_is_left_to_its_owner(vllm):
    vllm.paused, vllm.label, vllm.fail["/sleep"] = True, "updating-3", "no host memory"
    async with EngineControl(vllm.url) as engine:
        with pytest.raises(EngineError, match="only a restart helps.*no host memory") as caught:
            await engine.sleep()
        assert (await engine.status()).is_condemned
    assert not isinstance(caught.value, EngineRefusedError)
    assert vllm.paused


async def test_an_engine_without_sleep_mode_goes_on_as_it_was(vllm):
    vllm.fail["/sleep"] = "sleep mode is not enabled"
    async with EngineControl(vllm.url) as engine:
        with pytest.raises(EngineRefusedError):
            await engine.sleep()
    assert (vllm.label, vllm.paused) == ("default", False)


@pytest.mark.parametrize("answer", ["<html>", '{"hello": 1}', "[1]", '{"weight_ver', '{"weight_version": null}'])
@pytest.mark.parametrize("ask", [EngineControl.status, EngineControl.facts])
async def test_what_answers_as_no_vllm_does_is_named_with_its_answer(vllm, ask, answer):
    vllm.foreign = answer
    async with EngineControl(vllm.url) as engine:
        with pytest.raises(EngineError, match="which is not vLLM's answer") as caught:
            await ask(engine)
    assert vllm.url in str(caught.value)
    assert answer in str(caught.value)


async def test_a_refusal_counts_though_the_learner_sent_in_vain_meanwhile(vllm):
    vllm.label = "1"
    vllm.fail["/update_weights"] = vllm.untouched()

    def send(url, timeout_s):
        raise EngineError("a broadcast did not end")

    async with EngineControl(vllm.url) as engine:
        with pytest.raises(EngineRefusedError, match="no such file"):
            await engine.update(Payload(update_info={"tensors": []}, send=send), 2)
    assert (vllm.label, vllm.paused) == ("1", False)


async def test_weights_that_were_sent_in_vain_leave_the_engine_in_doubt(vllm):
    def send(url, timeout_s):
        raise EngineError("a broadcast did not end")

    async with EngineControl(vllm.url) as engine:
        with pytest.raises(EngineError, match="did not end"):
            await engine.update(Payload(update_info={"tensors": []}, send=send), 2)
    assert (vllm.label, vllm.paused) == ("updating-2", True)
