"""What a host's daemon does with jobs, over HTTP, with scripted processes: no run is lost, none runs twice, and what is refused changes
nothing."""

from __future__ import annotations

import signal

import pytest

from support.host import ScriptedLauncher, job, open_host, token


@pytest.fixture
def launcher():
    return ScriptedLauncher()


async def test_a_run_is_queued_started_watched_and_done(tmp_path, launcher):
    async with open_host(tmp_path, launcher) as host:
        status, view = await host.launch("math")
        assert (status, view["state"], view["owner"]) == (200, "starting", "ann")
        host.is_up("math", steps=2, max_steps=2)
        status, view = await host.ask("GET", "/v1/runs/math?unlike=starting&wait_s=30", role="read")
        assert (view["state"], view["policies"]["main"]["step"]) == ("up", 2)
        await host.end("math")
        assert await host.state("math") == "done"


async def test_runs_wait_for_room_in_the_order_of_their_launch(tmp_path, launcher):
    async with open_host(tmp_path, launcher) as host:
        for run in ("a", "b", "c"):
            await host.launch(run)
        assert await host.states() == {"a": "starting", "b": "queued", "c": "queued"}
        assert [(await host.ask("GET", f"/v1/runs/{run}"))[1]["position"] for run in "abc"] == [None, 1, 2]
        await host.end("a", says="the model is broken")
        assert await host.states() == {"a": "failed", "b": "starting", "c": "queued"}
        assert (await host.ask("GET", "/v1/runs/a"))[1]["detail"] == "the model is broken"


async def test_each_run_gets_gpus_of_its_own_and_none_overtakes(tmp_path, launcher):
    async with open_host(tmp_path, launcher, gpus=4, most_running=4) as host:
        await host.launch("small", gpus=1)
        await host.launch("other", gpus=2)
        await host.launch("large")
        await host.launch("late", gpus=1)
        assert {run: process.gpus for run, process in launcher.alive.items()} == {"small": (0,), "other": (1, 2)}
        assert await host.states() == {"small": "starting", "other": "starting", "large": "queued", "late": "queued"}
        await host.end("small", says="over")
        await host.end("other", says="over")
        assert launcher.alive["large"].gpus == (0, 1, 2, 3)


async def test_the_same_launch_sent_again_is_one_run_and_another_one_under_its_id_is_refused(tmp_path, launcher):
    async with open_host(tmp_path, launcher) as host:
        first = await host.launch("math", "once")
        assert await host.launch("math", "once") == first
        assert launcher.starts == ["math"]
        status, answer = await host.launch("code", "once")
        assert (status, answer["error"]["code"], answer["error"]["param"]) == (409, "request_conflict", "request_id")
    async with open_host(tmp_path, launcher) as host:
        assert (await host.launch("math", "once"))[0] == 200, "the next daemon knows the id"
    assert launcher.starts == ["math"]


async def test_a_name_is_taken_until_its_run_is_deleted(tmp_path, launcher):
    async with open_host(tmp_path, launcher) as host:
        await host.launch("math", "one")
        status, answer = await host.launch("math", "two")
        assert (status, answer["error"]["param"]) == (409, "run")
        assert "launched by ann" in answer["error"]["message"]
        (host.folder.path / "mine").mkdir()
        status, answer = await host.launch("mine")
        assert (status, answer["error"]["code"]) == (409, "run_exists")
        assert (await host.ask("DELETE", "/v1/runs/math"))[0] == 409
        await host.ask("POST", "/v1/runs/math/stop")
        await host.end("math")
        assert (await host.ask("DELETE", "/v1/runs/math"))[0] == 204
        assert not host.folder.run("math").path.exists()
        assert (await host.launch("math", "two"))[0] == 200


async def test_a_full_host_refuses_before_anything_is_written(tmp_path, launcher):
    async with open_host(tmp_path, launcher, most_queued=1) as host:
        await host.launch("a")
        status, answer = await host.launch("b", can_wait=False)
        assert (status, answer["error"]["code"]) == (429, "host_full")
        await host.launch("b")
        status, answer = await host.launch("c")
        assert (status, answer["error"]["message"]) == (
            429,
            "the host is full: runs that are up: a; queued: b; launch again when a run has ended",
        )
        assert await host.states() == {"a": "starting", "b": "queued"}
        assert not host.folder.run("c").path.exists()


