"""The learner on several GPUs: FSDP2's scaling efficiency, and engines that go on while the learner computes.

Each number of ranks trains as many tokens a rank, so efficiency is the speed of n ranks over n times that of one, which
holds the whole model. With `--context N` every N ranks share each pass, token by token: rows of `--row` tokens that one rank computes
alone are cut over N. With `--split` the whole loop runs on two GPUs, one for the learner and one for an engine that gets
its weights by NCCL: how busy that engine's GPU is while the learner computes, and how stale episodes are.

    python -m benchmarks.learner_scaling --device cpu --model tiny --ranks 1,2 --row 128 --tokens 512 --repeats 2 --out /tmp/out
    python -m benchmarks.learner_scaling --model 1.7b --ranks 1,2,4 --tokens 65536 --split 1.7b     # four H200
    python -m benchmarks.learner_scaling --model 4b --ranks 1,2 --tokens 65536 --layers gathered-once,gathered-each-pass,whole
    python -m benchmarks.learner_scaling --model 1.7b --ranks 2 --context 2 --row 65536 --tokens 65536
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.learner import episodes, make_model, peak
from benchmarks.timelines.run import SHAPES, wait
from swarmq.config import Train
from swarmq.learner.distributed.rendezvous import leave_group
from swarmq.learner.distributed.sharding import is_sharded
from swarmq.learner.memory import plan, ranks
from swarmq.learner.store.records import BatchIndex, BatchRecord
from swarmq.learner.train.trainer import Trainer

LAYERS = {"gathered-once": "fsdp2", "gathered-each-pass": "fsdp2_each_pass", "whole": "ddp"}
"""How ranks hold layers -> what figures call it. The first is what a GPU with room does of itself (in a step), the second what one
without does; with the last, each has the whole model and its optimizer."""
HEADS = ["ranks", "layers", "s/step", "tokens/s", "efficiency", "GiB"]
ENGINE_GPU = "1"
"""Of two GPUs, the first is the learner's."""


def main() -> None:
    arguments = parse()
    if arguments.into:
        rank(arguments)
        leave_group()
        return
    device = torch.device(arguments.device)
    name = f"scaling_{report.place(device.type)}"
    figures, detail = report.kept(name, out=arguments.out)
    rows: list[list[object]] = []
    if arguments.ranks:
        with tempfile.TemporaryDirectory(dir=arguments.scratch) as folder:
            make_model(arguments.model, folder, device)
            for row in learner_alone(Path(folder), arguments, figures, detail):
                rows.append(row)
                print(report.table(HEADS, [row]), flush=True)
                report.save(name, figures, detail=detail, out=arguments.out, finished=False)
    if arguments.split:
        found = split(arguments)
        figures["split_staleness_mean"] = found["staleness_mean"]
        if found["engine_busy"] is not None:
            figures["split_engine_busy"] = found["engine_busy"]
        detail["split"] = found
    print(report.table(HEADS, rows))
    print(report.save(name, figures, detail=detail, out=arguments.out))


def learner_alone(
    folder: Path, arguments: argparse.Namespace, figures: dict[str, float], detail: dict[str, Any]
) -> Iterator[list[object]]:
    """The model in `folder` on each number of ranks and each way to hold layers; fills in figures and detail, gives rows."""
    alone = on_ranks(1, arguments.layers[0], folder, arguments)
    one = alone["tokens"] / alone["seconds"]["median"]
    for layers in arguments.layers:
        way = LAYERS[layers] + ("" if arguments.model == "1.7b" else f"_{arguments.model}")
        way += f"_row_{arguments.row}_over_{arguments.context}" if arguments.context > 1 else ""
        prefix = "" if way == "fsdp2" else f"{way}_"
        for count in sorted({1, *map(int, arguments.ranks.split(","))}):
            made = alone if count == 1 else on_ranks(count, layers, folder, arguments)
            seconds = made["seconds"]["median"]
            figures[f"{prefix}tokens_per_s_{count}"] = speed = made["tokens"] / seconds
            if count > 1:
                figures[f"{way}_efficiency_{count}"] = speed / count / one
            detail[f"{prefix}ranks_{count}"] = made
            yield [count, layers, seconds, speed, speed / count / one, made["peak_gib"]]


