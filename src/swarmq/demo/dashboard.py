"""The dashboard of a demo that is up, served by a child process, so that its pages never slow the demo."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Sequence

from swarmq.config import RunFolder
from swarmq.runtime.processes import die_with_parent, stop_group

STOP_S = 5.0
COMMAND = (sys.executable, "-m", "swarmq", "dashboard", "--port", "0")


@contextlib.asynccontextmanager
async def serve_dashboard(
    folder: RunFolder, report: Callable[[str], None], *, command: Sequence[str] = COMMAND
) -> AsyncIterator[None]:
    """Serve the dashboard while the context is open, and report its link as soon as it listens.

    `command`: prints the link as its first line. A dashboard that does not start is reported with its log and does not end the
    demo.
    """
    folder.logs.mkdir(parents=True, exist_ok=True)
    log_path = folder.logs / "dashboard.log"
    with log_path.open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *command,
            str(folder.path),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            preexec_fn=die_with_parent,
        )

    async def announce() -> None:
        assert process.stdout is not None
        link = (await process.stdout.readline()).decode(errors="replace").strip()
        report(f"dashboard: {link}" if link else f"warning: the dashboard did not start; see {log_path}")

    async with asyncio.TaskGroup() as tasks:
        announcing = tasks.create_task(announce())
        try:
            yield
        finally:
            announcing.cancel()
            await stop_group(process, grace_s=STOP_S)
