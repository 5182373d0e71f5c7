"""It learns: a model made from nothing, warmed up by demonstrations, then trained by rewards on two kinds of tasks.

    python -m benchmarks.learns --size demo --warm-steps 60 20 --steps 6 --seeds 0 --losses tis_mask --out /tmp/out
    python -m benchmarks.learns --size 85m --device cuda --seeds 0 1 2 --losses tis_mask ppo_clip cispo       # a GPU
    python -m benchmarks.learns --size 85m --device cuda --seeds 0 1 --losses tis_mask --quantization none fp8 --at-once 4
    python -m benchmarks.learns --size 85m --device cuda --seeds 0 --losses tis_mask --staleness 0 1 2 4 8 --at-once 5
    python -m benchmarks.learns --size 85m --device cuda --seeds 0 1 2 --losses tis_mask --staleness 4 --kept-cache no yes --at-once 6

The second compares engines that compute in BF16 and in FP8, the third bounds of staleness, the fourth engines that clear their cache at a
push with engines that keep it (`engine.keep_cache`), with five batches of episodes under way; runs of a command go side by side on one GPU.

The tasks, agent and tool are the demo's (two families of `reasoning-gym`, a calculator to call). The warm start
(swarmq.learner.warm_start) teaches the format and mostly guessing; that it pays to call the tool until the end is left to
rewards. Every seed makes its own model, which all its runs start from. Held-out problems are asked before, in between
and after. Results and curves are saved after every run, beside those of other runs that lie there. A run that fails, or has not made its
steps when the deadline comes, is kept with the steps that it has made.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import gc
import itertools
import json
import multiprocessing
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import report
from benchmarks.tables.common import ends
from benchmarks.tool_loops import CALLS, SHARES, Loop
from swarmq.config import SwarmJob, Train
from swarmq.demo.job import DemoSize, demo_job
from swarmq.demo.scenario import Scenario
from swarmq.learner.warm_start import WarmStart, warm
from swarmq.observe.curves import read_events, reward_limits
from swarmq.toy_model.network import build_model, save
from swarmq.toy_model.recipe import Architecture
from swarmq.toy_model.tokenizer import build_tokenizer
from swarmq.toy_model.warmup import render_chats
from swarmq.whole_run.session import open_session

DIALOGUES = 2000
"""The tokenizer is made from."""
BATCH = 32
ON_GPU = {
    "train.mixed_precision": "bf16",
    "train.micro_batch_tokens": 4096,
    "engine.dtype": "bfloat16",
    "engine.gpu_memory_utilization": 0.05,
    "engine.sleep": "false",
    "engine.arguments": json.dumps(
        ["--kv-cache-memory-bytes", str(1 << 30), "--api-server-count", "1", "--max-num-seqs", "256"]
    ),
}
"""Settings of a policy with which nine runs share 80 GB. The cache is given, since vLLM cannot find out what is free while other runs
begin and end beside it."""
STOP_S = 60.0
"""Seconds after the deadline within which a run must have been measured and stopped."""
CONCURRENCY = 64
"""Episodes of one batch."""
SPARE_GROUPS = 10
"""Tasks over those that are trained: a policy that solves nearly all has few groups left that teach it something."""


class Size(msgspec.Struct, frozen=True, kw_only=True):
    architecture: Architecture
    warm_rate: float
    rate: float


SIZES = {
    "demo": Size(architecture=Architecture(), warm_rate=4e-3, rate=3e-4),
    "85m": Size(
        architecture=Architecture(hidden=768, layers=12, heads=12, head_dim=64, feed_forward=2048, spread=0.036),
        warm_rate=5e-4,
        rate=2e-5,
    ),
    "200m": Size(
        architecture=Architecture(hidden=1024, layers=16, heads=16, head_dim=64, feed_forward=2816, spread=0.031),
        warm_rate=4e-4,
        rate=1e-5,
    ),
}


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What tells a run from others."""

    seed: int
    loss: str
    max_staleness: int = 2
    quantization: str = "none"
    keep_cache: bool = False

    @property
    def name(self) -> str:
        words = (self.loss.replace("_", "-"), self.seed, self.max_staleness, self.quantization)
        return "-".join(map(str, words)) + "-kept" * self.keep_cache

    @classmethod
    def of(cls, saved: dict[str, Any]) -> Run:
        return msgspec.convert(saved, cls)


