"""It learns: a model made from nothing, warmed up by demonstrations, then trained by rewards on two kinds of tasks.

    python -m benchmarks.learns --size demo --warm-steps 60 20 --steps 6 --seeds 0 --losses tis_mask --out /tmp/out
    python -m benchmarks.learns --size 85m --device cuda --seeds 0 1 --losses tis_mask --quantization fp8          # sampled in FP8
    python -m benchmarks.learns --size 85m --device cuda --seeds 0 1 2 --losses tis_mask ppo_clip cispo       # a GPU

The tasks, agent and tool are the demo's (two families of `reasoning-gym`, a calculator to call). The warm start
(swarmq.learner.warm_start) teaches the format and mostly guessing; that it pays to call the tool until the end is left to
rewards. Every seed makes its own model, which all losses start from. Held-out problems are asked before, in between
and after. Results and curves are saved after every run, beside those of other seeds and losses that lie there.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import itertools
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import report
from benchmarks.tables.common import ends
from swarmq.config import SwarmJob, Train
from swarmq.demo import agent
from swarmq.demo import problems as arithmetic
from swarmq.demo.job import DemoSize, demo_job
from swarmq.demo.model_recipe import DemoRecipe
from swarmq.demo.scenario import Scenario
from swarmq.demo.warmup import demonstrate
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
CACHE = json.dumps(["--kv-cache-memory-bytes", str(8 << 30)])
"""On a GPU: given, since vLLM cannot find out what is free while other runs begin and end beside it."""
SPARE_GROUPS = 32
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


class Course(Scenario):
    """A run without incidents: measure, train, measure every so often."""

    measure_every = 20

    async def run(self) -> None:
        await self._feed()
        await self._measure()
        began = time.monotonic()
        try:
            for name in ("a", "b"):
                await self._start_client(name, "honest")
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


def main() -> None:
    arguments = parse()
    size, cuda = SIZES[arguments.size], arguments.device == "cuda"
    name = f"learns_{report.place(arguments.device)}" + ("_fp8" if arguments.quantization == "fp8" else "")
    planned = set(itertools.product(arguments.seeds, arguments.losses))
    earlier = report.kept(name, out=arguments.out)[1].get("runs", [])
    runs: list[dict[str, Any]] = [one for one in earlier if (one["seed"], one["loss"]) not in planned]
    with tempfile.TemporaryDirectory(prefix="swarmq-learns-") as folder:
        for seed in arguments.seeds:
            model = ensure_model(Path(folder) / f"model-{seed}", size, seed, arguments.warm_steps)
            for loss in arguments.losses:
                print(f"--- seed {seed}, {loss}", flush=True)
                job = job_of(
                    Path(folder),
                    model,
                    size,
                    seed,
                    loss,
                    arguments.steps,
                    cuda=cuda,
                    quantization=arguments.quantization,
                )
                runs.append({"seed": seed, "loss": loss} | asyncio.run(trained(job, arguments.steps)))
                finished = planned <= {(one["seed"], one["loss"]) for one in runs}
                figures, out = figures_of(runs), arguments.out
                report.save(name, figures, detail={"runs": runs}, out=out, finished=finished)
                draw(runs, (out or report.RESULTS) / f"{name}.png")
    rows = [[one["loss"], one["seed"], *ends(one["held_out"]), one["seconds"]] for one in runs]
    print(report.table(("loss", "seed", "held-out before", "after", "seconds"), rows))


def parse() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("--size", default="demo", choices=SIZES)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--losses", nargs="+", default=["tis_mask", "ppo_clip", "cispo"])
    parser.add_argument("--quantization", default="none", choices=("none", "fp8"), help="of the engine")
    parser.add_argument("--steps", type=int, default=60, help="of each run")
    parser.add_argument("--warm-steps", type=int, nargs=2, default=(600, 100), metavar=("COPYING", "SETTLING"))
    return parser.parse_args()


def ensure_model(
    folder: Path,
    size: Size,
    seed: int,
    steps: tuple[int, int],
    *,
    report_fresh: Callable[[Path], None] = lambda _: None,
) -> Path:
    """Train fresh weights to copy, which takes longest to learn, then on the final mix. `report_fresh`: called with the folder of
    the fresh weights."""
    folder.mkdir()
    dice, recipe = random.Random(seed), DemoRecipe()
    questions = itertools.cycle(problems(seed))
    shown = (demonstrate(p.question, *arithmetic.solution(p), calls=2) for p in itertools.islice(questions, DIALOGUES))
    words = build_tokenizer("".join(stretches) for stretches in render_chats(shown, agent.TOOLS))
    model = folder / "fresh"
    save(build_model(words, size.architecture, seed=seed), words, model)
    report_fresh(model)
    for number, (count, share) in enumerate(zip(steps, (recipe.copying_share, recipe.tool_share), strict=True)):
        chats = folder / f"chats-{number}.jsonl"
        chosen = itertools.islice(questions, count * BATCH)
        chats.write_text("\n".join(json.dumps(chat(problem, dice, share)) for problem in chosen))
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


def problems(seed: int) -> Iterator[arithmetic.Problem]:
    """Of both kinds in turn, never one that is trained or held out."""
    start = random.Random(seed).randrange(arithmetic.SPLIT_SIZE // 2)
    kinds = [arithmetic.problems(kind, "warmup", arithmetic.SPLIT_SIZE // 2, start=start) for kind in arithmetic.KINDS]
    return itertools.chain.from_iterable(zip(*kinds, strict=True))


def chat(problem: arithmetic.Problem, dice: random.Random, tool_share: float) -> dict[str, Any]:
    """A dialogue that calls the tool before each next step with this chance, and ends in the true answer."""
    expression, answer = arithmetic.solution(problem)
    calls = 0
    while dice.random() < tool_share:
        calls += 1
    return {"messages": demonstrate(problem.question, expression, answer, calls=calls), "tools": agent.TOOLS}


def job_of(
    folder: Path, model: Path, size: Size, seed: int, loss: str, steps: int, *, cuda: bool, quantization: str
) -> SwarmJob:
    run = f"{loss.replace('_', '-')}-{seed}"
    tree = msgspec.to_builtins(demo_job(str(model), run=run, seed=seed, size=DemoSize(steps=steps)))
    sets = [
        f"policies.main.train.learning_rate={size.rate}",
        f"policies.main.train.loss.name={loss}",
        "policies.main.train.checkpoint_every=1000000",
        "policies.main.train.token_log=false",
        "groups.when_dry=lend",  # one kind is solved before the other
        f"policies.main.engine.quantization={quantization}",
    ]
    if cuda:
        sets += ["policies.main.train.mixed_precision=bf16", "policies.main.engine.dtype=bfloat16"]
        sets += ["policies.main.engine.gpu_memory_utilization=0.12", f"policies.main.engine.arguments={CACHE}"]
    return SwarmJob.build(tree | {"folder": str(folder / "runs")}, sets=sets, origin="learns")


async def trained(job: SwarmJob, steps: int) -> dict[str, Any]:
    """Held-out reward by version, and the curve of the training reward."""
    size = DemoSize(steps=steps, held_out=256, concurrency=64, spare_groups=SPARE_GROUPS)
    say = functools.partial(print, flush=True)
    async with open_session(job, name="learns", report=say) as session:
        course = Course(session, size, say)
        await course.run()
    made = [event.fields for event in read_events(job.run_folder.events) if event.name == "step"]
    return {
        "held_out": {str(version): found.mean_reward or 0.0 for version, found in course.held_out.items()},
        "rewards": [fields["reward"] for fields in made],
        "rewards_by_kind": [fields["reward_by_kind"] for fields in made],
        "entropy": [fields["entropy"] for fields in made],
        "k3": [fields["kl_k3"] for fields in made],
        "seconds": course.train_seconds,
    }


def figures_of(runs: list[dict[str, Any]]) -> dict[str, float]:
    """The best before and the worst after, of each loss over its seeds."""
    figures: dict[str, float] = {"runs": len(runs)}
    for loss in dict.fromkeys(one["loss"] for one in runs):
        pairs = [ends(one["held_out"]) for one in runs if one["loss"] == loss]
        figures[f"reward_before_max_{loss}"] = max(before for before, _ in pairs)
        figures[f"reward_after_min_{loss}"] = min(after for _, after in pairs)
    return figures


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """A panel for each loss: training reward of every seed, held-out reward as dots."""
    import matplotlib as mpl  # noqa: PLC0415 - slow to import

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    losses = list(dict.fromkeys(one["loss"] for one in runs))
    figure, panels = plt.subplots(
        1, len(losses), figsize=(4.2 * len(losses), 3.6), sharey=True, squeeze=False, layout="constrained"
    )
    for loss, axes in zip(losses, panels[0], strict=True):
        for color, one in enumerate(run for run in runs if run["loss"] == loss):
            axes.plot(range(1, len(one["rewards"]) + 1), one["rewards"], color=f"C{color}", linewidth=0.8, alpha=0.6)
            held_out = {int(version): reward for version, reward in one["held_out"].items()}
            axes.plot(list(held_out), list(held_out.values()), "o-", color=f"C{color}", label=f"seed {one['seed']}")
        axes.set(title=loss, xlabel="optimizer step")
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
