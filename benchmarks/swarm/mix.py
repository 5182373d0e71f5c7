"""Three kinds with different speeds and failure rates: is every batch in the shares that were asked for?

Half-way the mix is changed live; later the only worker of one kind is killed, so that its share is lent, and then
another takes its place. What each batch held is read from the batch log.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.swarm.world import POLICY, RUN, Pace, World
from swarmq import SwarmTask
from swarmq.client.data.feed import feed
from swarmq.client.data.readers import read_tasks
from swarmq.learner.store.batch_log import read_records
from swarmq.observe.control_requests import send_command

BATCHES = 100
GROUPS, GROUP_SIZE, STALENESS = 10, 2, 2
FIRST = {"sum": 0.4, "letters": 0.35, "products": 0.25}
SECOND = {"sum": 0.15, "letters": 0.3, "products": 0.55}
GYMS = {"sum": "chain_sum", "letters": "letter_counting", "products": "products"}
PACES = {"sum": Pace(), "letters": Pace(seconds=0.05, fails=0.1), "products": Pace(seconds=0.2, fails=0.3)}
CONCURRENCY = 12
CHANGE_AT, KILL_AT = 30, 55
AWAY = 12
"""Batches without the kind that has died, at least."""


class Mixed(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen."""

    error_max: float
    """Groups, of one kind in one batch, against its share of that batch."""
    drift_max: float
    """Groups, of one kind over all batches up to one."""
    asked_at: int
    changed_from: int
    lent_batches: int
    back_batches: int
    """Batches with the kind that had died, after its return."""
    rows: list[dict[str, Any]]


def run() -> Mixed:
    with tempfile.TemporaryDirectory(prefix="swarmq-mix-") as folder:
        return asyncio.run(_run(Path(folder)))


async def _run(folder: Path) -> Mixed:
    settings = {
        "mix": FIRST,
        "groups": {
            "group_size": GROUP_SIZE,
            "groups_per_batch": GROUPS,
            "max_staleness": STALENESS,
            "idle_timeout_s": 20.0,
            "when_dry": "lend",
            "dry_after_s": 5.0,
        },
    }
    async with World.open(folder, **settings) as world:
        for kind, gym in GYMS.items():
            tasks = [
                SwarmTask(f"{kind}-{n}", kind, {"question": task.payload["question"]}) for n, task in _numbered(gym)
            ]
            await feed(
                world.broker, RUN, tasks, kind, repeats=GROUP_SIZE, epochs=4, progress_file=folder / f"{kind}.json"
            )
            await world.hire(f"worker-{kind}", kind, PACES[kind], concurrency=CONCURRENCY)
        await world.reach(CHANGE_AT)
        asked_at = world.step
        answer = await send_command(world.broker, RUN, "set", {"mix": SECOND})
        changed_from = next(c["from_step"] for c in answer.applied[POLICY]["changes"] if c["path"] == "mix")
        print(f"mix changed: asked for after step {asked_at}, in effect from step {changed_from}", flush=True)
        await world.reach(KILL_AT)
        await world.kill("worker-letters")
        await world.until(lambda board: "letters" in board.reported("collector").get("lent", ()))
        gone = world.step
        print(f"the worker of letters killed; its share is lent after step {gone}", flush=True)
        await world.reach(gone + AWAY)
        await world.hire("worker-letters-2", "letters", PACES["letters"], concurrency=CONCURRENCY)
        await world.until(lambda board: not board.reported("collector").get("lent", ("letters",)))
        print(f"letters is back after step {world.step}", flush=True)
        await world.reach(max(BATCHES, world.step + AWAY))
        log = [record for record in read_records(world.job.run_folder.batch_log(POLICY)) if record.episodes]
    return measured(log, asked_at=asked_at, changed_from=changed_from)


def measured(log: list[Any], *, asked_at: int, changed_from: int) -> Mixed:
    """From the batch log: what each batch held, against the shares it was to have."""
    error = drift = 0.0
    taken: Counter[str] = Counter()
    owed: Counter[str] = Counter()
    rows = []
    for record in log:
        held = Counter(kind for _, kind in {(e.group_id, e.kind) for e in record.episodes})
        shared = sum(held[kind] for kind in record.index.mix)  # a kind that lends may have some left, too
        wanted = {kind: share * shared for kind, share in record.index.mix.items()}
        taken.update({kind: held[kind] for kind in wanted})
        owed.update(wanted)
        error = max([error, *(abs(held[kind] - count) for kind, count in wanted.items())])
        drift = max([drift, *(abs(taken[kind] - owed[kind]) for kind in wanted)])
        rows.append({"step": record.index.version, "held": dict(held), "wanted": wanted})
    lent = [row["step"] for row in rows if "letters" not in row["wanted"]]
    return Mixed(
        error_max=error,
        drift_max=drift,
        asked_at=asked_at,
        changed_from=changed_from,
        lent_batches=len(lent),
        back_batches=sum(row["held"].get("letters", 0) > 0 and row["step"] > max(lent, default=0) for row in rows),
        rows=rows,
    )


def _numbered(gym: str) -> list[tuple[int, SwarmTask]]:
    return list(enumerate(read_tasks(f"reasoning-gym:{gym}?size=200&seed=1")))
