"""One timer for a call that waits often: what it cuts off, and what it leaves alone."""

import asyncio
import time
from contextlib import closing

import pytest

from swarmq.proxy.completions.deadline import Deadline
from swarmq.proxy.http_errors import DeadlineError


async def test_a_wait_is_cut_off_when_the_time_is_over():
    with closing(Deadline(time.monotonic(), 0.01)) as deadline, pytest.raises(DeadlineError, match="0.01 s"), deadline:
        await asyncio.Event().wait()
    assert not asyncio.current_task().cancelling()


async def test_what_happens_between_two_waits_is_not_cut_off_but_the_next_wait_is():
    with closing(Deadline(time.monotonic(), 600)) as deadline:
        with deadline:
            await asyncio.sleep(0)
        deadline._pass()  # as its timer does
        await asyncio.sleep(0)
        with pytest.raises(DeadlineError), deadline:
            pytest.fail("the time was over before")


async def test_a_call_that_is_late_already_does_not_wait_at_all():
    with closing(Deadline(time.monotonic() - 5, 1.0)) as deadline, pytest.raises(DeadlineError), deadline:
        await asyncio.Event().wait()


async def test_who_else_cancels_is_not_taken_for_the_deadline():
    waiting = asyncio.Event()

    async def call():
        with closing(Deadline(time.monotonic(), 600)) as deadline, deadline:
            waiting.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(call())
    await waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_error_of_its_own_stays_what_it_is():
    with closing(Deadline(time.monotonic(), 600)) as deadline, pytest.raises(KeyError), deadline:
        raise KeyError("x")
