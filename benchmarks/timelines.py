"""Wall-clock of forward + backward over the same episodes, computed three ways in one run.

    oracle   every turn a row of its own
    rows     turns folded into the fewest timelines
    tree     every shared prefix computed once

All three run through the same code (packed layouts, the same attention, gradient checkpointing, loss on sampled tokens
with a chunked head), so the ratios measure what is computed and not how. Unless told not to, it also holds rows and tree
to the untouched model in FP32, turn by turn. Examples:

    python -m benchmarks.timelines --device cpu --model tiny
    python -m benchmarks.timelines --device cuda --model 1.7b,4b --deadline 460 --out results
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import math
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from benchmarks import report
from benchmarks.timelines_figure import draw
from benchmarks.timelines_oracle import compare, worst
from benchmarks.workloads import WORKLOADS, Episode, Source, Workload, batch
from swarmq.learner.tree import LayoutModel, Placed
from swarmq.timeline import Cost, Layout, PrefixTree, lay_rows, pack, plan, row_layouts, unfold
from swarmq.timeline.layout import num_pairs

WAYS = ("oracle", "rows", "tree")
PROFILED = {"linear_30", "forks_3"}
LARGE = {"vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128}
SHAPES = {
    "tiny": {
        "vocab_size": 2048,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
    "1.7b": LARGE
    | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4b": LARGE | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
}


class Setting(NamedTuple):
    """How one model is measured."""

    model: str
    device: torch.device
    unit: int
    budget: int
    oracle_tokens: int
    tree_tokens: int
    repeats: int
    side_repeats: int
    """Of workloads without a goal."""
    only: list[str]
    deadline: float
    """Of time.monotonic()."""


class Flops(NamedTuple):
    """Of a forward pass and twice that for the backward pass; recomputation not counted. What shares beginnings
    computes fewer tokens, and those see more each; the head computes the sampled tokens whatever the way."""

    tokens: float
    attention: float
    head: float


class Measured(NamedTuple):
    workload: str
    tokens: dict[str, int]
    flops: dict[str, Flops]
    seconds: dict[str, report.Spread]
    trained: int
    plan_s: dict[str, float]
    chosen: str
    goal: float | None

    def speedup(self, way: str) -> float:
        return self.seconds["oracle"].median / self.seconds[way].median

    def token_ratio(self, way: str) -> float:
        return self.tokens["oracle"] / self.tokens[way]

    def flop_ratio(self, way: str) -> float:
        return sum(self.flops["oracle"]) / sum(self.flops[way])

    def attention_ratio(self, way: str) -> float:
        """Without the head."""
        return sum(self.flops["oracle"][:2]) / sum(self.flops[way][:2])


def main() -> None:
    arguments = parse()
    device = torch.device(arguments.device)
    began = time.monotonic()
    name = f"timelines_{place(device)}"
    models = arguments.model.split(",")
    figures: dict[str, float] = {}
    detail: dict[str, Any] = {}
    if not arguments.no_check:
        detail["fp32_check"] = compare(device)
        figures |= worst(detail["fp32_check"])
    for i, model in enumerate(models):
        share = (arguments.deadline - (time.monotonic() - began)) * SHARES[len(models) - i]
        setting = Setting(
            model=model,
            device=device,
            unit=arguments.unit or (128 if device.type == "cuda" else 16),
            budget=arguments.budget or (32768 if device.type == "cuda" else 4096),
            oracle_tokens=arguments.oracle_tokens or (60000 if device.type == "cuda" else 8192),
            tree_tokens=arguments.tree_tokens or (12000 if device.type == "cuda" else 0),
            repeats=arguments.repeats if i == 0 else arguments.side_repeats,
            side_repeats=arguments.side_repeats,
            only=arguments.only.split(",") if arguments.only else [],
            deadline=time.monotonic() + share,
        )
        results, skipped, profiles = measure(setting)
        suffix = "" if i == 0 else f"_{model.replace('.', 'p')}"
        print(report.table(HEADS, [line(result) for result in results]))
        print("\n".join(map(rest, results)))
        figures |= summary(results, suffix)
        detail[model] = {
            "tokens_per_unit": setting.unit,
            "tokens_per_pass_at_most": setting.budget,
            "workloads": [described(result) for result in results],
            "not_measured": skipped,
            "where_time_goes": profiles,
        }
        path = report.save(name, figures, detail=detail, out=arguments.out)
        draw(
            [described(result) for result in results],
            f"Qwen3-{model} shape, random weights",
            path.with_name(f"{path.stem}{suffix}.png"),
        )
    print(json.dumps(figures, indent=1))


SHARES = {1: 1.0, 2: 0.62, 3: 0.5}
"""Models left -> share of the time left that the next one gets."""


def parse() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", default="tiny", help=f"one or more of {', '.join(SHAPES)}, separated by commas")
    parser.add_argument("--repeats", type=int, default=5, help="of workloads with a goal, for the first model")
    parser.add_argument("--side-repeats", type=int, default=3, help="of all others")
    parser.add_argument("--unit", type=int, help="tokens a turn samples, and reads (default 128 on cuda, 16 on cpu)")
    parser.add_argument("--budget", type=int, help="tokens per pass (default 32768 on cuda, 4096 on cpu)")
    parser.add_argument(
        "--oracle-tokens", type=int, help="least work per workload (default 60000 on cuda, 8192 on cpu)"
    )
    parser.add_argument("--tree-tokens", type=int, help="least work of the tree (default 12000 on cuda, 0 on cpu)")
    parser.add_argument("--only", help=f"workloads, separated by commas: {', '.join(w.name for w in WORKLOADS)}")
    parser.add_argument("--deadline", type=float, default=math.inf, help="seconds after which nothing new is begun")
    parser.add_argument("--no-check", action="store_true", help="leave out the FP32 comparison with the oracle")
    return parser.parse_args()


def measure(setting: Setting) -> tuple[list[Measured], list[str], dict[str, Any]]:
    """Every workload that fits the time, what was not measured, and profiles of some."""
    model = LayoutModel(build(setting.model, setting.device))
    source = Source(setting.unit, model.model.config.vocab_size)
    results, skipped, profiles = [], [], {}
    warm: set[int] = set()
    for workload in WORKLOADS:
        if setting.only and workload.name not in setting.only:
            continue
        if time.monotonic() > setting.deadline:
            skipped.append(workload.name)
            continue
        episodes = batch(workload, source, setting.oracle_tokens, setting.tree_tokens)
        try:
            results.append(time_ways(model, workload, episodes, setting, warm))
            print("  ".join(map(str, line(results[-1]))), flush=True)
            if setting.device.type == "cuda" and workload.name in PROFILED:
                profiles[workload.name] = {
                    way: profile(model, layouts_of(way, episodes, setting.budget), setting.device) for way in WAYS
                }
        except RuntimeError as error:  # out of memory, a compiler's refusal: the other workloads are still worth having
            skipped.append(f"{workload.name}: {error}")
            print(skipped[-1], flush=True)
    del model
    gc.collect()
    torch.cuda.empty_cache()
    return results, skipped, profiles


def time_ways(
    model: LayoutModel, workload: Workload, episodes: list[Episode], setting: Setting, warm: set[int]
) -> Measured:
    plan_s, passes = {}, {}
    for way in WAYS:
        began = time.perf_counter()
        passes[way] = layouts_of(way, episodes, setting.budget)
        plan_s[way] = time.perf_counter() - began
        warm_up(model, passes[way], setting.device, warm)
    samples: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(setting.repeats if workload.goal else min(setting.repeats, setting.side_repeats)):
        for way in WAYS:
            run = functools.partial(compute, model, passes[way], setting.device)
            samples[way].append(report.seconds(run, after=functools.partial(wait, setting.device)))
    head = 2.0 * model.model.config.vocab_size * model.model.config.hidden_size
    return Measured(
        workload=workload.name,
        tokens={way: sum(layout.num_tokens for layout in passes[way]) for way in WAYS},
        flops={way: flops(passes[way], model.cost, head) for way in WAYS},
        seconds={way: report.Spread.of(samples[way]) for way in WAYS},
        trained=sum(layout.num_trained for layout in passes["rows"]),
        plan_s=plan_s,
        chosen=plan(episodes, setting.budget, cost=model.cost).way,
        goal=workload.goal,
    )


def layouts_of(way: str, episodes: Sequence[Episode], budget: int) -> list[Layout]:
    if way == "tree":
        return PrefixTree(episodes).layouts(budget)
    if way == "rows":
        return row_layouts(episodes, budget)
    rows = [(e, row) for e, turns in enumerate(episodes) for row in unfold(turns)]
    return [lay_rows([rows[i] for i in members]) for members in pack([len(row) for _, row in rows], budget)]


def warm_up(model: LayoutModel, layouts: Sequence[Layout], device: torch.device, warm: set[int]) -> None:
    """Compile what is new: the attention for another padded length, and all of the first workload."""
    first = not warm
    for layout in layouts:
        length = Placed.of(layout, device).visibility.padded_length if device.type == "cuda" else 0
        if first or length not in warm:
            compute(model, [layout], device)
            warm.add(length)


def compute(model: LayoutModel, layouts: Iterable[Layout], device: torch.device) -> None:
    """Forward and backward over all layouts, as a learner does between two optimizer steps."""
    model.zero_grad(set_to_none=True)
    for layout in layouts:
        scored = model(Placed.of(layout, device))
        (scored.logprobs.sum() * -1e-3).backward()


def profile(model: LayoutModel, layouts: Sequence[Layout], device: torch.device) -> dict[str, float]:
    """Share of the device's time by kind of kernel, of the first two passes."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        compute(model, layouts[:2], device)
        wait(device)
    shares = dict.fromkeys(("attention", "matrix products", "other compiled", "other"), 0.0)
    for event in profiler.key_averages():
        shares[kind_of(event.key)] += event.self_device_time_total / 1e6
    return shares | {"total_s": sum(shares.values())}