def parse() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", default="tiny", choices=SHAPES)
    parser.add_argument("--ranks", default="1,2,4", help="one rank is measured beside them; '' for none")
    parser.add_argument(
        "--layers",
        default=["gathered-once"],
        type=ways_to_hold,
        help=f"how several ranks hold them, one way after the other: {', '.join(LAYERS)}",
    )
    parser.add_argument("--context", type=int, default=1, help="of several ranks, so many share each pass")
    parser.add_argument("--row", type=int, default=2048, help="tokens of an episode")
    parser.add_argument("--tokens", type=int, default=65536, help="of one optimizer step and rank")
    parser.add_argument("--pass-tokens", type=int, default=16384, help="of one forward and backward pass")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--split", metavar="MODEL", help="also the whole loop on two GPUs, with this model of benchmarks.loop"
    )
    parser.add_argument("--steps", type=int, default=16, help="of the loop; the first three warm it up")
    parser.add_argument("--scratch", help="where the random weights are written, 2 bytes a parameter")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser.parse_args()


def ways_to_hold(words: str) -> list[str]:
    named = words.split(",")
    if unknown := [word for word in named if word not in LAYERS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(LAYERS)}")
    return named


def on_ranks(count: int, layers: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """What rank 0 of `count` measured."""
    into = folder / f"ranks_{count}.json"
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"] if count > 1 else []
    own = ["model", "device", "context", "row", "tokens", "pass_tokens", "repeats"]
    given = [word for key in own for word in (f"--{key.replace('_', '-')}", str(getattr(arguments, key)))]
    given += ["--layers", layers]
    subprocess.run(
        [sys.executable, *launch, "-m", "benchmarks.learner_scaling", *given, "--into", into, "--folder", folder],
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    made: dict[str, Any] = json.loads(into.read_text())
    return made | {"seconds": report.Spread.of(made["samples"])._asdict(), "model": arguments.model}


def rank(arguments: argparse.Namespace) -> None:
    """One rank: whole optimizer steps of the trainer."""
    if arguments.layers == ["gathered-each-pass"]:
        plan.has_room_for_whole = lambda *_, **__: False  # type: ignore[assignment] # as if there were no room
    train = Train(
        sharding="none" if arguments.layers == ["whole"] else "full",
        micro_batch_tokens=max(arguments.pass_tokens, arguments.row),
        context_parallel=arguments.context if ranks.num_ranks() > 1 else 1,
        token_log=False,
        trackers=(),
    )
    trainer = Trainer(arguments.folder, train)
    world, device = trainer.accelerator.num_processes, trainer.accelerator.device
    batch = episodes(
        arguments.row, world * max(arguments.tokens // arguments.row, 1), SHAPES[arguments.model]["vocab_size"]
    )
    samples, fields = [], {}
    for version in range(1, arguments.repeats + 2):
        trainer.accelerator.wait_for_everyone()
        began = time.perf_counter()
        fields = trainer.step(
            BatchRecord(index=BatchIndex(record=version, version=version), episodes=batch, settings=train)
        )
        wait(device)
        samples.append(time.perf_counter() - began)
    if trainer.accelerator.is_main_process:
        made = {
            "samples": samples[1:],
            "tokens": arguments.row * len(batch),
            "sharded": is_sharded(trainer.model),
            "peak_gib": peak(device),
            "passes": fields["passes"],
            "mfu": fields["mfu"],
        }
        arguments.into.write_text(json.dumps(made))
    trainer.accelerator.wait_for_everyone()


def split(arguments: argparse.Namespace) -> dict[str, Any]:
    """The loop with a GPU for the learner and one for the engine."""
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as out:
        command = ["-m", "benchmarks.loop", "--device", arguments.device, "--model", arguments.split]
        given = ["--placement", "split", "--steps", str(arguments.steps), "--out", out]
        gpus = {"CUDA_VISIBLE_DEVICES": "0,1"} if arguments.device == "cuda" else {}
        subprocess.run([sys.executable, *command, *given], check=True, env=os.environ | gpus)
        (result,) = Path(out).glob("loop_split_*.json")
        made = json.loads(result.read_text())
    detail = made["detail"][arguments.split]
    counts = {int(steps): episodes for steps, episodes in detail["staleness"].items()}
    return {
        "staleness": detail["staleness"],
        "staleness_mean": sum(steps * n for steps, n in counts.items()) / max(sum(counts.values()), 1),
        "engine_busy": detail["gpu_busy_while_the_learner_computes"].get(ENGINE_GPU),
        "push_ways": detail["push_ways"],
        "figures": made["figures"],
        "phases": detail["phases"],
    }


if __name__ == "__main__":
    main()
