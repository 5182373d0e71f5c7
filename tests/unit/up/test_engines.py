"""An engine or a broker that dies is started again, and people are told why; one that cannot be kept running ends the run."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest

from swarmq.errors import BrokerError, EngineError
from swarmq.up import supervision


class Mortal:
    """Dies as often as there are `starts`; those that say no fail to begin with."""

    log_path = Path("/dev/null")

    def __init__(self, *starts: bool, kill_reason: str = "") -> None:
        self.starts, self.kill_reason = list(starts), kill_reason

        self.lives = asyncio.Event()

    async def wait(self) -> int:
        if not self.starts:
            self.lives.set()
            await asyncio.Event().wait()
        return -9

    async def restart(self) -> None:
        if not self.starts.pop(0):
            raise EngineError("vLLM for m ended with status 1 while it started; the end of the.log:\nno free memory")
        self.kill_reason = ""


class MortalBroker(Mortal):
    folder = Path("/tmp/broker")

    async def stop(self) -> None:
        pass

    async def start(self) -> None:
        if not self.starts.pop(0):
            raise BrokerError("RabbitMQ is not up after 60 s")


async def kept(mortal: Mortal, *, death_window_s: float = 120.0) -> list[str]:
    """Keep a part running until it stays alive, and return the warnings."""
    within = supervision.RestartTimes(death_window_s=death_window_s, backoff_s=(0.0,) * supervision.MAX_DEATHS)
    warnings: list[str] = []
    if isinstance(mortal, MortalBroker):
        keeper = asyncio.create_task(supervision.keep_broker(mortal, warnings.append, times=within))
    else:
        keeper = asyncio.create_task(supervision.keep_engine("main.0", mortal, warnings.append, times=within))
    await asyncio.wait([keeper, lives := asyncio.create_task(mortal.lives.wait())], return_when="FIRST_COMPLETED")
    if keeper.done():
        lives.cancel()
        await keeper
    keeper.cancel()
    return warnings


async def test_an_engine_that_its_learner_gave_up_is_started_again_and_says_so() -> None:
    told = await kept(Mortal(True, kill_reason="was condemned by its learner (updating-3-restart)"))
    assert told == ["engine main.0 was condemned by its learner (updating-3-restart); restarting"]


async def test_an_engine_that_finds_no_memory_is_tried_again_while_its_learner_may_have_it() -> None:
    told = await kept(Mortal(False, False, True))
    assert told[1] == (
        "engine main.0 does not start (vLLM for m ended with status 1 while it started); next attempt in 0 s"
    )
    assert [line.split()[2] for line in told] == ["died", "does", "died", "does", "died"]


async def test_an_engine_that_keeps_dying_ends_the_run() -> None:
    with pytest.raises(supervision.DaemonFailedError, match="engine main.0 died 5 times"):
        await kept(Mortal(*[True] * 9))


async def test_an_engine_that_never_starts_ends_the_run_however_long_it_tries() -> None:
    with pytest.raises(EngineError, match="no free memory"):
        await kept(Mortal(*[False] * 9), death_window_s=0.0)


async def test_a_broker_that_does_not_start_at_once_is_tried_again_in_the_same_words() -> None:
    assert await kept(MortalBroker(False, True)) == [
        "the broker died with status -9; restarting",
        "the broker does not start (RabbitMQ is not up after 60 s); next attempt in 0 s",
        "the broker died with status -9; restarting",
    ]


async def test_a_broker_that_never_starts_ends_the_run() -> None:
    with pytest.raises(supervision.DaemonFailedError, match="the broker died 5 times; its logs are in /tmp/broker/log"):
        await kept(MortalBroker(*[False] * 9))
    with pytest.raises(BrokerError, match="not up after 60 s"):
        await kept(MortalBroker(*[False] * 9), death_window_s=0.0)


async def test_a_moment_without_room_on_the_disk_is_no_end_either() -> None:
    class Full(Mortal):
        async def restart(self) -> None:
            if not self.starts.pop(0):
                raise OSError(errno.ENOSPC, "No space left on device")

    assert "No space left" in (await kept(Full(False, True)))[1]
