"""A proxy on another host serves once every policy has an engine that it can reach."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from structlog.testing import capture_logs

from swarmq.proxy.main import _wait_for_engines

LOCAL, REMOTE = "http://127.0.0.1:8000", "http://gpu2:8000"


class Known:
    """A membership of which this host reaches only what is not on a loopback."""

    def __init__(self, engines: dict[str, tuple[str, ...]]) -> None:
        self.members = SimpleNamespace(engines=engines)

    def urls(self) -> dict[str, tuple[str, ...]]:
        return {name: tuple(url for url in urls if url != LOCAL) for name, urls in self.members.engines.items()}


async def test_it_waits_for_the_engine_that_joins_last_and_says_once_what_it_waits_for():
    known = Known({"main": (LOCAL,), "judge": (REMOTE,)})
    with capture_logs() as logs:
        waiting = asyncio.create_task(_wait_for_engines(known, check_s=0.0))  # type: ignore[arg-type]
        for _ in range(20):
            await asyncio.sleep(0)
        assert not waiting.done()
        known.members.engines = {"main": (LOCAL, REMOTE), "judge": (REMOTE,)}
        assert await asyncio.wait_for(waiting, 60) == {"main": (REMOTE,), "judge": (REMOTE,)}
    (line,) = logs
    assert (line["event"], line["policy"], line["engines"]) == ("waiting_for_engine", "main", (LOCAL,))
    assert "swarmq engine start" in line["action"]


async def test_engines_that_are_there_are_used_at_once():
    assert await _wait_for_engines(Known({"main": (REMOTE,)})) == {"main": (REMOTE,)}  # type: ignore[arg-type]
