"""Several engines: who gets a call, who gets none, and engines that come and go while agents are served."""

import asyncio
import time

import pytest
from structlog.testing import capture_logs

from swarmq.engine.client.protocol import EngineIdentity
from swarmq.errors import EngineError
from swarmq.proxy.engines.pool import CROWD_MARGIN, MAX_TOGETHER, EngineLane, EnginePool, PoolTimings
from swarmq.testing.scripted_engine import ScriptedEngine, encode

HI = {"role": "user", "content": "hi"}


def pool_of(count, **how):
    return EnginePool([ScriptedEngine(url=str(i)) for i in range(count)], **how)


def urls(pool, *arguments):
    return [lane.engine.url for lane in pool.order(*arguments)]


def test_two_proxies_choose_the_same_engine_for_a_new_episode_and_spread_episodes():
    one, other = pool_of(4), pool_of(4)
    firsts = [urls(one, None, f"episode-{n}")[0] for n in range(64)]
    assert firsts == [urls(other, None, f"episode-{n}")[0] for n in range(64)]
    assert set(firsts) == set("0123")


def test_an_episode_leaves_its_engine_only_when_that_is_crowded():
    pool = pool_of(2)
    mine = pool.lanes[0]
    mine.open_calls = CROWD_MARGIN
    assert pool.order(mine)[0] is mine
    mine.open_calls = CROWD_MARGIN + 1
    assert pool.order(mine)[0] is not mine


def test_an_engine_with_weights_too_old_to_train_from_is_asked_last():
    pool = pool_of(3, max_behind=2)
    for lane, version in zip(pool.lanes, (7, 4, 5), strict=True):
        lane.version = version
    assert urls(pool, pool.lanes[1], "e")[-1] == "1"
    pool.lanes[1].version = 5
    assert urls(pool, pool.lanes[1], "e")[0] == "1"


async def test_probes_find_who_is_ill_who_is_well_again_and_which_weights_each_has():
    pool = pool_of(2)
    ill, well = (lane.engine for lane in pool.lanes)
    ill.down, well.version = True, 3
    with capture_logs() as told:
        for _ in range(2):
            await pool.probe()
    assert [(line["event"], line["engine"]) for line in told] == [("engine_away", "0")]
    assert [(lane.healthy, lane.version) for lane in pool.lanes] == [(False, None), (True, 3)]
    assert (urls(pool, pool.lanes[0])[0], pool.num_healthy) == ("1", 1)
    ill.down = False
    await pool.probe()
    assert urls(pool, pool.lanes[0])[0] == "0"


@pytest.mark.parametrize(("token_s", "together"), [(0.2, 1), (0.0255, 4), (0.03, 3), (0.0001, MAX_TOGETHER)])
def test_a_stream_brings_no_more_at_a_time_than_nobody_notices(token_s, together):
    lane = pool_of(1).lanes[0]
    assert lane.together(1) == 1
    lane.measure_stream(0, 1.0)
    lane.measure_stream(100, 100 * token_s)
    assert lane.together(1) == together


@pytest.mark.parametrize(("num_calls", "together"), [(100, 1), (300, 2), (600, 4), (10_000, 5)])
def test_streams_of_a_crowd_bring_more_at_a_time(num_calls, together):
    timings = PoolTimings(portion_s=0.03, portions_per_s=3000.0, crowded_portion_s=0.25)
    lane = EngineLane(ScriptedEngine(), timings=timings)
    lane.measure_stream(100, 100 * 0.05)
    assert lane.together(num_calls) == together


async def test_streams_of_a_quick_engine_bring_several_tokens_at_a_time_unless_their_agent_wants_otherwise(
    stages,
):
    any_machine_is_quick = PoolTimings(portion_s=1e6)
    async with stages(engine_timings=any_machine_is_quick) as stage:
        asked = []
        for fields in ({}, {}, {"stream_interval": 2}):
            stage.engine.say("several tokens")
            await stage.stream(HI, **fields)
            asked.append(stage.engine.requests[-1].sampling.get("stream_interval"))
        stage.engine.say("whole")
        await stage.ask(HI)
        assert asked == [None, MAX_TOGETHER, 2]
        assert "stream_interval" not in stage.engine.requests[-1].sampling


