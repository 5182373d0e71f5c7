"""What a run folder has of a run that is up, for those who look later or from elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from swarmq.config import SwarmJob
from swarmq.messages import Event, EventName
from swarmq.observe import recorder
from swarmq.observe.board import Board
from swarmq.observe.curves import read_events
from swarmq.observe.monitor import follow
from swarmq.observe.recorder import Intervals, QueueAges, Sources, describe_board, record_run, thin_lines
from swarmq.runtime.logs import redirect_to
from swarmq.testing import MemoryBroker

QUICK = Intervals(board_s=0.01, sample_s=0.01, check_s=0.01, retry_s=0.01)


def job(folder: Path, **fields: Any) -> SwarmJob:
    made = SwarmJob.build({"run": "r", "folder": str(folder), "policies": {"main": {"model": "m", **fields}}})
    made.run_folder.path.mkdir(exist_ok=True)
    return made


def event(name: EventName, at: float, source: str = "collector", **fields: Any) -> Event:
    return Event(run="r", source=source, name=name, at=at, fields=fields)


async def until(true: Callable[[], Any]) -> Any:
    async with asyncio.timeout(30):
        while not (found := true()):  # noqa: ASYNC110 - files have no events
            await asyncio.sleep(0.005)
    return found


def read_json(path: Path) -> Any:
    return msgspec.json.decode(path.read_bytes()) if path.exists() and path.stat().st_size else None


def read_samples(settings: SwarmJob) -> list[Any]:
    path = settings.run_folder.samples
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines() if line] if path.exists() else []


@contextlib.asynccontextmanager
async def recorded(settings: SwarmJob, broker: MemoryBroker) -> AsyncIterator[list[str]]:
    """Record a run; yields the log lines, once the recorder listens."""
    lines: list[str] = []
    with redirect_to(lines.append):
        async with record_run(settings, broker, intervals=QUICK):
            await until(settings.run_folder.board.exists)
            yield lines


async def test_the_board_in_the_folder_has_parts_with_their_time_queues_and_the_broker(tmp_path: Path) -> None:
    settings, broker = job(tmp_path), MemoryBroker()
    await broker.declare("r", policies=["main"], kinds=["default"])
    async with recorded(settings, broker):
        await broker.emit(event("state", 5.0, begun=3, dropped={"stale": 1}, open=2))
        board = await until(lambda: (read := read_json(settings.run_folder.board))["parts"] and read["queues"] and read)
        assert board["recorder"]["is_recording"]
    assert board["parts"]["collector"]["at"] == 5.0
    assert board["parts"]["collector"]["begun"] == 3
    assert board["broker"]["state"] == "ok"
    assert board["queue_details"]["swarmq.r.in"] == {
        "ready": 0, "consumers": 0, "oldest_s": None, "in_per_s": None, "out_per_s": None
    }  # fmt: skip
    assert not read_json(settings.run_folder.board)["recorder"]["is_recording"]


async def test_samples_are_short_lines_with_depths_and_counts(tmp_path: Path) -> None:
    settings, broker = job(tmp_path), MemoryBroker()
    await broker.declare("r", policies=["main"], kinds=["default"])
    async with recorded(settings, broker):
        await broker.emit(event("state", 5.0, begun=3, dropped={"stale": 1, "equal_rewards": 4}, open=2))
        await broker.emit(event("state", 5.0, "proxy.0", open_calls=7, sampled_tokens=10))
        await broker.emit(event("step", 6.0, "learner.main", version=2))
        sample = await until(lambda: next((one for one in read_samples(settings) if one["versions"]), None))
    assert sample["counts"] == {"begun": 3, "open": 2, "dropped": 5}
    assert sample["open_calls"] == {"proxy.0": 7}
    assert sample["versions"] == {"main": 2}
    assert sample["queues"]["in"] == 0
    assert len(msgspec.json.encode(sample)) < 1000


async def test_warnings_are_kept_over_restarts_and_what_parts_say_of_themselves_or_record_is_not(
    tmp_path: Path,
) -> None:
    settings, broker = job(tmp_path), MemoryBroker()
    path = settings.run_folder.events
    warnings = [event("warning", 1.0, text="one"), event("warning", 2.0, text="two")]
    async with recorded(settings, broker):
        for one in (event("state", 1.0), event("episode", 1.0), event("step", 1.0, version=1), warnings[0]):
            await broker.emit(one)
        await until(lambda: path.exists() and list(read_events(path)))
    with path.open("ab") as file:
        file.write(b'{"type": "event", "ru')  # cut by a crash
    settings.run_folder.board.unlink()
    async with recorded(settings, broker):
        await broker.emit(warnings[1])
        await until(lambda: len(list(read_events(path))) == 2)
    assert list(read_events(path)) == warnings


async def test_where_nothing_can_be_written_recording_pauses_with_one_warning_and_resumes(tmp_path: Path) -> None:
    settings, broker = job(tmp_path), MemoryBroker()
    settings.run_folder.samples.mkdir()  # fails as a full disk does: with an OSError
    async with recorded(settings, broker) as lines:
        await until(lambda: any("recording paused" in line for line in lines))
        await asyncio.sleep(0.1)
        assert len([line for line in lines if "recording paused" in line]) == 1
        settings.run_folder.samples.rmdir()
        await until(lambda: read_samples(settings) and any("recording resumed" in line for line in lines))


async def test_a_second_recorder_yields_and_takes_over_when_the_first_ends(tmp_path: Path) -> None:
    settings, broker = job(tmp_path), MemoryBroker()
    path = settings.run_folder.events
    lines: list[str] = []
    with redirect_to(lines.append):
        async with contextlib.AsyncExitStack() as second:
            async with record_run(settings, broker, intervals=QUICK):
                await until(settings.run_folder.board.exists)
                await second.enter_async_context(record_run(settings, broker, intervals=QUICK))
                await until(lambda: any("recorded elsewhere" in line for line in lines))
                await broker.emit(event("warning", 1.0, text="once"))
                await until(lambda: path.exists() and list(read_events(path)))
            settings.run_folder.board.unlink()
            await until(settings.run_folder.board.exists)
            await broker.emit(event("warning", 2.0, text="again"))
            await until(lambda: len(list(read_events(path))) > 1)
    assert [one.fields["text"] for one in read_events(path)] == ["once", "again"]


async def test_a_bug_of_the_recorder_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise TypeError("a bug")

    monkeypatch.setattr(recorder, "describe_board", fail)
    lines: list[str] = []
    with redirect_to(lines.append):
        async with record_run(job(tmp_path), MemoryBroker(), intervals=QUICK):
            await until(lambda: any("recording failed" in line for line in lines))


async def test_who_follows_the_run_anyway_records_its_board_without_writing_events_twice(tmp_path: Path) -> None:
    settings, broker = job(tmp_path), MemoryBroker()
    path = settings.run_folder.events
    async with (
        follow(settings, broker, record=path) as follower,
        record_run(settings, broker, follower=follower, intervals=QUICK),
    ):
        await broker.emit(event("state", 1.0, begun=1))
        await until(lambda: (read_json(settings.run_folder.board) or {}).get("parts"))
    assert len(list(read_events(path))) == 1


def test_a_broker_without_depths_is_unknown_then_ok_then_blocked_or_away(tmp_path: Path) -> None:
    board, sources = Board(run="r"), Sources(job(tmp_path))

    def state(now: float) -> str:
        return describe_board(board, sources, now=now, away_s=15.0)["broker"]["state"]

    assert state(100.0) == "unknown"
    board.depths_at = 100.0
    assert state(101.0) == "ok"
    board.blocked = True
    assert state(101.0) == "blocked"
    assert state(116.0) == "away"


def test_the_oldest_message_of_a_queue_is_as_old_as_its_number() -> None:
    ages = QueueAges()
    assert ages.observe("q", published=0, ready=0, at=0) == 0
    assert ages.observe("q", published=5, ready=5, at=10) == 0
    assert ages.observe("q", published=9, ready=9, at=20) == 10
    assert ages.observe("q", published=9, ready=4, at=30) == 10, "five are taken: the oldest came at 20"
    assert ages.observe("q", published=9, ready=0, at=40) == 0
    assert ages.observe("q", published=10, ready=1, at=50) == 0


def test_a_message_that_was_there_before_has_no_age() -> None:
    ages = QueueAges()
    assert ages.observe("q", published=7, ready=3, at=0) is None
    assert ages.observe("q", published=9, ready=3, at=10) is None
    assert ages.observe("q", published=9, ready=2, at=20) == 10
    assert ages.observe("q", published=1, ready=3, at=30) is None, "the broker was started again"


def test_samples_beyond_their_size_are_thinned(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_bytes(b"".join(b"%d\n" % number for number in range(10)))
    thin_lines(path, 20)
    assert path.read_bytes().split() == [b"0", b"1", b"2", b"3", b"4", b"5", b"6", b"7", b"8", b"9"]
    thin_lines(path, 19)
    assert path.read_bytes().split() == [b"1", b"3", b"5", b"7", b"9"]


class Engine(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        allowed = self.headers.get("authorization") == "Bearer s3cret" and self.path == "/metrics"
        self.send_response(200 if allowed else 401)
        self.end_headers()
        if allowed:
            self.wfile.write(
                b'vllm:num_requests_running{engine="0",model_name="m"} 3.0\n'
                b'vllm:num_requests_waiting{engine="0"} 2.0\nvllm:kv_cache_usage_perc{engine="0"} 0.25\n'
            )

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def engine_url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


async def test_engines_are_asked_for_their_load_with_the_secret(
    tmp_path: Path, engine_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWARMQ_ENGINE_SECRET", "s3cret")
    sources = Sources(job(tmp_path, engine={"urls": [engine_url, "http://127.0.0.1:9"]}))
    await sources.read()
    up, down = sources.engines[engine_url], sources.engines["http://127.0.0.1:9"]
    assert (up["state"], up["running"], up["waiting"], up["kv"]) == ("up", 3, 2, 0.25)
    assert (down["state"], down["running"]) == ("down", None)
