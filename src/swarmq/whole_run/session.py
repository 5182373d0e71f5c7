"""A run that is up in this process, followed, recorded and joined by a client; how its progress is shown."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from rich.console import Console
from rich.live import Live
from rich.text import Text

from swarmq import AsyncSwarmClient
from swarmq.broker import Broker
from swarmq.broker.amqp import AmqpBroker
from swarmq.config import SwarmJob
from swarmq.observe.board_terminal import draw
from swarmq.observe.lines import format_elapsed, wrap_beside
from swarmq.observe.monitor import Follower, follow
from swarmq.observe.recorder import record_run
from swarmq.observe.step_lines import StepLines, report_steps
from swarmq.up import Deployment, deploy

FRAME_S = 0.5


class Session(NamedTuple):
    """A run that is up."""

    deployment: Deployment
    broker: Broker
    follower: Follower
    client: AsyncSwarmClient


@contextlib.asynccontextmanager
async def open_session(job: SwarmJob, *, name: str, report: Callable[[str], None]) -> AsyncIterator[Session]:
    """Bring a run up, follow and record it, and join it as a client, while the context is open. `name`: name of the broker's
    connection.

    Raises SwarmqError naming the process that cannot start.
    """
    async with (
        deploy(job, report=report) as deployment,
        AmqpBroker.open(deployment.invite.amqp_url, name=name, deadline_s=None) as broker,
        follow(deployment.job, broker, record=job.run_folder.events) as follower,
        record_run(deployment.job, broker, follower=follower),
        AsyncSwarmClient(deployment.invite) as client,
    ):
        yield Session(deployment, broker, follower, client)


def make_reporter(console: Console, began: float) -> Callable[[str], None]:
    """Return a function that prints a line with the time since `began`, on the monotonic clock, in front."""

    def report(text: str) -> None:
        head = format_elapsed(began)
        line = wrap_beside(head, text, width=console.width if console.is_terminal else None)
        console.print(Text.assemble((head, "dim"), line.removeprefix(head)), soft_wrap=True)

    return report


@contextlib.asynccontextmanager
async def progress_display(
    follower: Follower, console: Console, report: Callable[[str], None]
) -> AsyncIterator[Callable[[str], None]]:
    """Show progress: a live board on a terminal, else a line for each step."""

    async def paint(live: Live) -> None:
        while True:
            live.update(draw(follower.board, now=time.time(), width=console.width), refresh=True)
            await asyncio.sleep(FRAME_S)

    async with contextlib.AsyncExitStack() as stack:
        if console.is_terminal:
            shown = paint(stack.enter_context(Live(console=console, auto_refresh=False)))
        else:
            shown = report_steps(follower, StepLines(follower.board), report)
        async with asyncio.TaskGroup() as tasks:
            showing = tasks.create_task(shown)
            try:
                yield report
            finally:
                showing.cancel()
