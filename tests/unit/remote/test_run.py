"""`swarmq.launch` and the run that it returns, against a daemon with scripted processes."""

from __future__ import annotations

import asyncio
import functools
import time

import msgspec
import pytest
from litestar import Litestar, Request, Response, post

from support.host import ScriptedLauncher, job, open_host, token
from support.proxy import served
from swarmq import HostClient, RemoteRun, SwarmJob, SwarmTask, launch
from swarmq.config import GroupSettings, Policy
from swarmq.errors import ConfigError, HostError
from swarmq.remote.records import TasksRequest


def in_thread(function, *args, **kwargs):
    return asyncio.to_thread(functools.partial(function, *args, **kwargs))


@pytest.fixture
async def host(tmp_path):
    async with open_host(tmp_path, ScriptedLauncher(), most_running=2) as opened:
        yield opened


@pytest.fixture
def client(host):
    return HostClient(host.url, token=token("admin"), patience_s=0.2)


async def test_a_job_made_in_python_is_launched_once_and_waited_for(host, client):
    made = SwarmJob(run="math", policies={"main": Policy(model="m")}, groups=GroupSettings(group_size=4))
    run = await in_thread(launch, made, host=client, request_id="once")
    again = await in_thread(launch, msgspec.to_builtins(made), host=host.url, token=token("operate"), request_id="once")
    assert (run.name, again.name, host.launcher.starts) == ("math", "math", ["math"])
    waiting = asyncio.create_task(in_thread(run.wait, "up"))
    host.is_up("math", steps=2, max_steps=2)
    assert (await waiting).policies["main"].step == 2
    waiting = asyncio.create_task(in_thread(run.wait))
    await host.end("math")
    assert (await waiting).state == "done"
    assert [one.run for one in await in_thread(client.runs)] == ["math"]


async def test_a_job_file_is_launched_too_and_a_job_can_be_checked_alone(host, client, tmp_path):
    (tmp_path / "job.toml").write_text(SwarmJob.build(job("code")).to_toml())
    plan = await in_thread(client.check, job("code"))
    assert (plan.run, plan.lines) == ("code", ("placement of main: here",))
    assert (await in_thread(client.show)).running == ()
    assert (await in_thread(launch, tmp_path / "job.toml", host=client)).name == "code"


async def test_wrong_settings_are_refused_before_anything_is_sent(client):
    for wrong in (
        SwarmJob(run="math", policies={"main": Policy(model="m")}, groups=GroupSettings(deadline_s=-1)),
        job("math", groups={"deadline_s": -1}),
    ):
        with pytest.raises(ConfigError, match=r"job: groups.deadline_s: Expected `float` > 0.0"):
            await in_thread(launch, wrong, host=client)
    assert await in_thread(client.runs) == []


async def test_what_the_host_refuses_is_an_error_with_its_reason(host, client):
    await in_thread(launch, job("math"), host=client)
    with pytest.raises(HostError, match=f"^{host.url}: run: 'math' is a run of this host already") as caught:
        await in_thread(launch, job("math"), host=client)
    assert (caught.value.status, caught.value.code, caught.value.param) == (409, "run_exists", "run")
    reader = RemoteRun(HostClient(host.url, token=token("read")), "math")
    assert (await in_thread(reader.status)).state == "starting"
    with pytest.raises(HostError, match="has the roles read; this needs operate") as caught:
        await in_thread(reader.stop)
    assert caught.value.status == 403
    with pytest.raises(HostError, match="there is no run 'none'"):
        await in_thread(RemoteRun(client, "none").status)


async def test_waiting_ends_with_the_run_whatever_its_state(host, client):
    run = await in_thread(launch, job("math"), host=client)
    with pytest.raises(HostError, match=r"is starting, and not done after 0.1 s"):
        await in_thread(run.wait, timeout_s=0.1)
    waiting = asyncio.create_task(in_thread(run.wait, "up"))
    await host.end("math", says="the model is broken")
    with pytest.raises(HostError, match="is failed and will not be up: the model is broken"):
        await waiting


async def test_a_stopped_run_is_resumed_and_deleted(host, client):
    run = await in_thread(launch, job("math"), host=client)
    host.is_up("math", steps=1)
    assert (await in_thread(run.stop)).state == "stopping"
    await host.end("math")
    await in_thread(run.wait, "stopped")
    view = await in_thread(run.resume, {"policies.main.train.max_steps": 3})
    assert (view.state, view.policies["main"].max_steps) == ("starting", 3)
    await in_thread(run.stop)
    await host.end("math")
    await in_thread(run.delete)
    assert await in_thread(client.runs) == []


