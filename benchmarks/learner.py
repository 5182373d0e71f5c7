"""The learner alone: tokens a second and model FLOP utilisation of whole optimizer steps, against plain transformers.

One batch of episodes of one length is trained by swarmq's trainer, and the same rows by transformers with SDPA,
gradient checkpointing, autocast and AdamW; both in this run, on this device, from FP32 master weights. Random weights of
real architectures serve: speed does not depend on what they say. MFU is model FLOPs (recomputation not counted) over the
rate of a large matrix product, measured here as well. Results are saved after every length of rows, beside those of models
measured earlier.

    python -m benchmarks.learner --device cpu --model tiny --rows 128,512 --tokens 2048
    python -m benchmarks.learner --device cuda --model 1.7b,4b --rows 2048,16384 --tokens 65536 --out results
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch.nn import functional as F  # noqa: N812
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from benchmarks import report
from benchmarks.timelines.run import SHAPES, wait
from swarmq.config import Train
from swarmq.learner.batching.micro_batches import build_rank_batch
from swarmq.learner.store.records import BatchIndex, BatchRecord
from swarmq.learner.train.throughput import count_model_flops, measure_matrix_rate
from swarmq.learner.train.trainer import Trainer
from swarmq.messages import Rollout, Slot, Turn, VersionSpan, pack_floats, pack_ids

HEADS = ["model", "row", "trainer", "s/step", "tokens/s", "MFU", "GiB"]
PROMPT_SHARE = 0.25
"""Of a row, not trained."""


def main() -> None:
    arguments = parse()
    device = torch.device(arguments.device)
    saved_as = f"learner_{report.place(device.type)}"
    figures, detail = report.kept(saved_as, out=arguments.out)
    rows: list[list[object]] = []
    for model in arguments.model.split(","):
        name = model.replace(".", "p")
        with tempfile.TemporaryDirectory(dir=arguments.scratch) as folder:
            make_model(model, folder, device)
            ratios = []
            for length in map(int, arguments.rows.split(",")):
                batch = episodes(length, max(arguments.tokens // length, 1), SHAPES[model]["vocab_size"])
                ours = swarmq(folder, batch, arguments)
                theirs = plain(folder, batch, arguments, device)
                ratio = theirs["seconds"].median / ours["seconds"].median
                ratios.append(ratio)
                short = f"{length // 1024}k" if length >= 1024 else str(length)
                figures[f"mfu_{name}_{short}"] = ours["mfu"]
                figures[f"tokens_per_s_{name}_{short}"] = length * len(batch) / ours["seconds"].median
                detail[f"{name}_{short}"] = {
                    who: {**made, "seconds": made["seconds"]._asdict()}
                    for who, made in (("swarmq", ours), ("plain", theirs))
                }
                for who, made in (("swarmq", ours), ("transformers", theirs)):
                    speed = length * len(batch) / made["seconds"].median
                    rows.append([model, short, who, made["seconds"].median, speed, made["mfu"], made["peak_gib"]])
                    print(report.table(HEADS, rows[-1:]), flush=True)
                figures[f"over_baseline_{name}"] = min(ratios)
                report.save(saved_as, figures, detail=detail, out=arguments.out, finished=False)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    detail["matrix_rate"] = measure_matrix_rate(device, dtype)
    detail["tokens_per_step"] = arguments.tokens
    print(report.table(HEADS, rows))
    print(report.save(saved_as, figures, detail=detail, out=arguments.out))


def parse() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", default="tiny", help=f"one or more of {', '.join(SHAPES)}, separated by commas")
    parser.add_argument("--rows", default="128,512", help="tokens of an episode, several separated by commas")
    parser.add_argument("--tokens", type=int, default=2048, help="of one optimizer step")
    parser.add_argument("--pass-tokens", type=int, default=16384, help="of one forward and backward pass")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--scratch", help="where the random weights are written, 2 bytes a parameter")
    return parser.parse_args()


def make_model(model: str, folder: str, device: torch.device) -> None:
    make_shape(SHAPES[model], folder, device)


def make_shape(shape: Mapping[str, Any], folder: str, device: torch.device) -> None:
    """Write a random Qwen3 of this shape, with a tied head unless the shape says otherwise."""
    torch.manual_seed(0)
    config = Qwen3Config(**{"tie_word_embeddings": True, **shape}, max_position_embeddings=40960)
    with device:  # billions of random numbers take minutes on a processor
        lm = Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16)  # noqa: SLF001
    lm.save_pretrained(folder)
    del lm
    free()


def episodes(length: int, count: int, vocab: int) -> tuple[Rollout, ...]:
    """Groups of four one-turn episodes, every token random: nothing can be shared."""
    rng = np.random.default_rng(length)
    return as_episodes(rng.integers(0, vocab, (count, length)), vocab)


def as_episodes(tokens: np.ndarray, vocab: int) -> tuple[Rollout, ...]:
    """Groups of four one-turn episodes with the tokens [count, length]."""
    prompt = int(tokens.shape[1] * PROMPT_SHARE)
    made = []
    for number, ids in enumerate(tokens.tolist()):
        sampled = ids[prompt:]
        turn = Turn(
            run="bench",
            episode_id=str(number),
            policy="main",
            call_id="c",
            request_id="c",
            prompt_ids=pack_ids(ids[:prompt]),
            sampled_ids=pack_ids(sampled),
            logprobs=pack_floats([-float(np.log(vocab))] * len(sampled)),
            versions=(VersionSpan(version=0, start=0, end=len(sampled)),),
        )
        made.append(
            Rollout(
                run="bench",
                policy="main",
                episode_id=str(number),
                slot=Slot(task_id=str(number // 4), repeat=number % 4),
                kind="default",
                group_id=f"{number // 4}/0",
                group_members=4,
                group_size=4,
                reward=float(number % 2),
                turns=(turn,),
            )
        )
    return tuple(made)


def swarmq(folder: str, batch: tuple[Rollout, ...], arguments: argparse.Namespace) -> dict[str, Any]:
    """Whole steps of the trainer."""
    train = Train(
        micro_batch_tokens=max(
            arguments.pass_tokens, len(batch[0].turns[0].prompt_ids + batch[0].turns[0].sampled_ids) // 4
        ),
        token_log=False,
    )
    trainer = Trainer(folder, train)
    device = trainer.accelerator.device
    samples: list[float] = []
    fields: dict[str, Any] = {}
    reset_peak(device)
    for version in range(1, arguments.repeats + 2):
        index = BatchIndex(record=version, version=version)
        began = time.perf_counter()
        fields = trainer.step(BatchRecord(index=index, episodes=batch, settings=train))
        wait(device)
        samples.append(time.perf_counter() - began)
    spread = report.Spread.of(samples[1:])
    work = build_rank_batch(batch, train, trainer.traits)
    flops = count_model_flops(work.plan.layouts, trainer.traits.cost, trainer._head_flops)  # noqa: SLF001
    made = {
        "seconds": spread,
        "mfu": flops / spread.median / measure_matrix_rate(device, half_of(device)),
        "peak_gib": peak(device),
    }
    made |= {"flops": flops, "layout": fields["layout"], "passes": fields["passes"], "first_step_s": samples[0]}
    del trainer, work
    free()
    return made


def plain(
    folder: str, batch: tuple[Rollout, ...], arguments: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    """The same rows, batched to the same tokens a pass, through transformers as its documentation trains."""
    lm = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").train().to(device)
    )
    lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(lm.parameters(), lr=1e-6, fused=True)
    accelerator = Accelerator(cpu=device.type == "cpu")
    ids = torch.tensor(
        [np.frombuffer(e.turns[0].prompt_ids + e.turns[0].sampled_ids, np.int32).tolist() for e in batch]
    )
    length = ids.shape[1]
    prompt = int(length * PROMPT_SHARE)
    rows = max(1, arguments.pass_tokens // length)
    signs = torch.tensor([1.0 if e.reward else -1.0 for e in batch])
    samples = []
    reset_peak(device)
    for _ in range(arguments.repeats + 1):
        began = time.perf_counter()
        for start in range(0, len(ids), rows):
            part, a = ids[start : start + rows].to(device), signs[start : start + rows].to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                logits = lm(input_ids=part, use_cache=False).logits[:, prompt - 1 : -1]
            chosen = -F.cross_entropy(logits.float().transpose(1, 2), part[:, prompt:], reduction="none")
            (-(a[:, None] * chosen).sum() / (len(ids) * (length - prompt))).backward()
        accelerator.clip_grad_norm_(lm.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        wait(device)
        samples.append(time.perf_counter() - began)
    spread = report.Spread.of(samples[1:])
    flops = plain_flops(lm, length, prompt, len(ids))
    made = {
        "seconds": spread,
        "mfu": flops / spread.median / measure_matrix_rate(device, half_of(device)),
        "peak_gib": peak(device),
    }
    del lm, optimizer
    free()
    return made | {"flops": flops, "first_step_s": samples[0]}


def plain_flops(lm: Any, length: int, prompt: int, rows: int) -> float:
    """By the same count as ours: inner parameters, causal attention, and the head for trained tokens."""
    config = lm.config
    ends = lm.get_input_embeddings().weight.numel()
    inner = sum(p.numel() for p in lm.parameters()) - ends
    pairs = length * (length + 1) / 2
    width = config.num_attention_heads * config.head_dim
    forward = 2.0 * inner * length + 4.0 * width * config.num_hidden_layers * pairs + 2.0 * ends * (length - prompt)
    return 3 * rows * forward


def half_of(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak(device: torch.device) -> float:
    return torch.cuda.max_memory_allocated(device) / (1 << 30) if device.type == "cuda" else 0.0


def free() -> None:
    torch.compiler.reset()  # what is compiled holds on to the model it was compiled for
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