def kind_of(kernel: str) -> str:
    if "flex_attention" in kernel:
        return "attention"
    if any(word in kernel for word in ("gemm", "nvjet", "cutlass", "cublas")):
        return "matrix products"
    return "other compiled" if kernel.startswith("triton_") else "other"


def place(device: torch.device) -> str:
    """What the results are named after."""
    return torch.cuda.get_device_name().split()[-1].lower() if device.type == "cuda" else "cpu"


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def build(name: str, device: torch.device) -> PreTrainedModel:
    """The architecture with random weights: BF16 on a GPU, FP32 elsewhere."""
    config = Qwen3Config(**SHAPES[name], max_position_embeddings=40960, tie_word_embeddings=True)
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32, attn_implementation="sdpa"
        )
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def flops(layouts: Sequence[Layout], cost: Cost, head: float) -> Flops:
    return Flops(
        tokens=3 * cost.token * sum(layout.num_tokens for layout in layouts),
        attention=3 * cost.pair * sum(num_pairs(layout) for layout in layouts),
        head=3 * head * sum(layout.num_trained for layout in layouts),
    )


def summary(results: Sequence[Measured], suffix: str) -> dict[str, float]:
    """The figures to be held: linear chats and compaction as rows, the rest as the tree."""
    figures: dict[str, float] = {}
    by_name = {result.workload: result for result in results}
    for name, result in by_name.items():
        if name.startswith("linear"):
            figures[f"speedup_{name}{suffix}"] = result.speedup("rows")
    if "forks_3" in by_name:
        result = by_name["forks_3"]
        figures[f"speedup_forks{suffix}"] = result.speedup("tree")
        figures[f"speedup_forks_rows{suffix}"] = result.speedup("rows")
        figures[f"tree_over_token_ratio{suffix}"] = result.speedup("tree") / result.token_ratio("tree")
        figures[f"tree_over_flop_ratio{suffix}"] = result.speedup("tree") / result.flop_ratio("tree")
    return figures