async def test_a_wrong_job_is_refused_with_the_path_of_the_setting(tmp_path, launcher):
    async with open_host(tmp_path, launcher) as host:
        for settings, path in (
            ({"groups": {"group_size": 0}}, "groups.group_size"),
            ({"groups": {"size": 4}}, "groups.size"),
            (
                {"policies": {"main": {"model": "m", "train": {"learning_rate": "fast"}}}},
                "policies.main.train.learning_rate",
            ),
            ({"broker": {"nodes": 2}}, "broker"),
        ):
            body = {"job": job("math", **settings), "request_id": "x"}
            for route in ("/v1/runs", "/v1/check"):
                status, answer = await host.ask("POST", route, body if route == "/v1/runs" else {"job": body["job"]})
                assert (status, answer["error"]["param"]) == (400, path), answer
        status, answer = await host.ask("POST", "/v1/runs", {"job": job("math"), "request_id": "x", "gpu": 1})
        assert (status, answer["error"]["param"]) == (400, "gpu")
        assert await host.states() == {}
        assert launcher.starts == []


async def test_a_stopped_run_ends_gracefully_and_resumes_with_changed_settings(tmp_path, launcher):
    async with open_host(tmp_path, launcher) as host:
        await host.launch("math")
        host.is_up("math", steps=3)
        process = launcher.alive["math"]
        for _ in range(2):
            assert (await host.ask("POST", "/v1/runs/math/stop", role="operate"))[1]["state"] == "stopping"
        assert process.signals == [signal.SIGTERM], "a repeated request does not cut the checkpoint short"
        await host.ask("POST", "/v1/runs/math/stop", {"now": True})
        assert process.signals == [signal.SIGTERM] * 2
        assert (await host.ask("POST", "/v1/runs/math/resume"))[0] == 409
        await host.end("math")
        assert await host.state("math") == "stopped"
        settings = {"policies.main.train.max_steps": 9, "groups.group_size": 2}
        status, view = await host.ask("POST", "/v1/runs/math/resume", {"settings": settings}, role="operate")
        assert (status, view["state"], view["policies"]["main"]["max_steps"]) == (200, "starting", 9)
        assert "group_size = 2" in host.folder.run("math").job.read_text()


async def test_a_resume_that_is_sent_again_changes_nothing(tmp_path, launcher):
    async with open_host(tmp_path, launcher) as host:
        await host.launch("math")
        await host.launch("code")
        await host.ask("POST", "/v1/runs/math/stop")
        await host.end("math")
        body = {"settings": {"groups.group_size": 2}}
        for _ in range(2):
            _, view = await host.ask("POST", "/v1/runs/math/resume", body)
            assert (view["state"], view["position"]) == ("queued", 1)
        await host.ask("POST", "/v1/runs/code/stop")
        await host.end("code")
        for again in (body, {}):
            assert (await host.ask("POST", "/v1/runs/math/resume", again))[1]["state"] == "starting"
        status, answer = await host.ask("POST", "/v1/runs/math/resume", {"settings": {"groups.group_size": 3}})
        assert (status, answer["error"]["message"]) == (
            409,
            "run 'math' is starting: change it with `set`, or stop it first",
        )
    assert launcher.starts == ["math", "code", "math"]


async def test_a_full_disk_is_reported_and_nothing_is_launched(tmp_path, launcher):
    async with open_host(tmp_path, launcher) as host:
        host.folder.records.rename(tmp_path / "gone")
        status, answer = await host.launch("math")
        assert (status, answer["error"]["code"]) == (503, "host_failed")
        (tmp_path / "gone").rename(host.folder.records)
        assert await host.states() == {}
        assert (await host.launch("math"))[0] == 200


async def test_a_run_resumes_only_with_settings_that_let_it_go_on(tmp_path, launcher):
    async with open_host(tmp_path, launcher) as host:
        body = {"job": job("math", policies={"main": {"model": "m", "train": {"max_steps": 2}}}), "request_id": "x"}
        await host.ask("POST", "/v1/runs", body)
        host.is_up("math", steps=2)
        await host.end("math")
        for settings, status, says in (
            ({}, 409, "has made its last step (main 2): resume it with a larger policies.main.train.max_steps"),
            ({"groups.group_size": 0}, 400, "groups.group_size"),
            ({"run": "other"}, 400, "keeps its name"),
        ):
            answer = await host.ask("POST", "/v1/runs/math/resume", {"settings": settings})
            assert (answer[0], says in answer[1]["error"]["message"]) == (status, True), answer
        assert await host.state("math") == "done"
        assert (await host.ask("POST", "/v1/runs/math/resume", {"settings": {"policies.main.train.max_steps": 4}}))[
            0
        ] == 200
        assert await host.state("math") == "starting"


async def test_a_queued_run_can_be_stopped_and_deleted(tmp_path, launcher):
    async with open_host(tmp_path, launcher) as host:
        await host.launch("a")
        await host.launch("b")
        assert (await host.ask("POST", "/v1/runs/b/stop"))[1]["state"] == "stopped"
        assert (await host.ask("DELETE", "/v1/runs/b"))[0] == 204
        await host.end("a", says="over")
        assert launcher.starts == ["a"]