async def test_logs_are_read_to_the_end_and_followed_until_the_run_has_ended(host, client):
    run = await in_thread(launch, job("math"), host=client)
    log = host.folder.log("math")
    log.write_text("one\ntwo\nthree\n")
    assert list(await in_thread(lambda: list(run.logs(lines=2)))) == ["two", "three"]
    (log.parent / "collector.log").write_text("{}\n")
    assert await in_thread(run.list_logs) == ["collector.log", "up.log"]
    with pytest.raises(HostError, match="the run has no log 'secret'"):
        await in_thread(lambda: list(run.logs("secret")))
    followed = run.logs(lines=1, follow=True)
    assert await in_thread(next, followed) == "three"
    await host.end("math", says="over")
    assert await in_thread(list, followed) == ["swarmq: over"]


async def test_files_of_the_record_are_read_in_pieces_and_nothing_else(host, client, tmp_path, monkeypatch):
    monkeypatch.setattr("swarmq.host_daemon.files.PIECE_BYTES", 5)
    run = await in_thread(launch, job("math"), host=client)
    folder = host.folder.run("math")
    checkpoint = folder.checkpoints("main") / "step-00000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "model.safetensors").write_bytes(b"0123456789ab")
    (checkpoint / "empty").write_bytes(b"")
    (folder.checkpoints("main") / "stolen").symlink_to(host.folder.path)
    (checkpoint / "secret").symlink_to(folder.job)
    for name in ("secret", "invite", "resolved.toml", "clients.json"):
        (folder.path / name).write_text("secret")
    (folder.path / "broker").mkdir()
    (folder.path / "broker" / "node.json").write_text("secret")
    assert {one.path: one.size_bytes for one in await in_thread(run.files, "main")} == {
        "main/checkpoints/step-00000001/empty": 0,
        "main/checkpoints/step-00000001/model.safetensors": 12,
    }
    copies = await in_thread(run.download, "main/checkpoints/step-00000001", tmp_path / "copy")
    assert sorted(path.name for path in copies) == ["empty", "model.safetensors"]
    assert (tmp_path / "copy" / "model.safetensors").read_bytes() == b"0123456789ab"
    (tmp_path / "copy" / "again.part").write_bytes(b"0123456")
    await in_thread(run.download, "main/checkpoints/step-00000001/model.safetensors", tmp_path / "copy" / "again")
    assert (tmp_path / "copy" / "again").read_bytes() == b"0123456789ab"
    for path in (
        "secret",
        "job.toml",
        "broker/node.json",
        "main/checkpoints/../../secret",
        "main/checkpoints/%2e%2e/%2e%2e/secret",
        "main/checkpoints/step-00000001/secret",
        "main/checkpoints/stolen/.host/secret",
        "../.host/secret",
        "/etc/passwd",
        "logs",
    ):
        status, _ = await host.ask("GET", f"/v1/runs/math/files/{path}")
        assert status == 404, path


async def test_a_daemon_that_is_away_for_a_moment_is_waited_for(tmp_path):
    launcher = ScriptedLauncher()
    async with open_host(tmp_path, launcher) as first:
        port = first.url.rpartition(":")[2]
        client = HostClient(first.url, token=token("admin"), patience_s=60.0)
        run = await in_thread(launch, job("math"), host=client)
    asked = asyncio.create_task(in_thread(run.status))
    await asyncio.sleep(0.05)
    async with open_host(tmp_path, launcher, port=int(port)):
        assert (await asked).state == "starting"
    with pytest.raises(HostError, match="cannot be reached") as caught:
        await in_thread(HostClient(first.url, token="t", patience_s=0.0).runs)
    assert caught.value.status == 0


async def test_a_restarted_feed_is_the_same_one_when_it_is_sent_again_and_a_new_one_for_each_call():
    bodies = []

    @post("/v1/runs/math/tasks")
    async def answer(request: Request) -> Response[bytes]:
        bodies.append(msgspec.json.decode(await request.body(), type=TasksRequest))
        is_fed = len(bodies) > 1
        return Response(b'{"kind": "default", "fed": 1}' if is_fed else b"", status_code=200 if is_fed else 503)

    async with served(Litestar([answer], openapi_config=None)) as url:
        run = RemoteRun(HostClient(url, token="t", patience_s=60.0), "math")
        for restart in (True, True, False):
            await in_thread(run.feed, [SwarmTask("a", payload={})], source="data", restart=restart)
    first, again, second, third = (body.restart for body in bodies)
    assert first == again != second
    assert (bool(first), bool(second), third) == (True, True, "")


async def test_an_invalid_address_is_refused():
    for address in ("gpu-box", "ftp://gpu-box", "https://", ""):
        with pytest.raises(ConfigError, match="write it as http://HOST:PORT, https://HOST:PORT or ssh://HOST"):
            HostClient(address)


async def test_a_slow_answer_does_not_stop_the_daemon(host, client):
    run = await in_thread(launch, job("math"), host=client)
    began = time.monotonic()
    waiting = asyncio.create_task(in_thread(client.ask, "GET", "/v1/runs/math", dict, unlike="starting", wait_s=1.0))
    await in_thread(run.status)
    assert not waiting.done()
    await waiting
    assert time.monotonic() - began >= 1.0