async def test_an_episode_uses_keys_as_old_as_its_first_call_on_an_engine_and_no_older(stages):
    async with stages(keep_cache=True, probe_every_s=1000.0) as stage:

        async def salt(episode):
            stage.engine.say("one")
            await stage.ask(HI, key=stage.key(episode))
            return stage.engine.requests[-1].passthrough["cache_salt"]

        async def refuse():
            raise EngineError("as in an update, in which the label is no version")

        stage.engine.version = 3
        assert [await salt("a"), await salt("b")] == ["version-3", "version-3"]
        stage.engine.version = 4
        assert [await salt("a"), await salt("c")] == ["version-3", "version-4"]
        stage.engine.weight_version = refuse
        during = [await salt("d"), await salt("e"), await salt("d")]
        assert during[0] == during[2] not in ("version-3", "version-4", during[1])
    async with stages() as stage:
        stage.engine.say("one")
        await stage.ask(HI)
        assert "cache_salt" not in stage.engine.requests[-1].passthrough


async def change(stage, what, url, policy="main"):
    from .test_control import call

    return await call(stage, "POST", f"/engines/{what}", {"policy": policy, "url": url}, roles=["admin"])


async def test_an_engine_with_another_tokenizer_is_not_added(stages, tmp_path, monkeypatch):
    async def tokenize(engine, text):
        return [*encode(text), engine.url == "scripted://new"]

    monkeypatch.setattr(ScriptedEngine, "tokenize", tokenize)
    async with stages(folder=str(tmp_path)) as stage:
        status, fault = await change(stage, "add", "scripted://new")
        assert (status, fault["error"]["param"]) == (400, "url")
        assert "scripted://new has another tokenizer than the one at scripted://0" in fault["error"]["message"]
        status, engines = await change(stage, "add", "scripted://more")
        assert [view["url"] for view in engines["main"]] == ["scripted://0", "scripted://more"]


async def test_an_engine_of_another_version_is_not_added(stages, tmp_path, monkeypatch):
    async def identity(engine):
        return EngineIdentity(vllm="0.33.1" if engine.url == "scripted://new" else "0.32.0")

    monkeypatch.setattr(ScriptedEngine, "identity", identity)
    async with stages(folder=str(tmp_path)) as stage:
        status, fault = await change(stage, "add", "scripted://new")
        assert (status, fault["error"]["param"]) == (400, "url")
        assert "scripted://new has vllm 0.33.1, the one at scripted://0 vllm 0.32.0" in fault["error"]["message"]


async def test_an_engine_that_is_added_serves(stages, tmp_path):
    async with stages(folder=str(tmp_path)) as stage:
        status, engines = await change(stage, "add", "scripted://new")
        assert status == 200
        assert [view["url"] for view in engines["main"]] == ["scripted://0", "scripted://new"]
        stage.engines[0].down = True
        stage.engines[-1].say("x")
        await stage.ask(HI)
        assert stage.engines[-1].url == "scripted://new"
        assert len(stage.engines[-1].requests) == 1


async def test_an_engine_that_is_slow_to_answer_and_added_twice_is_there_once(stages, tmp_path, monkeypatch):
    async def slowly(_engine):
        await asyncio.sleep(0.05)
        return True

    async with stages(folder=str(tmp_path)) as stage:
        monkeypatch.setattr(ScriptedEngine, "is_healthy", slowly)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(2):
                tasks.create_task(change(stage, "add", "scripted://new"))
        assert [view["url"] for view in (await _engines(stage))["main"]] == ["scripted://0", "scripted://new"]


async def test_an_engine_that_is_drained_gets_nothing_new_and_ends_what_it_has(stages, tmp_path):
    async with stages(folder=str(tmp_path), engines=2) as stage:
        gate = asyncio.Event()
        for engine in stage.engines:
            engine.say("slow", gate=gate)
        async with asyncio.TaskGroup() as tasks:
            open_call = tasks.create_task(stage.stream(HI, key=stage.key("e1")))
            leaving, staying = await _asked(stage.engines)
            status, engines = await change(stage, "remove", leaving.url)
            assert status == 200
            assert {(view["url"], view["draining"]) for view in engines["main"]} == {
                (leaving.url, True),
                (staying.url, False),
            }
            staying.lines.clear()
            for _ in range(3):
                staying.say("x")
                await stage.ask(HI, key=stage.key("e1"))
            assert (len(leaving.requests), len(staying.requests)) == (1, 3)
            gate.set()
        assert open_call.result()[-1] == "[DONE]"
        async with asyncio.timeout(120):
            while len((await _engines(stage))["main"]) > 1:
                pass
        assert len(stage.turns()) == 4