class Course(Scenario):
    """A run without incidents: measure, train until the last step or the deadline, measure every so often."""

    measure_every = 20
    """Steps between two measurements of held-out problems."""
    agents = CONCURRENCY
    """Episodes at the same time."""
    deadline = float("inf")
    """On the monotonic clock."""

    async def run(self) -> None:
        await self._feed()
        await self._measure()
        began, self.began = time.monotonic(), time.time()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.deadline - began):
                    await self._start_clients()
                    for step in range(self.measure_every, self._size.steps, self.measure_every):
                        await self._wait_for_step(step)
                        await self._measure()
                    await self._wait_for_step(self._size.steps)
                    await self._deployment.learners_done.wait()
        finally:
            self.train_seconds = time.monotonic() - began
            for client in self.clients:
                await client.stop()
        await self._measure()

    async def _start_clients(self) -> None:
        measuring, self._size = self._size, msgspec.structs.replace(self._size, concurrency=self.agents)
        for name in ("a", "b"):
            await self._start_client(name, "honest")
        self._size = measuring


def main() -> None:
    arguments = parse()
    deadline = time.monotonic() + arguments.deadline
    with tempfile.TemporaryDirectory(prefix="swarmq-learns-", ignore_cleanup_errors=True) as folder:
        runs, failed = asyncio.run(run_all(Path(folder), arguments, deadline))
    rows = [[Run.of(one).name, *ends(one["held_out"]), len(one["rewards"]), one["seconds"]] for one in runs]
    print(report.table(("run", "held-out before", "after", "steps", "seconds"), rows))
    sys.exit(failed)


async def run_all(folder: Path, arguments: argparse.Namespace, deadline: float) -> tuple[list[dict[str, Any]], int]:
    """Make at most `--at-once` models, and then as many runs, at the same time. Returns all results and the number of runs that failed."""
    fp8, kept = "fp8" in arguments.quantization, "yes" in arguments.kept_cache
    compared = "keep_cache" if kept else "staleness" if arguments.staleness else ""
    name = "_".join(filter(None, ["learns", compared, report.place(arguments.device), "fp8" * fp8]))
    ways = list(
        itertools.product(arguments.losses, arguments.staleness or [2], arguments.quantization, arguments.kept_cache)
    )
    planned = {
        Run(seed=seed, loss=loss, max_staleness=bound, quantization=way, keep_cache=cache == "yes")
        for seed, (loss, bound, way, cache) in itertools.product(arguments.seeds, ways)
    }
    earlier = report.kept(name, out=arguments.out)[1].get("runs", [])
    runs: list[dict[str, Any]] = [one for one in earlier if Run.of(one) not in planned]
    places = asyncio.Semaphore(arguments.at_once)
    failed = 0

    async def run_one(run: Run, model: Path) -> None:
        nonlocal failed
        async with places:
            job = job_of(folder, model, SIZES[arguments.size], run, arguments.steps, cuda=arguments.device == "cuda")
            try:
                async with asyncio.timeout(deadline + STOP_S - time.monotonic()):
                    # a run that may be stale has as many episodes at the same time as make it so
                    agents = CONCURRENCY * (run.max_staleness + 1 if arguments.staleness else 1)
                    result = await trained(job, arguments.steps, deadline, arguments.measure_every, agents)
            except Exception:  # the other runs go on
                failed += 1
                print(f"--- {run.name} failed", flush=True)
                traceback.print_exc()
                return
        runs.append(msgspec.to_builtins(run) | result)
        finished = planned <= {Run.of(one) for one in runs}
        figures, out = figures_of(runs), arguments.out
        report.save(name, figures, detail={"runs": runs}, out=out, finished=finished)
        draw(runs, (out or report.RESULTS) / f"{name}.png")
        if fp8:
            save_fp8(f"fp8_{report.place(arguments.device)}", runs, out)

    async def run_seed(seed: int) -> None:
        size, place = SIZES[arguments.size], folder / f"model-{seed}"
        loop = asyncio.get_running_loop()
        model = await loop.run_in_executor(makers, make_model, place, size, seed, arguments.warm_steps)
        async with asyncio.TaskGroup() as running:
            for run in sorted((one for one in planned if one.seed == seed), key=lambda one: one.name):
                print(f"--- {run.name}", flush=True)
                running.create_task(run_one(run, model))

    # a warm start keeps a core of its own busy
    with ProcessPoolExecutor(arguments.at_once, mp_context=multiprocessing.get_context("spawn")) as makers:
        async with asyncio.TaskGroup() as seeds:
            for seed in arguments.seeds:
                seeds.create_task(run_seed(seed))
    return runs, failed


