"""The collector as a process of its own, and the job that it reads."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from swarmq.config import SwarmJob

START = """
import sys
from swarmq.collector.main import run
from swarmq.collector.standby import StandbyIntervals
from swarmq.config import SwarmJob
run(SwarmJob.load(sys.argv[1]), take_over=sys.argv[2:] == ["--take-over"], standby=StandbyIntervals(check_s=0.2, grace_s=1.0, silent_s=10.0))
"""


def make_job(folder: Path, run: str, url: str, *, standby: bool = False, processes: int = 1, **groups: int) -> SwarmJob:
    """Of one kind and one policy; written where `collector` finds it."""
    tree = {
        "run": run,
        "folder": str(folder),
        "mix": {"math": 1.0},
        "policies": {"main": {"model": "m"}},
        "broker": {"url": url},
        "groups": groups,
        "collector": {"standby": standby, "processes": processes},
    }
    job = SwarmJob.build(tree)
    (folder / "job.toml").write_text(job.to_toml())
    return job


@contextlib.asynccontextmanager
async def collector(job: SwarmJob, *options: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """The daemon; killed at the end if it is still there."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", START, f"{job.folder}/job.toml", *options)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
