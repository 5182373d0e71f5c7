"""The learner in BF16 and with FP8 matrix products: achieved TFLOP/s, and loss curves on the same batches.

Speed: whole optimizer steps of the trainer on random tokens, one row an episode, from FP32 master weights of a random model. The 8 B
model (Qwen3-8B's architecture) fits one GPU of 141 GB with `adamw_8bit`, activation checkpointing as far as memory requires and
nothing else beside it; where it does not fit, as many of its layers are measured as do, and the figures' names say how many.
TFLOP/s count model FLOPs of forward and backward pass (6 per parameter and token, the head for trained tokens only), never
recomputation: `tflops_` with causal attention (its pairs once, not the whole square), `tflops_matrices_` without attention.
Figures of the first length have no suffix. MFU is the former over the rate of a large BF16 matrix product measured in the same run, also for FP8.

Curves: the cross-entropy of fixed batches of a random chain of tokens, the same initial weights for each precision, AdamW.

A part that fails prints its traceback, and the next begins.

    python -m benchmarks.learner_precisions --device cpu --model tiny --curve tiny --rows 128 --tokens 512 --steps 4
    python -m benchmarks.learner_precisions --device cuda --model 8b --curve 85m --rows 2048,8192 --tokens 32768 --deadline-s 200 --out results
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3Config

from benchmarks import report
from benchmarks.learner import as_episodes, episodes, free, half_of, make_shape, peak, reset_peak
from benchmarks.timelines.run import LARGE, wait
from benchmarks.timelines.run import SHAPES as SMALLER
from swarmq.config import Sft, Train
from swarmq.errors import LearnerError
from swarmq.learner.batching.micro_batches import build_rank_batch
from swarmq.learner.memory.estimate import HEADROOM
from swarmq.learner.memory.plan import GpuMemory, check_gpu
from swarmq.learner.model.float8 import Float8Linear, convert_layers
from swarmq.learner.store.records import BatchIndex, BatchRecord
from swarmq.learner.train.throughput import count_model_flops, measure_matrix_rate
from swarmq.learner.train.trainer import Trainer

SHAPES = SMALLER | {
    "8b": LARGE
    | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32}
    | {"tie_word_embeddings": False}
}
PRECISIONS = ("bf16", "fp8")
HEADS = ["model", "row", "precision", "s/step", "tokens/s", "TFLOP/s", "without attention", "MFU", "GiB"]
BRANCHES = 4
"""Tokens that may follow a token of the chain, all equally likely: no loss is below log 4."""


def main() -> int:
    arguments = parse()
    device = torch.device(arguments.device)
    saved_as = f"learner_{report.place(device.type)}"
    figures, detail = report.kept(saved_as, out=arguments.out)
    deadline = time.monotonic() + arguments.deadline_s
    failed = 0

    def save(*, finished: bool) -> None:
        print(report.save(saved_as, figures, detail=detail, out=arguments.out, finished=finished), flush=True)

    parts: list[tuple[str, Callable[[], None]]] = [
        ("rates", lambda: measure_rates(detail, device)),
        ("speed", lambda: measure_speed(figures, detail, arguments, device, deadline, save)),
        ("curves", lambda: draw_curves(figures, detail, arguments, device)),
    ]
    for name, part in parts:
        print(f"== {name}", flush=True)
        try:
            part()
        except Exception:
            failed += 1
            traceback.print_exc()
        free()
        save(finished=False)
    save(finished=not failed)
    return failed


def parse() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", default="tiny", choices=SHAPES, help="of the speed")
    parser.add_argument("--curve", default="tiny", choices=SHAPES, help="model of the loss curves")
    parser.add_argument("--rows", default="2048", help="tokens of an episode, several separated by commas")
    parser.add_argument("--tokens", type=int, default=32768, help="of one optimizer step")
    parser.add_argument("--pass-tokens", type=int, default=16384, help="of one forward and backward pass")
    parser.add_argument("--optimizer", help="default adamw_8bit on cuda, else adamw")
    parser.add_argument("--repeats", type=int, default=3, help="of a step, after one that is not counted")
    parser.add_argument("--steps", type=int, default=30, help="of each curve")
    parser.add_argument("--seeds", type=int, default=2, help="of the curves")
    parser.add_argument(
        "--profile", action="store_true", help="print the longest kernels of a step of the first length"
    )
    parser.add_argument("--deadline-s", type=float, default=1e9, help="no length and no precision begins later")
    parser.add_argument("--scratch", help="where the random weights are written, 2 bytes a parameter")
    return parser.parse_args()


def measure_rates(detail: dict[str, Any], device: torch.device) -> None:
    """Large matrix products alone, in BF16 and in FP8."""
    rates = {"bf16": measure_matrix_rate(device, half_of(device))}
    detail["matrix_rates"] = rates
    if device.type == "cuda":
        size, scale = 8192, torch.ones((), device=device)
        a, b = (torch.randn(size, size, device=device).to(torch.float8_e4m3fn) for _ in range(2))
        times = [
            report.seconds(
                lambda: torch.ops.swarmq.float8_product(a, b, scale, scale, torch.bfloat16, True),
                after=lambda: wait(device),
            )
            for _ in range(10)
        ]
        rates["fp8"] = 2.0 * size**3 / min(times)
    print({name: f"{rate / 1e12:.0f} TFLOP/s" for name, rate in rates.items()}, flush=True)


def measure_speed(
    figures: dict[str, float],
    detail: dict[str, Any],
    arguments: argparse.Namespace,
    device: torch.device,
    deadline: float,
    save: Callable[..., None],
) -> None:
    train = Train(
        mixed_precision="bf16",
        micro_batch_tokens=arguments.pass_tokens,
        optimizer=arguments.optimizer or ("adamw_8bit" if device.type == "cuda" else "adamw"),
        token_log=False,
        trackers=(),
    )
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as folder:
        shape = SHAPES[arguments.model]
        whole = shape["num_hidden_layers"]
        layers = count_fitting_layers(shape, train, folder, device)
        made_in = report.seconds(lambda: make_shape(shape | {"num_hidden_layers": layers}, folder, device))
        began = time.perf_counter()
        trainer = Trainer(folder, train)
        print(
            f"{layers} of {whole} layers; made in {made_in:.0f} s, loaded in {time.perf_counter() - began:.0f} s",
            flush=True,
        )
    name = arguments.model.replace(".", "p") + ("" if layers == whole else f"_{layers}layers")
    detail[f"precisions_{name}"] = kept = {
        "parameters": trainer.num_parameters, "layers": layers, "optimizer": train.optimizer,
        "tokens_per_step": arguments.tokens, "pass_tokens": arguments.pass_tokens,
        "convention": "model FLOPs without recomputation; with causal attention, and of matrices alone",
    }  # fmt: skip
    rows: list[list[object]] = []
    lengths = [int(length) for length in arguments.rows.split(",")]
    for precision in PRECISIONS:
        try:
            compute_in(trainer, precision)
        except Exception:
            traceback.print_exc()
            continue
        for length in lengths:
            if time.monotonic() > deadline:
                print(f"left out after the deadline: rows of {length}, {precision}", flush=True)
                continue
            short = f"{length // 1024}k" if length >= 1024 else str(length)
            batch = episodes(length, max(arguments.tokens // length, 1), shape["vocab_size"])
            try:
                made = time_steps(trainer, train, batch, arguments.repeats)
            except Exception:
                traceback.print_exc()
                trainer.optimizer.zero_grad()
                continue
            kept[f"{precision}_{short}"] = made
            if arguments.profile and length == lengths[0]:
                made["kernels_ms"] = profile_step(trainer, train, batch)
            suffix = precision if length == lengths[0] else f"{precision}_{short}"
            for figure in ("tflops", "tflops_matrices", "mfu", "tokens_per_s"):
                figures[f"{figure}_{name}_{suffix}"] = made[figure]
            columns = (made[key] for key in ("tokens_per_s", "tflops", "tflops_matrices", "mfu", "peak_gib"))
            rows.append([name, short, precision, made["seconds"]["median"], *columns])
            print(f"first step {made['first_step_s']:.0f} s\n{report.table(HEADS, rows[-1:])}", flush=True)
            save(finished=False)
    if rows:
        print(report.table(HEADS, rows), flush=True)


def count_fitting_layers(shape: dict[str, Any], train: Train, folder: str, device: torch.device) -> int:
    """The largest number of layers, all or a multiple of four, with which the learner's own check passes."""
    whole = int(shape["num_hidden_layers"])
    if device.type != "cuda":
        return whole
    total = torch.cuda.get_device_properties(device).total_memory
    free_now = torch.cuda.mem_get_info(device)[0]
    gpu = GpuMemory(total=total, free=int(min(free_now, HEADROOM * total)))
    for layers in [whole, *range(whole - whole % 4, 0, -4)]:
        config = Qwen3Config(**{"tie_word_embeddings": True} | shape | {"num_hidden_layers": layers})
        with tempfile.TemporaryDirectory(dir=folder) as outline:
            config.architectures = ["Qwen3ForCausalLM"]
            config.save_pretrained(outline)
            try:
                print(check_gpu(outline, train, ranks=1, full=False, gpu=gpu), flush=True)
            except LearnerError:
                print(f"{layers} layers do not fit", flush=True)
                continue
        return layers
    raise RuntimeError("not even four layers fit")