def make_model(folder: Path, size: Size, seed: int, steps: tuple[int, int]) -> Path:
    """Warm a model up in a process of its own, and give its GPU memory back to the runs."""
    model = ensure_model(folder, size, seed, steps)
    release_memory()
    return model


def save_fp8(name: str, runs: list[dict[str, Any]], out: Path | None) -> None:
    """Save the lowest reward after training by the engine's precision, beside what benchmarks/rollouts.py measures."""
    after: dict[str, list[float]] = {}
    for one in runs:
        precision = "fp8" if Run.of(one).quantization == "fp8" else "bf16"
        after.setdefault(precision, []).append(ends(one["held_out"])[1])
    figures, detail = report.kept(name, out=out)
    figures |= {f"reward_after_{precision}": min(rewards) for precision, rewards in after.items()}
    report.save(name, figures, detail=detail | {"reward_after": after}, out=out, finished=False)


def release_memory() -> None:
    """Give the GPU memory of a warm start back; without a GPU do nothing."""
    import torch  # noqa: PLC0415 - slow to import

    gc.collect()
    torch.cuda.empty_cache()


def parse() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("--size", default="demo", choices=SIZES)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--losses", nargs="+", default=["tis_mask", "ppo_clip", "cispo"])
    parser.add_argument("--quantization", nargs="+", default=["none"], choices=("none", "fp8"), help="of the engine")
    parser.add_argument(
        "--staleness", type=int, nargs="+", default=[], help="bounds to compare (groups.max_staleness); 0: synchronous"
    )
    parser.add_argument("--kept-cache", nargs="+", default=["no"], choices=("no", "yes"), help="engine.keep_cache")
    parser.add_argument("--steps", type=int, default=60, help="of each run")
    parser.add_argument(
        "--measure-every",
        type=int,
        default=Course.measure_every,
        help="steps; as many as --steps: before and after only",
    )
    parser.add_argument("--warm-steps", type=int, nargs=2, default=(600, 100), metavar=("COPYING", "SETTLING"))
    parser.add_argument("--at-once", type=int, default=1, help="runs side by side")
    parser.add_argument("--deadline", type=float, default=3600.0, help="seconds after which no run begins a step")
    return parser.parse_args()