def described(result: Measured) -> dict[str, Any]:
    return {
        "workload": result.workload,
        "goal": result.goal,
        "trained_tokens": result.trained,
        "chosen_by_cost_model": result.chosen,
        "ways": {
            way: {
                "tokens": result.tokens[way],
                "seconds_median": result.seconds[way].median,
                "seconds_low": result.seconds[way].low,
                "seconds_high": result.seconds[way].high,
                "repeats": len(result.seconds[way].samples),
                "plan_s": result.plan_s[way],
                "token_ratio": result.token_ratio(way),
                "attention_ratio": result.attention_ratio(way),
                "flop_ratio": result.flop_ratio(way),
                "speedup": result.speedup(way),
                "flops": result.flops[way]._asdict(),
                "teraflops_per_s": sum(result.flops[way]) / result.seconds[way].median / 1e12,
            }
            for way in WAYS
        },
    }


def rest(result: Measured) -> str:
    """Where the ratio of tokens goes on its way to the speed-up."""
    best = max(("rows", "tree"), key=result.speedup)
    return (
        f"{result.workload}: {result.token_ratio(best):.2f} times fewer tokens; {result.attention_ratio(best):.2f} times "
        f"less work with attention, {result.flop_ratio(best):.2f} with the head too; {result.speedup(best):.2f} measured"
    )


HEADS = ["workload", "tokens", "rows", "tree", "oracle s", "rows s", "tree s", "rows x", "tree x", "of tokens", "goal"]


def line(result: Measured) -> list[object]:
    best = max(("rows", "tree"), key=result.speedup)
    return [
        result.workload,
        *(result.tokens[way] for way in WAYS),
        *(result.seconds[way].median for way in WAYS),
        *(f"{result.speedup(way):.2f} ({result.token_ratio(way):.2f})" for way in WAYS[1:]),
        result.speedup(best) / result.token_ratio(best),
        result.goal or "",
    ]


if __name__ == "__main__":
    main()
