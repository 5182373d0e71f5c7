"""Wall-clock of forward + backward over the same episodes, computed three ways in one run.

    oracle   every turn a row of its own
    rows     turns folded into the fewest timelines
    tree     every shared prefix computed once

All three run through the same code (packed layouts, the same attention, gradient checkpointing, loss on sampled tokens
with a chunked head), each in passes of the size that is quickest for it: large ones keep a GPU busy, small ones leave room
to compute nothing twice. So the ratios measure what is computed and not how. Unless told not to, it also holds rows and
tree to the untouched model in FP32, turn by turn. Examples:

    python -m benchmarks.timelines --device cpu --model tiny
    python -m benchmarks.timelines --device cuda --model 4b --deadline 300 --out results

Results are saved after every workload, so what is cut short keeps what it has; with `--only`, beside those of other
workloads measured earlier.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from benchmarks import report
from benchmarks.timelines.figure import draw
from benchmarks.timelines.oracle import compare, worst
from benchmarks.timelines.results import HEADS, WAYS, Flops, Measured, described, line, rest, summary
from benchmarks.timelines.workloads import WORKLOADS, Episode, Source, Workload, batch
from swarmq.learner.model.activation_checkpointing import ActivationCheckpointing
from swarmq.learner.model.layout_model import LayoutModel, PlacedLayout
from swarmq.timeline import Cost, FoldedEpisodes, Layout, PrefixTree, lay_rows, pack, plan_layouts, plan_rows, unfold

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
    "85m": {
        "vocab_size": 2048,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "head_dim": 64,
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
    budgets: tuple[int, ...]
    """Tokens of a pass at most, to choose from."""
    oracle_tokens: int
    tree_tokens: tuple[int, int]
    """Of workloads with a goal, and of all others."""
    goals: Repeats
    others: Repeats
    only: list[str]
    deadline: float
    """Of time.monotonic()."""


class Repeats(NamedTuple):
    oracle: int
    folded: int


class Run(NamedTuple):
    """What there is so far."""

    measured: list[Measured]
    not_measured: list[str]
    profiles: dict[str, Any]


def main() -> None:
    arguments = parse()
    began = time.monotonic()
    device = torch.device(arguments.device)
    cuda = device.type == "cuda"
    setting = Setting(
        model=arguments.model,
        device=device,
        unit=arguments.unit or (128 if cuda else 16),
        budgets=tuple(arguments.budget or ((65536, 16384) if cuda else (4096,))),
        oracle_tokens=arguments.oracle_tokens or (0 if cuda else 8192),
        tree_tokens=tuple(arguments.tree_tokens or ((30000, 12000) if cuda else (0, 0))),
        goals=Repeats(*arguments.repeats),
        others=Repeats(*arguments.side_repeats),
        only=arguments.only.split(",") if arguments.only else [],
        deadline=began + arguments.deadline,
    )
    check = {} if arguments.no_check else compare(device)
    run = Run([], [], {})
    for _ in measure(setting, run):
        save(setting, check, run, arguments.out, finished=False)
    save(setting, check, run, arguments.out, finished=True)
    print(report.table(HEADS, [line(result) for result in run.measured]))
    print("\n".join(map(rest, run.measured)))
    print(json.dumps(worst(check) | summary(run.measured), indent=1))


def save(setting: Setting, check: dict[str, dict[str, float]], run: Run, out: Path | None, *, finished: bool) -> None:
    name, done = name_of(setting), {result.workload for result in run.measured}
    figures, detail = report.kept(name, out=out) if setting.only else ({}, {})
    kept = [each for each in detail.get("workloads", []) if each["workload"] not in done]
    order = [each.name for each in WORKLOADS]
    workloads = sorted(
        kept + [described(result) for result in run.measured], key=lambda each: order.index(each["workload"])
    )
    path = report.save(
        name,
        figures | worst(check) | summary(run.measured),
        detail={
            "model": setting.model,
            "tokens_per_unit": setting.unit,
            "fp32_check": check or detail.get("fp32_check", {}),
            "workloads": workloads,
            "not_measured": run.not_measured,
            "where_time_goes": detail.get("where_time_goes", {}) | run.profiles,
        },
        out=out,
        finished=finished,
    )
    if finished:
        draw(workloads, f"Qwen3-{setting.model} shape, random weights", path.with_suffix(".png"))


def parse() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", default="tiny", choices=SHAPES)
    for name, default, which in (("repeats", (5, 5), "workloads with a goal"), ("side-repeats", (5, 5), "all others")):
        parser.add_argument(
            f"--{name}",
            type=int,
            nargs=2,
            default=default,
            metavar=("ORACLE", "FOLDED"),
            help=f"measurements of {which} (default {default[0]} {default[1]})",
        )
    parser.add_argument("--unit", type=int, help="tokens a turn samples, and reads (default 128 on cuda, 16 on cpu)")
    parser.add_argument(
        "--budget",
        type=int,
        nargs="+",
        help="tokens per pass at most; of several, each way takes the quickest (default 65536 16384 on cuda, 4096 on cpu)",
    )
    parser.add_argument("--oracle-tokens", type=int, help="least work per workload (default 0 on cuda, 8192 on cpu)")
    parser.add_argument(
        "--tree-tokens",
        type=int,
        nargs=2,
        metavar=("GOALS", "OTHERS"),
        help="least work of the tree, of workloads with a goal and of all others (default 30000 12000 on cuda, 0 0 on cpu)",
    )
    parser.add_argument("--only", help=f"workloads, separated by commas: {', '.join(w.name for w in WORKLOADS)}")
    parser.add_argument("--deadline", type=float, default=math.inf, help="seconds after which nothing new is begun")
    parser.add_argument("--no-check", action="store_true", help="leave out the FP32 comparison with the oracle")
    return parser.parse_args()


def measure(setting: Setting, run: Run) -> Iterator[None]:
    """Every workload that fits the time, into `run`; a stop after each."""
    model = LayoutModel(build(setting.model, setting.device))
    model.compile_layers()
    source = Source(setting.unit, model.model.config.vocab_size)
    warm: set[int] = set()
    for workload in WORKLOADS:
        if setting.only and workload.name not in setting.only:
            continue
        if time.monotonic() > setting.deadline:
            run.not_measured.append(workload.name)
            continue
        episodes = batch(workload, source, setting.oracle_tokens, setting.tree_tokens[workload.goal is None])
        try:
            run.measured.append(time_ways(model, workload, episodes, setting, warm))
            print("  ".join(map(str, line(run.measured[-1]))), flush=True)
            if setting.device.type == "cuda" and workload.name in PROFILED:
                run.profiles[workload.name] = {
                    way: profile(model, layouts_of(way, episodes, run.measured[-1].pass_tokens[way]), setting.device)
                    for way in WAYS
                }
        except RuntimeError as error:  # out of memory, a compiler's refusal: the other workloads are still worth having
            run.not_measured.append(f"{workload.name}: {error}")
            print(run.not_measured[-1], flush=True)
        yield


def time_ways(
    model: LayoutModel, workload: Workload, episodes: list[Episode], setting: Setting, warm: set[int]
) -> Measured:
    chosen = {way: quickest(model, way, episodes, setting, warm) for way in WAYS}
    passes = {way: each.layouts for way, each in chosen.items()}
    samples: dict[str, list[float]] = {way: [] for way in WAYS}
    repeats = setting.goals if workload.goal else setting.others
    for i in range(max(repeats)):
        for way in WAYS:
            if i < (repeats.oracle if way == "oracle" else repeats.folded):
                run = functools.partial(compute, model, passes[way], setting.device)
                samples[way].append(report.seconds(run, after=functools.partial(wait, setting.device)))
    head = 2.0 * model.model.config.vocab_size * model.model.config.hidden_size
    return Measured(
        workload=workload.name,
        tokens={way: sum(layout.num_tokens for layout in passes[way]) for way in WAYS},
        flops={way: flops(passes[way], model.cost, head) for way in WAYS},
        seconds={way: report.Spread.of(samples[way]) for way in WAYS},
        trained=sum(layout.num_trained for layout in passes["rows"]),
        plan_s={way: each.plan_s for way, each in chosen.items()},
        pass_tokens={way: each.budget for way, each in chosen.items()},
        chosen=plan_layouts(FoldedEpisodes(episodes), max(setting.budgets), cost=model.cost).way,
        goal=workload.goal,
    )


class Passes(NamedTuple):
    """One way to compute a workload."""

    budget: int
    layouts: list[Layout]
    plan_s: float


def quickest(model: LayoutModel, way: str, episodes: Sequence[Episode], setting: Setting, warm: set[int]) -> Passes:
    """Of the budgets to choose from, each measured once."""
    candidates: list[Passes] = []
    for budget in setting.budgets:
        began = time.perf_counter()
        layouts = layouts_of(way, episodes, budget)
        plan_s = time.perf_counter() - began
        if not candidates or len(layouts) != len(candidates[-1].layouts):
            warm_up(model, layouts, setting.device, warm)
            candidates.append(Passes(budget, layouts, plan_s))
    if len(candidates) == 1:
        return candidates[0]
    after = functools.partial(wait, setting.device)
    return min(
        candidates,
        key=lambda each: report.seconds(functools.partial(compute, model, each.layouts, setting.device), after=after),
    )


def layouts_of(way: str, episodes: Sequence[Episode], budget: int) -> list[Layout]:
    if way == "tree":
        return PrefixTree(episodes).layouts(budget)
    if way == "rows":
        return plan_rows(episodes, budget)
    rows = [(e, row) for e, turns in enumerate(episodes) for row in unfold(turns)]
    return [lay_rows([rows[i] for i in members]) for members in pack([len(row) for _, row in rows], budget)]


def warm_up(model: LayoutModel, layouts: Sequence[Layout], device: torch.device, warm: set[int]) -> None:
    """Compile what is new: the attention for another padded length, and all of the first workload."""
    first = not warm
    for layout in layouts:
        length = PlacedLayout.of(layout, device).visibility.padded_length if device.type == "cuda" else 0
        if first or length not in warm:
            compute(model, [layout], device)
            warm.add(length)


def compute(model: LayoutModel, layouts: Iterable[Layout], device: torch.device) -> None:
    """Forward and backward over all layouts, as a learner does between two optimizer steps."""
    model.zero_grad(set_to_none=True)
    for layout in layouts:
        scored = model(PlacedLayout.of(layout, device))
        (scored.logprobs.sum() * -1e-3).backward()


def profile(model: LayoutModel, layouts: Sequence[Layout], device: torch.device) -> dict[str, float]:
    """Seconds of the device's time by kind of kernel, of the first pass."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        compute(model, layouts[:1], device)
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


def name_of(setting: Setting) -> str:
    """Of the result: after the device, and the model if it is not the one usual there."""
    usual = setting.model == ("1.7b" if setting.device.type == "cuda" else "tiny")
    return f"timelines_{report.place(setting.device.type)}" + ("" if usual else f"_{setting.model.replace('.', 'p')}")


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
    ActivationCheckpointing.enable(model)
    return model


def flops(layouts: Sequence[Layout], cost: Cost, head: float) -> Flops:
    return Flops(
        tokens=3 * cost.token * sum(layout.num_tokens for layout in layouts),
        attention=3 * cost.attention(layouts),
        head=3 * head * sum(layout.num_trained for layout in layouts),
    )
