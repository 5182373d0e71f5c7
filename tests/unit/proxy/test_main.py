"""What the process checks before it serves."""

import asyncio
import socket
from types import SimpleNamespace

import pytest
import structlog
import uvloop

from swarmq.config import ProxySettings, SwarmJob
from swarmq.errors import ConfigError
from swarmq.proxy import main
from swarmq.proxy.main import serve
from swarmq.registries.proxies import ProxyRegistry
from swarmq.runtime.processes import listen


def test_small_packets_are_sent_at_once():
    with listen("127.0.0.1", 0, backlog=8, setting="proxy.port") as listener:
        assert listener.proto == socket.IPPROTO_TCP, "asyncio leaves Nagle's algorithm on otherwise: 40 ms an answer"


def test_a_taken_port_is_named():
    with listen("127.0.0.1", 0, backlog=8, setting="proxy.port") as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"proxy\.port: 127\.0\.0\.1:{port}"):
            listen("127.0.0.1", port, backlog=8, setting="proxy.port")


@pytest.mark.parametrize(("files", "warned"), [(1024, True), (65_536, False)])
def test_a_host_that_allows_too_few_open_files_is_told(files, warned, monkeypatch):
    monkeypatch.setattr(main, "raise_file_limit", lambda: files)
    with structlog.testing.capture_logs() as told:
        most = main._most_connections(ProxySettings())
    assert most < files / 2
    assert [f"may open {files} files" in line["text"] for line in told] == [True] * warned


@pytest.mark.parametrize(
    ("broker", "words"), [({}, r"broker\.url"), ({"url": "amqp://nobody"}, r"policies\.main\.engine\.urls")]
)
async def test_a_job_without_addresses_is_refused(broker, words, monkeypatch):
    monkeypatch.delenv("SWARMQ_AMQP_URL", raising=False)
    job = SwarmJob.build({"run": "r", "policies": {"main": {"model": "x"}}, "broker": broker})
    with pytest.raises(ConfigError, match=words):
        await serve(job)


async def test_a_proxy_that_leaves_serves_on_for_a_while_however_long_nobody_has_asked(tmp_path):
    now = 0.0
    membership = main.Membership(clock=lambda: now)
    server = SimpleNamespace(server_state=SimpleNamespace(tasks=set()), should_exit=False)
    proxies = ProxyRegistry(tmp_path / "proxies.json")
    listed = main._keep_listed(proxies, "http://h/v1")
    staying = asyncio.create_task(main._keep_membership(server, membership, listed, check_s=0.0))
    now = 1000.0
    membership.leaving.set()
    for _ in range(10):
        await asyncio.sleep(0)
    assert (server.should_exit, proxies.urls()) == (False, ())
    now += main.LEAVE_S
    await staying
    assert server.should_exit


def test_the_loop_it_runs_on_streams_and_notices_who_hangs_up(stages):
    async def scenario():
        async with stages(request_timeout_s=60.0) as stage:
            stage.engine.say("hello")
            assert (await stage.stream({"role": "user", "content": "hi"}))[-1] == "[DONE]"
            stage.engine.sampling_began.clear()
            stage.engine.say("abcd", gate=asyncio.Event())
            headers = {"authorization": f"Bearer {stage.key()}"}
            body = {"model": "main", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
            post = stage.http.post(f"{stage.url}/v1/chat/completions", json=body, headers=headers)
            (await post.__aenter__()).close()
            await stage.engine.cancelled.wait()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())