def compute_in(trainer: Trainer, precision: str) -> None:
    """Let the trainer's layers compute in another precision, as `train.mixed_precision` would from the start."""
    for each in trainer.lm.modules():
        if isinstance(each, Float8Linear):
            each.__class__ = nn.Linear
    if precision == "fp8":
        convert_layers(trainer.lm, trainer.accelerator.device)
    torch.compiler.reset()


def time_steps(trainer: Trainer, train: Train, batch: Any, repeats: int) -> dict[str, Any]:
    device = trainer.accelerator.device
    samples: list[float] = []
    fields: dict[str, Any] = {}
    reset_peak(device)
    for _ in range(repeats + 1):
        index = BatchIndex(record=trainer.version + 1, version=trainer.version + 1)
        began = time.perf_counter()
        fields = trainer.step(BatchRecord(index=index, episodes=batch, settings=train))
        wait(device)
        samples.append(time.perf_counter() - began)
    spread = report.Spread.of(samples[1:])
    work = build_rank_batch(batch, train, trainer.traits)
    cost, head = trainer.traits.cost, trainer._head_flops  # noqa: SLF001
    flops = count_model_flops(work.plan.layouts, cost, head)
    matrices = count_model_flops(work.plan.layouts, msgspec.structs.replace(cost, pair=0.0, windowed={}), head)
    return {
        "seconds": spread._asdict(),
        "first_step_s": samples[0],
        "tokens_per_s": work.plan.tokens / spread.median,
        "flops": flops,
        "tflops": flops / spread.median / 1e12,
        "tflops_matrices": matrices / spread.median / 1e12,
        "mfu": flops / spread.median / measure_matrix_rate(device, half_of(device)),
        "peak_gib": peak(device),
        **{name: fields[name] for name in ("passes", "layout", "loss", "grad_norm")},
    }


