"""Process that makes the demo's model, so that Ctrl-C ends it at once and torch's memory is freed with it.

python -m swarmq.demo.make_model CACHE      prints progress as lines of JSON
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from swarmq.demo.model_recipe import DemoRecipe, model_folder
from swarmq.errors import SwarmqError
from swarmq.runtime.processes import die_with_parent, stop_group
from swarmq.toy_model.recipe import WarmupProgress, is_complete

PROGRESS_LINES = 10
"""Number of progress lines of a warm-up."""


async def ensure_model(cache: Path, report: Callable[[str], None]) -> str:
    """Return the folder of the demo's model, making it unless it is in `cache`. Raises SwarmqError if that fails."""
    folder = model_folder(cache, DemoRecipe())
    if is_complete(folder):
        report(f"model: found in {cache}")
        return str(folder)
    report(f"model: making the model (once; kept in {cache})")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "swarmq.demo.make_model", str(cache)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        preexec_fn=die_with_parent,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    complaints = asyncio.ensure_future(process.stderr.read())
    try:
        async for text in process.stdout:
            now = msgspec.json.decode(text, type=WarmupProgress)
            report(f"model: warm-up step {now.step} of {now.steps}, loss {now.loss:.3f}")
        if await process.wait() or not is_complete(folder):
            raise SwarmqError(f"the demo's model could not be made:\n{(await complaints).decode()[-2000:]}")
        return str(folder)
    finally:
        complaints.cancel()
        await stop_group(process, grace_s=0.0)


def main() -> None:
    from swarmq.demo.warmup import load_or_warm_up  # noqa: PLC0415 - torch stays in this process

    tenth = -1

    def show(now: WarmupProgress) -> None:
        nonlocal tenth
        if tenth != (tenth := PROGRESS_LINES * now.step // max(now.steps, 1)):
            sys.stdout.buffer.write(msgspec.json.encode(now) + b"\n")
            sys.stdout.buffer.flush()

    load_or_warm_up(Path(sys.argv[1]), DemoRecipe(), report=show)


if __name__ == "__main__":
    main()