async def test_a_run_outlives_its_daemon_and_is_found_again(tmp_path, launcher):
    async with open_host(tmp_path, launcher) as host:
        await host.launch("a")
        await host.launch("b")
    assert list(launcher.alive) == ["a"]
    async with open_host(tmp_path, launcher) as host:
        assert await host.states() == {"a": "starting", "b": "queued"}
        await host.end("a", says="over")
        assert await host.states() == {"a": "failed", "b": "starting"}
    assert launcher.starts == ["a", "b"]


async def test_a_run_that_ended_while_no_daemon_served_is_accounted_for(tmp_path, launcher):
    async with open_host(tmp_path, launcher, most_running=3) as host:
        for run in ("done", "failed", "died"):
            await host.launch(run)
            host.is_up(run, steps=1, max_steps=1 if run == "done" else 0)
        with host.folder.log("failed").open("a") as log:
            log.write("swarmq: no such model\n")
    launcher.alive.clear()
    async with open_host(tmp_path, launcher, most_running=3) as host:
        assert await host.states() == {"done": "done", "failed": "failed", "died": "starting"}
    assert launcher.starts == ["done", "failed", "died", "died"]


async def test_a_run_whose_process_dies_is_started_again_but_not_for_ever(tmp_path, launcher):
    async with open_host(tmp_path, launcher) as host:
        await host.launch("math")
        for restarts in range(1, 5):
            launcher.alive.pop("math").end()
            while (await host.ask("GET", "/v1/runs/math"))[1]["restarts"] < restarts:
                pass
        await host.end("math")
        _, view = await host.ask("GET", "/v1/runs/math")
        assert view["state"] == "failed"
        assert "its process died 5 times" in view["detail"]
    assert launcher.starts == ["math"] * 5


async def test_a_run_that_cannot_be_started_fails_with_the_reason_and_makes_room(tmp_path, launcher):
    async with open_host(tmp_path, launcher) as host:
        launcher.fails = "no more processes"
        _, view = await host.launch("math")
        assert (view["state"], view["detail"]) == ("failed", "not started: no more processes")
        launcher.fails = ""
        assert (await host.launch("code"))[1]["state"] == "starting"


async def test_a_change_needs_a_run_that_is_up(tmp_path, launcher):
    async with open_host(tmp_path, launcher) as host:
        await host.launch("math")
        status, answer = await host.ask("POST", "/v1/runs/math/actions", {"action": "pause"})
        assert (status, answer["error"]["message"]) == (409, "run 'math' is starting: pause needs a run that is up")
        status, answer = await host.ask("POST", "/v1/runs/math/actions", {"action": "explode"})
        assert (status, answer["error"]["param"]) == (400, "action")
        assert (await host.ask("POST", "/v1/runs/none/actions", {"action": "pause"}))[0] == 404


@pytest.mark.parametrize(
    ("method", "path", "least"),
    [
        ("GET", "/v1/host", "read"),
        ("GET", "/v1/runs", "read"),
        ("GET", "/v1/runs/math", "read"),
        ("POST", "/v1/check", "operate"),
        ("POST", "/v1/runs", "operate"),
        ("POST", "/v1/runs/math/stop", "operate"),
        ("POST", "/v1/runs/math/resume", "operate"),
        ("POST", "/v1/runs/math/actions", "operate"),
        ("DELETE", "/v1/runs/math", "admin"),
    ],
)
async def test_each_route_needs_its_role(tmp_path, launcher, method, path, least):
    ranks = ("rollout", "read", "operate", "admin")
    async with open_host(tmp_path, launcher) as host:
        for role in ranks:
            status, answer = await host.ask(method, path, role=role)
            assert (status == 403) == (ranks.index(role) < ranks.index(least)), answer
            if status == 403:
                assert answer["error"]["message"] == f"operator 'ann' has the roles {role}; this needs {least}"
        assert (await host.ask(method, path, role=None))[0] == 401


async def test_tokens_of_others_are_refused(tmp_path, launcher, monkeypatch):
    async with open_host(tmp_path, launcher) as host:
        for wrong, says in (
            (token("admin", root=b"x" * 32), "signature is wrong"),
            (token("admin", run="math"), "is for run 'math', not for '@host'"),
            ("nonsense", "malformed: `swarmq host token` makes one"),
        ):
            monkeypatch.setattr("support.host.token", lambda _role, wrong=wrong: wrong)
            status, answer = await host.ask("GET", "/v1/runs")
            assert (status, says in answer["error"]["message"]) == (401, True), answer


async def test_the_api_describes_itself(tmp_path, launcher):
    async with open_host(tmp_path, launcher) as host:
        _, schema = await host.ask("GET", "/schema/openapi.json", role=None)
    described = {one["operationId"] for path in schema["paths"].values() for one in path.values()}
    assert {"launchRun", "stopRun", "resumeRun", "showRun", "listRuns", "deleteRun", "checkJob"} <= described
    assert "404" in schema["paths"]["/v1/runs/{run}/stop"]["post"]["responses"]
