"""Samples a second against a peer: TRL's GRPO trainer with vLLM on the same card, one after the other in this run.

Both train the same model of random weights on the same prompts: one call an episode, eight episodes a prompt, the same
longest answer (random weights hardly ever end one), FP32 master weights under BF16, AdamW, gradient checkpointing, no
reference. TRL samples and trains in turns in one process (`vllm_mode="colocate"`); swarmq is the whole system, clients and
broker included: it samples while it trains, episodes at most `max_staleness` steps old. TRL needs an environment of its own or further packages (benchmarks/trl/trl_process.py); `--trl-python` names it.

    python -m benchmarks.trl --device cpu --model tiny --steps 4 --warm-up 1 --out /tmp/out --trl-python TRL/bin/python
    python -m benchmarks.trl --model 1.7b --steps 16                                                # one H200
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks import report
from benchmarks.loop.model import make_model
from benchmarks.loop.run import GROUP_SIZE, SIZES, Asked, Size, measure

HEADS = ["who", "samples/s", "tokens/s", "s/step"]


def main() -> None:
    arguments = parse()
    size = size_of(arguments)
    name = f"trl_{report.place(arguments.device)}"
    with tempfile.TemporaryDirectory(prefix="swarmq-trl-", dir=arguments.scratch) as folder:
        theirs = trl(Path(folder), size, arguments)
        say("TRL", theirs)
        (own := Path(folder) / "swarmq").mkdir()
        ours = asyncio.run(swarmq(own, size, arguments))
        say("swarmq", ours)
    figures = {
        "samples_per_s_ratio": ours["samples_per_s"] / theirs["samples_per_s"],
        "samples_per_s_swarmq": ours["samples_per_s"],
        "samples_per_s_trl": theirs["samples_per_s"],
        "tokens_per_s_ratio": ours["tokens_per_s"] / theirs["tokens_per_s"],
    }
    detail = {"swarmq": ours, "trl": theirs, "size": msgspec.to_builtins(size), "model": arguments.model}
    print(report.save(name, figures, detail=detail, out=arguments.out))


def parse() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", default="tiny", choices=SIZES)
    parser.add_argument("--sampled", type=int, help="tokens of an answer; 512, or as in benchmarks.loop for `tiny`")
    parser.add_argument("--prompts", type=int, help="of eight episodes, in a step; as in benchmarks.loop by default")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--warm-up", type=int, default=3, help="steps before the measured ones")
    parser.add_argument("--deadline", type=float, default=420.0, help="seconds for swarmq, its start included")
    parser.add_argument("--trl-python", default=sys.executable, help="the interpreter of an environment that has TRL")
    parser.add_argument("--scratch", help="where models and run folder are written")
    return parser.parse_args()


def size_of(arguments: argparse.Namespace) -> Size:
    """The loop's, with one call an episode."""
    loop = SIZES[arguments.model]
    sampled = arguments.sampled or (loop.sampled if arguments.model == "tiny" else 512)
    groups = arguments.prompts or loop.groups
    return msgspec.structs.replace(
        loop, turns=1, sampled=sampled, groups=groups, at_once=max(loop.at_once, GROUP_SIZE * groups)
    )


def trl(folder: Path, size: Size, arguments: argparse.Namespace) -> dict[str, Any]:
    model, result = folder / "model", folder / "trl.json"
    model.mkdir()
    make_model(model, arguments.model, arguments.device)
    row = 2 * size.words + size.sampled
    settings = {
        "model": str(model),
        "cuda": arguments.device == "cuda",
        "words": size.words,
        "sampled": size.sampled,
        "prompts": size.groups,
        "group_size": GROUP_SIZE,
        "micro_batch": max(1, min(GROUP_SIZE * size.groups, size.pass_tokens // row)),
        "gpu_share": size.gpu_share,
        "steps": arguments.steps,
        "folder": str(folder / "trl"),
    }
    command = [arguments.trl_python, "-m", "benchmarks.trl.trl_process", json.dumps(settings), str(result)]
    subprocess.run(command, check=True, env=os.environ | {"HF_HUB_OFFLINE": "1", "WANDB_DISABLED": "true"})
    made = json.loads(result.read_text())
    ends, tokens = made["ends"], made["tokens"]
    seconds = ends[-1] - ends[arguments.warm_up - 1]
    samples = GROUP_SIZE * size.groups * (len(ends) - arguments.warm_up)
    return made | {
        "samples_per_s": samples / seconds,
        "tokens_per_s": sum(tokens[arguments.warm_up :]) / seconds,
        "step_s": seconds / (len(ends) - arguments.warm_up),
    }


async def swarmq(folder: Path, size: Size, arguments: argparse.Namespace) -> dict[str, Any]:
    figures, detail = await measure(folder, arguments.model, size, Asked.of(arguments))
    episodes = sum(step["episodes"] for step in detail["steps"])
    return {
        "samples_per_s": episodes / detail["seconds"],
        "tokens_per_s": figures["trained_tokens_per_s"],
        "step_s": figures["step_s"],
        "figures": figures,
        "detail": detail,
    }


def say(who: str, made: dict[str, Any]) -> None:
    row = [who, made["samples_per_s"], made["tokens_per_s"], made["step_s"]]
    print(report.table(HEADS, [row]), flush=True)
