"""Alerts: to whom, how often, and what never leaves the host."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from swarmq.config import SwarmJob
from swarmq.errors import ConfigError
from swarmq.messages import Event, EventName
from swarmq.observe.alerts import Alert, Alerts, check_alerts, hide_secrets
from swarmq.observe.recorder import Intervals, record_run
from swarmq.runtime.logs import redirect_to
from swarmq.testing import MemoryBroker

QUICK = Intervals(board_s=0.01, sample_s=0.01, check_s=0.01, silent_s=60.0, retry_s=0.01)


def job(folder: Path, **alerts: Any) -> SwarmJob:
    policies = {"main": {"model": "m", "train": {"max_steps": 3}}}
    made = SwarmJob.build({"run": "r", "folder": str(folder), "policies": policies, "alerts": alerts})
    made.run_folder.path.mkdir(exist_ok=True)
    return made


def event(name: EventName, source: str = "collector", **fields: Any) -> Event:
    return Event(run="r", source=source, name=name, at=1.0, fields=fields)


async def until(true: Callable[[], Any]) -> Any:
    async with asyncio.timeout(30):
        while not (found := true()):  # noqa: ASYNC110 - files have no events
            await asyncio.sleep(0.005)
    return found


@contextlib.asynccontextmanager
async def delivering(alerts: Alerts) -> AsyncIterator[list[str]]:
    """Deliver alerts inside the block; yields the log lines."""
    lines: list[str] = []
    with redirect_to(lines.append):
        task = asyncio.ensure_future(alerts.deliver())
        try:
            yield lines
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


class Server(ThreadingHTTPServer):
    """A chat server that may refuse, or hang."""

    daemon_threads = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[bytes] = []
        self.status = 200
        self.go_on = threading.Event()
        self.go_on.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/hook"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.go_on.wait(30)
        self.server.bodies.append(body)
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.go_on.set()
    server.shutdown()
    thread.join()
    server.server_close()


def script(folder: Path, text: str) -> str:
    path = folder / "alert.sh"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


async def test_a_command_gets_the_alert_as_json_and_nothing_of_the_environment_of_swarmq(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWARMQ_ENGINE_SECRET", "hidden")
    out = tmp_path / "out"
    command = script(
        tmp_path, f'cat > "{out}.json"; env > "{out}.part"; echo "$@" >> "{out}.part"; mv {out}.part {out}'
    )
    alerts = Alerts(job(tmp_path, command=f"{command} 'two words'"))
    async with delivering(alerts):
        alerts.handle_event(event("step", "learner.main", version=2))
        alerts.handle_event(event("warning", text="no clients", kind="stall"))
        await until(out.exists)
    alert = msgspec.json.decode((tmp_path / "out.json").read_bytes(), type=Alert)
    assert (alert.run, alert.kind, alert.source, alert.message) == ("r", "stall", "collector", "no clients")
    assert alert.steps == {"main": 2}
    environment = out.read_text()
    assert "SWARMQ_ALERT_KIND=stall\n" in environment
    assert environment.endswith("two words\n")
    assert "hidden" not in environment


async def test_a_url_gets_the_alert_by_post(tmp_path: Path, server: Server) -> None:
    alerts = Alerts(job(tmp_path, url=server.url))
    async with delivering(alerts):
        alerts.handle_event(event("warning", "learner.main", text="gradient is not finite"))
        await until(lambda: server.bodies)
    alert = msgspec.json.decode(server.bodies[0])
    assert alert["text"] == "swarmq r: warning from learner.main: gradient is not finite"


async def test_a_wording_is_sent_once_in_an_interval_with_the_number_of_those_between(
    tmp_path: Path, server: Server
) -> None:
    now = 1000.0
    alerts = Alerts(job(tmp_path, url=server.url, interval_s=60), clock=lambda: now)
    async with delivering(alerts):
        for waited in (10, 20, 30):
            alerts.handle_event(event("warning", text=f"group 7 waits {waited} s"))
        alerts.handle_event(event("warning", text="another thing"))
        await until(lambda: len(server.bodies) == 2)
        now += 61
        alerts.handle_event(event("warning", text="group 8 waits 90 s"))
        await until(lambda: len(server.bodies) == 3)
    assert [msgspec.json.decode(body)["left_out"] for body in server.bodies] == [0, 0, 2]


async def test_the_last_step_is_told_once_and_again_when_there_are_more(tmp_path: Path, server: Server) -> None:
    alerts = Alerts(job(tmp_path, url=server.url))
    changes = [{"path": "policies.main.train.max_steps", "before": 3, "base": 3, "value": 5, "number": 1}]
    async with delivering(alerts):
        for version in (2, 3, 3):
            alerts.handle_event(event("step", "learner.main", version=version, reward=0.5))
        assert alerts.has_ended("main")
        alerts.handle_event(event("state", changes=changes))
        for version in (4, 5):
            alerts.handle_event(event("step", "learner.main", version=version))
        await until(lambda: len(server.bodies) == 2)
    messages = [msgspec.json.decode(body)["message"] for body in server.bodies]
    assert messages == [
        "policy main has made its last step (3, reward 0.500)",
        "policy main has made its last step (5)",
    ]


@pytest.mark.parametrize("flaw", ["500", "hangs", "away"])
async def test_a_server_that_fails_costs_one_warning_and_holds_nobody_up(
    tmp_path: Path, server: Server, flaw: str
) -> None:
    if flaw == "500":
        server.status = 500
    elif flaw == "hangs":
        server.go_on.clear()
    url = "http://127.0.0.1:9/" if flaw == "away" else server.url
    alerts = Alerts(job(tmp_path, url=url), delivery_s=0.2)
    async with delivering(alerts) as lines:
        began = time.monotonic()
        for text in ("one", "two", "three"):
            alerts.handle_event(event("warning", text=text))
        assert time.monotonic() - began < 0.1
        await until(lambda: lines)
        await asyncio.sleep(0.5)
        assert len(lines) == 1
        assert lines[0].startswith("warning: alert not delivered: setting alerts.url")


@pytest.mark.parametrize(("text", "flaw"), [("exit 3", "status 3"), ("sleep 60", "longer than")])
async def test_a_command_that_fails_or_hangs_costs_one_warning(tmp_path: Path, text: str, flaw: str) -> None:
    alerts = Alerts(job(tmp_path, command=script(tmp_path, text)), delivery_s=0.3)
    async with delivering(alerts) as lines:
        alerts.handle_event(event("warning", text="one"))
        alerts.handle_event(event("warning", text="two"))
        assert flaw in await until(lambda: lines and lines[0])
        await asyncio.sleep(0.5)
        assert len(lines) == 1


async def test_alerts_beyond_the_queue_are_left_out(tmp_path: Path) -> None:
    alerts = Alerts(job(tmp_path, url="http://127.0.0.1:9/"))
    for letter in range(200):
        alerts.handle_event(event("warning", text=f"warning {chr(64 + letter)}"))
    assert alerts._waiting.qsize() == 64


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("amqp://swarmq:pass@host:5672/ is away", "amqp://***@host:5672/ is away"),
        ("header Authorization: Bearer abc.def", "header Authorization: Bearer ***"),
        ("key sk-12345678abc refused", "key *** refused"),
        ("mail to me@example.org at https://host/x", "mail to me@example.org at https://host/x"),
    ],
)
def test_passwords_and_keys_are_cut_out(text: str, hidden: str) -> None:
    assert hide_secrets(text) == hidden


def test_a_command_that_is_not_there_is_refused_before_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="alerts.command: there is no program 'no-such-program'"):
        check_alerts(job(tmp_path, command="no-such-program --x").alerts)
    check_alerts(job(tmp_path, command="sh -c true").alerts)


@pytest.mark.parametrize(
    ("flaw", "text"),
    [
        ({"command": "echo 'open"}, "No closing quotation"),
        ({"command": "  "}, "no program is named"),
        ({"url": "ftp://x/"}, "http:// or https://"),
        ({"url": "https://"}, "http:// or https://"),
        ({"interval_s": 0}, "interval_s"),
        ({"programme": "x"}, "programme"),
    ],
)
def test_settings_that_cannot_work_are_named(tmp_path: Path, flaw: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        job(tmp_path, **flaw)


async def test_the_recorder_sends_alerts_and_one_when_the_run_is_stopped(tmp_path: Path, server: Server) -> None:
    settings, broker = job(tmp_path, url=server.url), MemoryBroker()
    async with record_run(settings, broker, intervals=QUICK):
        await until(settings.run_folder.board.exists)
        await broker.emit(event("warning", text="look"))
        await until(lambda: server.bodies)
    messages = [msgspec.json.decode(body)["message"] for body in server.bodies]
    assert messages == ["look", "the recording ends: the run is being stopped"]


async def test_an_error_that_ends_the_run_is_told(tmp_path: Path, server: Server) -> None:
    settings, broker = job(tmp_path, url=server.url), MemoryBroker()

    async def run() -> None:
        async with record_run(settings, broker, intervals=QUICK):
            await until(settings.run_folder.board.exists)
            raise RuntimeError("no GPU")

    with pytest.raises(ExceptionGroup):
        await run()
    assert "no GPU" in msgspec.json.decode(server.bodies[0])["message"]


async def test_a_collector_that_falls_silent_is_told(tmp_path: Path, server: Server) -> None:
    settings, broker = job(tmp_path, url=server.url), MemoryBroker()
    intervals = msgspec.structs.replace(QUICK, silent_s=0.05)
    async with record_run(settings, broker, intervals=intervals):
        await until(settings.run_folder.board.exists)
        await broker.emit(event("state", begun=1))
        body = await until(lambda: server.bodies and server.bodies[0])
    assert "collector has been silent for" in msgspec.json.decode(body)["message"]