def ensure_model(
    folder: Path,
    size: Size,
    seed: int,
    steps: tuple[int, int],
    *,
    loop: Loop = CALLS,
    report_fresh: Callable[[Path], None] = lambda _: None,
) -> Path:
    """Train fresh weights to copy, which takes longest to learn, then on the final mix. `report_fresh`: called with the folder of
    the fresh weights."""
    folder.mkdir()
    dice, tasks = random.Random(seed), loop.tasks(seed)
    shown = map(loop.longest, itertools.islice(tasks, DIALOGUES))
    words = build_tokenizer("".join(stretches) for stretches in render_chats(shown, loop.tools))
    model = folder / "fresh"
    save(build_model(words, size.architecture, seed=seed), words, model)
    report_fresh(model)
    for number, (count, share) in enumerate(zip(steps, SHARES, strict=True)):
        chats = folder / f"chats-{number}.jsonl"
        chosen = itertools.islice(tasks, count * BATCH)
        chats.write_text("\n".join(json.dumps(loop.chat(task, dice, share)) for task in chosen))
        train = Train(
            learning_rate=size.warm_rate / (1 + number),
            warmup_steps=30,
            weight_decay=0.01,
            betas=(0.9, 0.98),
            gradient_checkpointing=False,
            micro_batch_tokens=16384,
            seed=seed,
        )
        after = folder / f"warm-{number}"
        plan = WarmStart(model=str(model), demonstrations=chats, out=after, train=train, batch=BATCH)
        warm(plan, functools.partial(_tell, every=max(count // 5, 1)))
        model = after
    return model


def job_of(folder: Path, model: Path, size: Size, run: Run, steps: int, *, cuda: bool) -> SwarmJob:
    tree = msgspec.to_builtins(demo_job(str(model), run=run.name, seed=run.seed, size=DemoSize(steps=steps)))
    sets = [
        f"policies.main.train.learning_rate={size.rate}",
        f"policies.main.train.loss.name={run.loss}",
        "policies.main.train.checkpoint_every=1000000",
        "policies.main.train.token_log=false",
        "groups.when_dry=lend",  # one kind is solved before the other
        f"groups.max_staleness={run.max_staleness}",
        f"policies.main.engine.quantization={run.quantization}",
        f"policies.main.engine.keep_cache={str(run.keep_cache).lower()}",
    ]
    if cuda:
        sets += [f"policies.main.{setting}={value}" for setting, value in ON_GPU.items()]
    return SwarmJob.build(tree | {"folder": str(folder / "runs")}, sets=sets, origin="learns")


async def trained(job: SwarmJob, steps: int, deadline: float, measure_every: int, agents: int) -> dict[str, Any]:
    """Held-out reward by version, and the curve of the training reward."""
    size = DemoSize(steps=steps, held_out=256, concurrency=CONCURRENCY, spare_groups=SPARE_GROUPS)

    def say(text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {job.run}: {text}", flush=True)

    async with open_session(job, name="learns", report=say) as session:
        course = Course(session, size, say)
        course.deadline, course.measure_every, course.agents = deadline, measure_every, agents
        await course.run()
    made = [event for event in read_events(job.run_folder.events) if event.name == "step"]
    if not made:
        raise RuntimeError(f"{job.run} made no step before the deadline")
    fields = [event.fields for event in made]
    return {
        "held_out": {str(version): found.mean_reward or 0.0 for version, found in course.held_out.items()},
        "rewards": [one["reward"] for one in fields],
        "rewards_by_kind": [one["reward_by_kind"] for one in fields],
        "entropy": [one["entropy"] for one in fields],
        "k3": [one["kl_k3"] for one in fields],
        "staleness": [one["staleness"] for one in fields],
        "step_seconds": [event.at - course.began for event in made],
        "seconds": course.train_seconds,
    }


def figures_of(runs: list[dict[str, Any]]) -> dict[str, float]:
    """The best before and the worst after, of each loss over its seeds, apart for runs with other bounds or engines."""
    figures: dict[str, float] = {"runs": len(runs)}
    for way, own in by_way(runs).items():
        pairs = [ends(one["held_out"]) for one in own]
        figures[f"reward_before_max_{way}"] = max(before for before, _ in pairs)
        figures[f"reward_after_min_{way}"] = min(after for _, after in pairs)
    return figures


def by_way(runs: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Runs that differ by their seeds only; a bound, a precision or a kept cache is named where it is not the usual one."""
    found: dict[str, list[dict[str, Any]]] = {}
    bounds = {Run.of(one).max_staleness for one in runs}
    for one in runs:
        run = Run.of(one)
        words = [run.loss, *[str(run.max_staleness)] * (len(bounds) > 1), *["fp8"] * (run.quantization == "fp8")]
        words += ["kept_cache"] * run.keep_cache
        found.setdefault("_".join(words), []).append(one)
    return found


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """A panel for each loss, bound, precision and cache: training reward of every seed, held-out reward as dots."""
    import matplotlib as mpl  # noqa: PLC0415 - slow to import

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    ways = by_way(runs)
    figure, panels = plt.subplots(
        1, len(ways), figsize=(4.2 * len(ways), 3.6), sharey=True, squeeze=False, layout="constrained"
    )
    for (way, own), axes in zip(ways.items(), panels[0], strict=True):
        for color, one in enumerate(own):
            axes.plot(range(1, len(one["rewards"]) + 1), one["rewards"], color=f"C{color}", linewidth=0.8, alpha=0.6)
            held_out = {int(version): reward for version, reward in one["held_out"].items()}
            axes.plot(list(held_out), list(held_out.values()), "o-", color=f"C{color}", label=f"seed {one['seed']}")
        axes.set(title=way, xlabel="optimizer step")
        axes.grid(alpha=0.25)
    panels[0][0].set_ylim(reward_limits(*(one["rewards"] for one in runs), *(one["held_out"].values() for one in runs)))
    panels[0][0].set_ylabel("reward (dots: held out)")
    panels[0][0].legend(loc="lower right", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _tell(now: Any, *, every: int) -> None:
    if now.step % every == 0:
        print(f"warm start: step {now.step} of {now.steps}, loss {now.loss:.3f}", flush=True)


if __name__ == "__main__":
    main()