async def test_a_proxy_follows_what_another_one_was_told(stages, tmp_path):
    async with stages(folder=str(tmp_path), engines=2) as told, stages(folder=str(tmp_path), engines=2) as other:
        await change(told, "remove", "scripted://0")
        async with asyncio.timeout(120):
            while len((await _engines(other))["main"]) > 1:
                pass
        assert [view["url"] for view in (await _engines(other))["other"]] == ["scripted://0", "scripted://1"]


@pytest.mark.parametrize(
    ("what", "url", "policy"),
    [
        ("remove", "scripted://0", "main"),
        ("remove", "scripted://5", "main"),
        ("add", "scripted://5", "nobody"),
        ("add", "not a url", "main"),
    ],
    ids=["the last one", "an unknown one", "of no policy", "nonsense"],
)
async def test_a_change_that_makes_no_sense_changes_nothing(stages, tmp_path, what, url, policy):
    async with stages(folder=str(tmp_path)) as stage:
        before = await _engines(stage)
        status, _ = await change(stage, what, url, policy)
        assert status == 400
        assert [view["url"] for view in (await _engines(stage))["main"]] == [view["url"] for view in before["main"]]


async def test_only_admins_change_engines(stage):
    from .test_control import call

    for role in ("rollout", "read"):
        status, _ = await call(stage, "POST", "/engines/add", {"policy": "main", "url": "http://x"}, roles=[role])
        assert status == 403


async def test_tokens_of_an_engine_that_does_not_say_which_weights_sampled_them_are_those_of_the_oldest(stage):
    """vLLM before 0.32. A push may come while a call is under way."""
    gate = asyncio.Event()
    stage.engine.reports_versions, stage.engine.version = False, 7
    await _some_probes()
    stage.engine.say("abcdef", gate=gate)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(stage.ask(HI))
        await stage.engine.sampling_began.wait()
        stage.engine.version = 8
        await _some_probes()
        gate.set()
    [turn] = stage.turns()
    assert [span.version for span in turn.versions] == [7]


async def test_calls_wait_through_a_pause_for_weights_and_go_on(stage):
    """As vLLM does it: requests are kept, tokens before and after have their versions."""
    gate = asyncio.Event()
    stage.engine.say("abcdef", gate=gate)
    async with asyncio.TaskGroup() as tasks:
        answer = tasks.create_task(stage.ask(HI))
        await stage.engine.sampling_began.wait()
        stage.engine.version = 8
        await _some_probes()
        assert not answer.done()
        gate.set()
    assert answer.result()["choices"][0]["message"]["content"] == "abcdef"
    [turn] = stage.turns()
    assert turn.versions[-1].version == 8


async def _asked(engines):
    """The engine that samples, and the other one."""
    waits = [asyncio.ensure_future(engine.sampling_began.wait()) for engine in engines]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    first = next(engine for engine in engines if engine.sampling_began.is_set())
    return first, next(engine for engine in engines if engine is not first)


async def _engines(stage):
    from .test_control import call

    return (await call(stage, "GET", "/status", roles=["read"]))[1]["policies"]


async def _some_probes():
    for _ in range(50):
        await asyncio.sleep(0.001)


async def test_calls_wait_for_an_engine_with_the_weights_that_the_run_goes_on_with():
    pool = pool_of(2, resumed_at=20)
    _, quick = (lane.engine for lane in pool.lanes)
    waiting = asyncio.create_task(pool.ready())
    for version in (0, 19):
        quick.version = version
        await pool.probe()
        assert not waiting.done()
    quick.version = 20
    await pool.probe()
    assert await waiting


async def test_calls_wait_while_the_only_engine_that_answers_was_started_again_with_weights_too_old_to_train_from():
    pool = pool_of(2, max_behind=4)
    gone, again = (lane.engine for lane in pool.lanes)
    gone.version = again.version = 20
    await pool.probe()
    again.version, gone.down = 15, True
    await pool.probe()
    waiting = asyncio.create_task(pool.ready())
    await _some_probes()
    assert not waiting.done()
    again.version = 16
    await pool.probe()
    assert await waiting