def profile_step(trainer: Trainer, train: Train, batch: Any) -> dict[str, float]:
    """Milliseconds of one step in each of the 25 kernels (on a CPU: operators) that take longest."""
    cuda = trainer.accelerator.device.type == "cuda"
    kind = ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU
    index = BatchIndex(record=trainer.version + 1, version=trainer.version + 1)
    with profile(activities=[kind]) as taken:
        trainer.step(BatchRecord(index=index, episodes=batch, settings=train))
        wait(trainer.accelerator.device)
    spent = {
        each.key: (each.self_device_time_total if cuda else each.self_cpu_time_total) / 1e3
        for each in taken.key_averages()
    }
    longest = dict(sorted(spent.items(), key=lambda item: -item[1])[:25])
    print(f"all kernels: {sum(spent.values()):.0f} ms")
    for name, milliseconds in longest.items():
        print(f"{milliseconds:8.1f} ms  {name[:150]}", flush=True)
    return longest


def draw_curves(
    figures: dict[str, float], detail: dict[str, Any], arguments: argparse.Namespace, device: torch.device
) -> None:
    shape = SHAPES[arguments.curve]
    vocab, name = shape["vocab_size"], arguments.curve.replace(".", "p")
    train = Train(
        mixed_precision="bf16", learning_rate=1e-3, warmup_steps=5, token_log=False, trackers=(),
        micro_batch_tokens=16384, sft=Sft(demonstrations="none"),
    )  # fmt: skip
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as folder:
        make_shape(shape, folder, device)
        trainer = Trainer(folder, train)
    length, count = (512, 32) if device.type == "cuda" else (64, 4)
    batches = [as_episodes(chain(vocab, count, length, seed), vocab) for seed in range(4)]
    works = [trainer.build_supervised(batch, train) for batch in batches]
    curves: dict[str, list[list[float]]] = {}
    for precision in PRECISIONS:
        try:
            compute_in(trainer, precision)
            curves[precision] = [
                follow(trainer, works, train, arguments.steps, seed) for seed in range(arguments.seeds)
            ]
        except Exception:
            traceback.print_exc()
            trainer.optimizer.zero_grad()
            continue
        for seed, curve in enumerate(curves[precision]):
            print(f"{precision}, seed {seed}: {' '.join(f'{loss:.4f}' for loss in curve)}", flush=True)
    detail[f"curves_{name}"] = {"steps": arguments.steps, "tokens_per_step": length * count, "losses": curves}
    if len(curves) == len(PRECISIONS):
        for precision in PRECISIONS:
            figures[f"loss_mean_{name}_{precision}"] = float(np.mean(curves[precision]))
            print(f"{precision}: {np.mean(curves[precision]):.4f} nats on average", flush=True)


def chain(vocab: int, count: int, length: int, seed: int) -> np.ndarray:
    """Rows [count, length] of a random walk in which each token has BRANCHES successors, the same for every seed."""
    successors = np.random.default_rng(0).integers(0, vocab, (vocab, BRANCHES))
    rng = np.random.default_rng(seed + 1)
    rows = [rng.integers(0, vocab, count)]
    for _ in range(length - 1):
        rows.append(successors[rows[-1], rng.integers(0, BRANCHES, count)])
    return np.stack(rows, axis=1)


def follow(trainer: Trainer, works: list[Any], train: Train, steps: int, seed: int) -> list[float]:
    """Losses of optimizer steps from fresh weights, over the batches in turn."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in trainer.lm.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
            else:
                parameter.fill_(1.0)  # norms
    trainer.optimizer.zero_grad()
    trainer.optimizer.state.clear()
    losses = []
    for step in range(1, steps + 1):
        losses.append(trainer._accumulate_cross_entropy(works[step % len(works)], 1.0))  # noqa: SLF001
        norm = trainer._clip(train)  # noqa: SLF001
        trainer._update(norm, train, step, anything=True)  # noqa: SLF001
    return losses


if __name__ == "__main__":
    sys.exit(main())
