"""The reward is edited by replacing the client: is a step lost, and who is to be thanked for which?

A worker is killed with its episodes in the air, and one with another reward function takes its tasks over. The curve
is drawn with a mark where the new code's episodes were first trained.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from pathlib import Path

import msgspec

from benchmarks.swarm.world import POLICY, RUN, Pace, World
from swarmq import SwarmTask
from swarmq.client.data.feed import feed
from swarmq.learner.store.batch_log import read_records
from swarmq.observe.curves import draw_reward, read_events

GROUP_SIZE, GROUPS = 4, 4
EDIT_AT, STEPS = 15, 40
OLD, NEW = "reward-1", "reward-2"


class Edited(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen."""

    steps: int
    steps_lost: int
    """Steps missing from the batch log, or in it twice."""
    episodes_twice: int
    first_step_of_new: int
    old_after: int
    """Steps after that one that still hold an episode of the old code."""
    leftovers: dict[str, int]
    """What became of the old code's episodes that were open when its client was killed."""


def run(picture: Path | None) -> Edited:
    with tempfile.TemporaryDirectory(prefix="swarmq-edit-") as folder:
        return asyncio.run(_run(Path(folder), picture))


async def _run(folder: Path, picture: Path | None) -> Edited:
    groups = {"group_size": GROUP_SIZE, "groups_per_batch": GROUPS, "max_staleness": 2, "idle_timeout_s": 10.0}
    async with World.open(folder, mix={"default": 1.0}, groups=groups) as world:
        tasks = [SwarmTask(f"t{number}", "default", None) for number in range(2 * STEPS * GROUPS)]
        await feed(world.broker, RUN, tasks, "default", repeats=GROUP_SIZE, progress_file=folder / "fed.json")
        await world.hire("old", "default", Pace(seconds=0.1, code_version=OLD), client="alice", concurrency=16)
        await world.reach(EDIT_AT)
        await world.kill("old")
        new = Pace(seconds=0.1, bonus=0.5, code_version=NEW)
        await world.hire("new", "default", new, client="alice", concurrency=16)
        await world.reach(STEPS)
    log = [record for record in read_records(world.job.run_folder.batch_log(POLICY)) if record.episodes]
    by_step = {r.index.version: Counter(e.code_version for e in r.episodes) for r in log}
    trained = Counter(episode for record in log for episode in record.index.trained)
    first = min(step for step, versions in by_step.items() if versions[NEW])
    events = list(read_events(world.job.run_folder.events))
    if picture:
        draw_reward(events, {}, picture, title="the reward function is replaced")
    ended = [event.fields for event in events if event.name == "episode"]
    return Edited(
        steps=max(by_step),
        steps_lost=len(set(range(1, max(by_step) + 1)) ^ by_step.keys()) + len(log) - len(by_step),
        episodes_twice=sum(times > 1 for times in trained.values()),
        first_step_of_new=first,
        old_after=sum(versions[OLD] > 0 for step, versions in by_step.items() if step > first),
        leftovers=dict(Counter(e["reason"] for e in ended if e["code_version"] == OLD and e["reason"])),
    )