async def test_an_outage_is_told_when_it_has_lasted_and_when_it_is_over():
    pool = pool_of(1, timings=PoolTimings(report_s=0.0))
    await pool.probe()
    assert pool.news() == ""
    pool.lanes[0].engine.down = True
    await pool.probe()
    assert pool.news() == "no engine answers (0): calls wait for one, at most 540 s in all (0 calls wait now)"
    assert pool.news() == ""
    pool.lanes[0].engine.down = False
    await pool.probe()
    assert pool.news() == "an engine answers again after 0 s: calls go on"
    assert pool.news() == ""


async def test_calls_outlast_an_engine_that_is_away_and_people_hear_of_it(stages):
    timings = PoolTimings(wait_s=60.0, report_s=0.0)
    async with stages(engine_timings=timings) as stage, stage.broker.events("r") as events, asyncio.timeout(30):
        stage.engine.down = True
        asking = [asyncio.create_task(stage.ask(HI)), asyncio.create_task(stage.stream(HI))]
        async for event in events:
            if event.name == "warning" and "no engine answers" in event.fields["text"]:
                break
        assert not any(call.done() for call in asking)
        for line in ("one", "two"):
            stage.engine.say(line)
        stage.engine.down = False
        await asyncio.gather(*asking)


class BackAtOnce(ScriptedEngine):
    """It goes away while a call is under way, and is back before anything can ask it again after that call failed."""

    def __init__(self, **given):
        super().__init__(**given)
        self.asked, self.failing = asyncio.Event(), asyncio.Event()

    async def render(self, chat):
        self.asked.set()
        await self.failing.wait()
        try:
            return await super().render(chat)
        finally:
            self.down = False


async def test_a_call_that_failed_in_an_outage_goes_on_though_the_outage_ends_before_its_probe(stages):
    timings = PoolTimings(wait_s=60.0, report_s=0.0)
    async with stages(engine=BackAtOnce, engine_timings=timings) as stage, stage.broker.events("r") as events:
        stage.engine.say("one")
        async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
            tasks.create_task(stage.ask(HI))
            await stage.engine.asked.wait()
            stage.engine.down = True
            async for event in events:
                if event.name == "warning" and "policy main: no engine answers" in event.fields["text"]:
                    break
            stage.engine.failing.set()


async def test_a_call_that_fails_though_its_engine_answers_is_not_repeated_for_ever():
    pool = pool_of(1)
    engine = pool.lanes[0].engine
    for down in (False, True, False):
        engine.down = down
        await pool.probe()
    assert not await pool.out(since=time.monotonic())


async def test_calls_that_wait_too_long_for_an_engine_are_told_to_come_back(stages):
    async with stages(engine_timings=PoolTimings(wait_s=0.2)) as stage, asyncio.timeout(30):
        stage.engine.down = True
        status, error = await stage.refused({"model": "main", "messages": [HI]})
        assert (status, error["code"]) == (503, "engine_unavailable")


async def test_where_a_run_goes_on_calls_to_what_was_trained_wait_and_others_do_not(stages, tmp_path):
    (tmp_path / "r" / "main" / "checkpoints" / "step-00000020").mkdir(parents=True)
    async with stages(folder=str(tmp_path), engine_timings=PoolTimings(wait_s=600.0)) as stage, asyncio.timeout(30):
        for line in "abcd":
            stage.engine.say(line)
        asking, key = asyncio.create_task(stage.ask(HI)), stage.key("e2", policies=("other",))
        early = [await stage.ask(HI, key=key, model="other") for _ in range(3)]
        stage.engine.version = 20
        answers = [answer["choices"][0]["message"]["content"] for answer in (*early, await asking)]
        assert answers == [*"abcd"]


async def test_calls_do_not_wait_for_ever_for_weights_that_nobody_pushes(stages, tmp_path):
    (tmp_path / "r" / "main" / "checkpoints" / "step-00000020").mkdir(parents=True)
    async with stages(folder=str(tmp_path), engine_timings=PoolTimings(wait_s=0.2)) as stage, asyncio.timeout(30):
        for line in ("one", "two"):
            stage.engine.say(line)
        await asyncio.gather(stage.ask(HI), stage.ask(HI))


async def test_a_call_waits_for_weights_as_long_as_a_call_may_take(stages, tmp_path):
    (tmp_path / "r" / "main" / "checkpoints" / "step-00000020").mkdir(parents=True)
    async with stages(folder=str(tmp_path), request_timeout_s=0.2, engine_timings=PoolTimings(wait_s=600.0)) as stage:
        body = {"model": "main", "messages": [HI]}
        status, error = await stage.refused(body)
        assert (status, error["code"]) == (504, "deadline_exceeded")
