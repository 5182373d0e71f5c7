"""The tables of docs/learning.md: what the GPU runs came to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from benchmarks.tables_common import ends, table

MODELS = (("1.7 B", "1p7b"), ("4 B", "4b"))
TIMELINES = {"1.7 B": "timelines_h200", "4 B": "timelines_h200_4b"}
WORKLOADS = (
    ("chats of 2, 5, 10, 20, 30 turns, rows", "rows", ("linear_2", "linear_5", "linear_10", "linear_20", "linear_30")),
    ("agents that fork in 2, 3, 4, rows of merged prefixes", "rows", ("forks_2", "forks_3", "forks_4")),
    ("the same, tree", "tree", ("forks_2", "forks_3", "forks_4")),
    ("thoughts stripped by the template, 10 turns, tree", "tree", ("think_stripped_10",)),
    ("history summarised every 8 turns, tree", "tree", ("compacted_24",)),
    ("a group's shared prompt of 0, 1k, 4k, 8k tokens, tree", "tree", ("prompt_0", "prompt_1k", "prompt_4k", "prompt_8k")),
)  # fmt: skip


def timelines_block(known: dict[str, Any]) -> Iterator[str]:
    """Speed-ups over a row for every turn, a column for each model."""
    runs = {model: known[name] for model, name in TIMELINES.items() if name in known}
    yield from _table(
        ("episodes", *runs),
        ((words, *(_speedups(run, way, names) for run in runs.values())) for words, way, names in WORKLOADS),
    )
    for model, run in runs.items():
        figures = run["figures"]
        yield (
            f"{model}: trees of agents that fork in 3 reach {figures['tree_over_token_ratio']:.2f} of the ratio of tokens, "
            f"{figures['tree_over_flop_ratio']:.2f} of that of floating-point operations (`{run['command']}`, "
            f"{run['hardware']}).\n\n"
        )


def learner_block(known: dict[str, Any]) -> Iterator[str]:
    """Whole optimizer steps beside plain transformers."""
    if "learner_h200" not in known:
        return
    record = known["learner_h200"]
    tokens = record["detail"]["tokens_per_step"]

    def cells(model: str, key: str, length: str) -> tuple[Any, ...]:
        made = record["detail"][f"{key}_{length}"]
        ours, plain = (tokens / made[who]["seconds"]["median"] for who in ("swarmq", "plain"))
        return (
            f"{model}, {length}",
            f"{ours:,.0f}",
            f"{made['swarmq']['mfu']:.2f}",
            f"{plain:,.0f}",
            f"{ours / plain:.1f}",
        )

    yield from _table(
        ("model, rows", "tokens/s", "MFU", "plain transformers, the same run", "ratio"),
        (cells(model, key, length) for model, key in MODELS for length in ("2k", "16k")),
    )


def loop_block(known: dict[str, Any]) -> Iterator[str]:
    """The whole system on one GPU."""
    if "loop_h200" not in known:
        return
    figures = known["loop_h200"]["figures"]
    phases = ("pause", "step", "wait", "train", "push")

    def cells(model: str, key: str) -> tuple[Any, ...]:
        rates = (f"{figures[f'{rate}_tokens_per_s_{key}']:,.0f}" for rate in ("sampled", "trained"))
        return (
            model,
            *(f"{figures[f'{phase}_{key}_s']:.2f} s" for phase in phases),
            *rates,
            f"{figures[f'gpu_idle_share_{key}']:.3f}",
        )

    yield from _table(
        ("model", "pause of a push", "step", "waiting", "training", "push", "tokens/s sampled", "trained", "GPU idle"),
        (cells(model, key) for model, key in MODELS if f"pause_{key}_s" in figures),
    )


def learns_block(known: dict[str, Any]) -> Iterator[str]:
    """Held-out reward before and after, a row for each loss."""
    if "learns_h200" not in known:
        return
    runs = known["learns_h200"]["detail"]["runs"]
    seeds = sorted({run["seed"] for run in runs})

    def cell(loss: str, seed: int) -> str:
        found = [run for run in runs if (run["loss"], run["seed"]) == (loss, seed)]
        if not found:
            return "-"
        before, after = ends(found[0]["held_out"])
        return f"{before:.2f} → {after:.2f} ({found[0]['seconds']:.0f} s)"

    yield from _table(
        ("loss", *(f"seed {seed}" for seed in seeds)),
        ((f"`{loss}`", *(cell(loss, seed) for seed in seeds)) for loss in dict.fromkeys(run["loss"] for run in runs)),
    )


def scaling_block(known: dict[str, Any]) -> Iterator[str]:
    """FSDP2 on several GPUs, and engines that go on while the learner computes."""
    if "scaling_h200" not in known:
        return
    record = known["scaling_h200"]
    figures = record["figures"]
    counts = sorted(int(name.rpartition("_")[2]) for name in figures if name.startswith("tokens_per_s_"))
    yield from _table(
        ("GPUs", "tokens/s", "efficiency"),
        (
            (n, f"{figures[f'tokens_per_s_{n}']:,.0f}", f"{figures.get(f'fsdp2_efficiency_{n}', 1.0):.2f}")
            for n in counts
        ),
    )
    if "split" in record["detail"]:
        yield from split_words(record["detail"]["split"])


def split_words(split: dict[str, Any]) -> Iterator[str]:
    """A GPU for the learner and one for an engine."""
    total = sum(split["staleness"].values())
    stale = ", ".join(f"{steps} for {count / total:.0%}" for steps, count in sorted(split["staleness"].items()))
    phases = {phase: spread["median"] for phase, spread in split["phases"].items()}
    yield (
        f"With one GPU for the learner and the other for an engine that gets its weights by {' and '.join(split['push_ways']).upper()}, "
        f"the engine's is busy {split['engine_busy']:.0%} of the time in which the learner computes; a step takes "
        f"{phases['step_s']:.2f} s, of which {phases['train_s']:.2f} s are computing and {phases['wait_s']:.2f} s waiting for episodes, "
        f"and a push pauses the engine for {phases['pause_s']:.2f} s. Staleness of what was trained, in steps: {stale}.\n\n"
    )


def trl_block(known: dict[str, Any]) -> Iterator[str]:
    """A peer, side by side."""
    if "trl_h200" not in known:
        return
    record = known["trl_h200"]
    ours, theirs = record["detail"]["swarmq"], record["detail"]["trl"]
    rows = (("swarmq", ours), ("TRL", theirs))
    yield from _table(
        ("who", "episodes/s", "trained tokens/s", "s/step"),
        (
            (who, f"{made['samples_per_s']:.1f}", f"{made['tokens_per_s']:,.0f}", f"{made['step_s']:.2f}")
            for who, made in rows
        ),
    )


def _speedups(run: dict[str, Any], way: str, names: Iterable[str]) -> str:
    """Measured, and in brackets how many times fewer tokens."""
    known = {each["workload"]: each["ways"][way] for each in run["detail"]["workloads"]}
    return ", ".join(
        f"{known[name]['speedup']:.1f} ({known[name]['token_ratio']:.1f})" if name in known else "-" for name in names
    )


def _table(heads: Iterable[Any], rows: Iterable[Iterable[Any]]) -> Iterator[str]:
    """Between empty lines."""
    yield "\n"
    yield from table(heads, rows)
    yield "\n"
