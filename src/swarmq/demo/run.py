"""`swarmq demo`: a whole run on one machine, with a client killed half-way, and the final account.

model (warm-up, cached) ─> deploy (broker, engine, proxy, collector, learner) ─> feed tasks
    ─> held-out reward ─> two clients work ─┬─ half-way: SIGKILL one, start one with another reward function
                                            └─ the learner's last step ─> held-out reward ─> final table, curve
"""

from __future__ import annotations

import contextlib
import statistics
import time
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from swarmq.config import SwarmJob, make_folder
from swarmq.demo.accounting import Account, render_table, settle_demo
from swarmq.demo.dashboard import serve_dashboard
from swarmq.demo.job import DemoSize, demo_job
from swarmq.demo.make_model import ensure_model
from swarmq.demo.model_recipe import user_cache_folder
from swarmq.demo.scenario import Scenario
from swarmq.errors import SwarmqError
from swarmq.observe.curves import draw_reward, read_events
from swarmq.runtime.logs import redirect_to
from swarmq.runtime.wording import count_of
from swarmq.up import check_settings, plan_run
from swarmq.whole_run.session import make_reporter, open_session, progress_display

PHASES = ("wait_s", "rollout_s", "train_s", "push_s", "pause_s", "step_s")


class DemoOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `swarmq demo`."""

    run: str = "demo"
    folder: str = "runs"
    seed: int = 0
    model: str | None = None
    cache: Path = msgspec.field(default_factory=user_cache_folder)
    sets: tuple[str, ...] = ()
    size: DemoSize = DemoSize()


class DemoResult(msgspec.Struct, frozen=True, kw_only=True):
    """Results of a demo, also written to `result.json` in the run folder."""

    seed: int
    model_s: float
    start_s: float
    train_s: float
    steps: int
    held_out: dict[int, float]
    """Weight version -> mean held-out reward."""
    account: Account
    step_medians: dict[str, float]
    """Phase of a step -> median seconds over the run."""


async def run_demo(options: DemoOptions, console: Console) -> DemoResult:
    """Run the demo. Raises SwarmqError if a process cannot start, or if an episode is lost or trained twice."""
    began = time.monotonic()
    report = make_reporter(console, began)
    check_settings(plain := _name_run(options, options.run, ""))  # settings are checked before the model is made
    make_folder(Path(plain.folder))
    model = options.model or await ensure_model(options.cache, report)
    model_s = time.monotonic() - began
    plan_run(_name_run(options, options.run, model), lambda _: None)  # and before the run folder is made
    job = demo_settings(options, model)
    report(f"run folder {job.run_folder.path}")
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(redirect_to(report))
        await stack.enter_async_context(serve_dashboard(job.run_folder, report))
        session = await stack.enter_async_context(open_session(job, name="demo", report=report))
        start_s = time.monotonic() - began - model_s
        say = await stack.enter_async_context(progress_display(session.follower, console, report))
        play = Scenario(session, options.size, say)
        await play.run()
    held_out = {version: measured.mean_reward or 0.0 for version, measured in play.held_out.items()}
    result = DemoResult(
        seed=options.seed,
        model_s=model_s,
        start_s=start_s,
        train_s=play.train_seconds,
        steps=max(held_out),
        held_out=held_out,
        account=settle_demo(job, play.entries),
        step_medians=_medians(job.run_folder.events),
    )
    folder = job.run_folder.path
    (folder / "result.json").write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2))
    draw_reward(
        read_events(job.run_folder.events),
        held_out,
        folder / "reward.png",
        title=f"swarmq demo, seed {options.seed}",
        marks=play.marks,
    )
    _close(console, job, result)
    if result.account.lost or result.account.twice:
        raise SwarmqError(f"episodes unaccounted for: lost {result.account.lost}, trained twice {result.account.twice}")
    return result


def demo_settings(options: DemoOptions, model: str) -> SwarmJob:
    """Return the demo's job under an unused run name, and create its folder."""
    number = 1
    while True:
        job = _name_run(options, options.run if number == 1 else f"{options.run}-{number}", model)
        try:
            job.run_folder.path.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return job


def _name_run(options: DemoOptions, run: str, model: str) -> SwarmJob:
    tree = msgspec.to_builtins(demo_job(model, run="demo", seed=options.seed, size=options.size))
    return SwarmJob.build(tree | {"run": run, "folder": options.folder}, sets=options.sets, origin="demo")


def _medians(events: Path) -> dict[str, float]:
    steps = [event.fields for event in read_events(events) if event.name == "step"]
    return {phase: statistics.median(float(s.get(phase, 0.0)) for s in steps) for phase in PHASES} if steps else {}


def _close(console: Console, job: SwarmJob, result: DemoResult) -> None:
    folder = job.run_folder
    console.print(render_table(result.account))
    rewards = Table(title="held-out reward", title_justify="left")
    rewards.add_column("weight version", justify="right")
    rewards.add_column("mean reward", justify="right")
    for version, reward in result.held_out.items():
        rewards.add_row(str(version), f"{reward:.3f}")
    console.print(rewards)
    phases = "  ".join(f"{phase} {seconds:.2f}" for phase, seconds in result.step_medians.items())
    console.print(
        f"{count_of(result.steps, 'step')} in {result.train_s:.0f} s; medians of a step: {phases}", highlight=False
    )
    for what, where in (
        ("curve", folder.path / "reward.png"),
        ("checkpoints", folder.checkpoints("main")),
        ("batch log", folder.batch_log("main")),
        ("logs", folder.logs),
    ):
        console.print(f"{what:12} {where}", highlight=False, soft_wrap=True)
    console.print(
        f"to see every episode and token of it: `swarmq dashboard {folder.path}`", highlight=False, soft_wrap=True
    )
    console.print(
        f"to see the queues while the run is up (swarmq up {folder.job}): `swarmq viewer {folder.path}` prints a login for the management UI",
        highlight=False,
        soft_wrap=True,
    )
