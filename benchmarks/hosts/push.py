"""Bytes and seconds of a push to an engine's host on another network, whole and as a difference, after real optimizer steps.

A model of random weights takes AdamW steps from FP32 masters, each on new random tokens with advantages of both signs, at the
learning rates of RL; BF16 copies are what is pushed. Learner and receiver are processes in two network namespaces that share no
loopback, with a link of a rate and a round trip between them (link.py). The whole weights are pushed first, by learners that know no
base, then each step as a difference from the step before. A push is counted from the weights in memory to the complete file on the
engine's host, bytes with all headers of TCP and IP. What else could be done with a difference is computed beside it.

    sudo python -m benchmarks.hosts.push
    sudo python -m benchmarks.hosts.push --layers 2 --steps 4 --links 1:30 --out /tmp/out     # quickly
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from benchmarks import report
from benchmarks.hosts.link import Link, sent_bytes
from swarmq.demo.make_model import ensure_model
from swarmq.demo.model_recipe import user_cache_folder
from swarmq.weights.format.chunks import LEVEL, Bytes, decode_chunk, describe_file, encode_chunk
from swarmq.weights.format.packing import Tensors
from swarmq.weights.push.http_transfer import HttpTransfer
from swarmq.weights.push.transfers import FileTransfer
from swarmq.weights.receiver.process import keep_receiver

RATES = (1e-6, 1e-5)
"""Learning rates; pushes over the links are of the first."""
NUM_WHOLE = 3
"""Number of whole pushes over each link; the steps after them are pushed as differences."""
BATCH, LENGTH = 4, 64
SECRET = "of the benchmark"


def main() -> None:
    if sys.argv[1:2] == ["send"]:
        asyncio.run(send(sys.argv[2], [Path(file) for file in sys.argv[3:]]))
    elif sys.argv[1:2] == ["receive"]:
        asyncio.run(receive(sys.argv[2]))
    else:
        measure(parse())


def parse() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("--layers", type=int, default=14, help="of the large model, 25 MB each in BF16")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--links", default="1:1,1:30,10:1,10:30", help="Gbit/s:round trip in ms, separated by commas")
    parser.add_argument("--scratch", help="folder for the weights of every step")
    return parser.parse_args()


def measure(arguments: argparse.Namespace) -> None:
    figures: dict[str, float] = {}
    detail: dict[str, Any] = {"delay": "a process between TUN devices: this kernel has no netem", "load_averages": []}
    demo = asyncio.run(ensure_model(user_cache_folder(), print))
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        rows = []
        for rate in RATES:
            for name in ("demo", "large"):
                files = []
                shares: dict[str, list[float]] = {}
                lm = make_large(arguments.layers) if name == "large" else AutoModelForCausalLM.from_pretrained(demo)
                for number, weights in enumerate(take_steps(lm, rate, arguments.steps)):
                    files.append(Path(scratch, f"{name}-{rate}-{number}.safetensors"))
                    save_file(weights, files[-1])
                    if number:
                        for codec, share in compare_codecs(*files[-2:]).items():
                            shares.setdefault(codec, []).append(share)
                        files[-2].unlink() if (name, rate) != ("large", RATES[0]) else None
                detail[f"{name}_{rate:g}"] = shares
                medians = {codec: report.Spread.of(samples).median for codec, samples in shares.items()}
                rows.append([name, f"{rate:g}", *medians.values()])
                figures[f"delta_share_{name}_{rate:g}"] = medians["sent"]
                figures[f"whole_share_{name}"] = medians["sent whole"]
                if (name, rate) == ("large", RATES[0]):
                    pushed = files
                print(report.table(["model", "rate", *medians], rows[-1:]), flush=True)
        table = []
        for link in arguments.links.split(","):
            gbit, round_trip_ms = map(float, link.split(":"))
            pushes = push_over(gbit, round_trip_ms, pushed)
            detail["load_averages"].append(os.getloadavg()[0])  # seconds say little if others use the processor
            detail[f"link_{gbit:g}gbit_{round_trip_ms:g}ms"] = pushes
            for kind in ("whole", "delta"):
                of_kind = [push for push in pushes if push["kind"] == kind]
                seconds = report.Spread.of(push["seconds"] for push in of_kind)
                size_bytes = report.Spread.of(push["bytes"] for push in of_kind)
                figures[f"push_s_{gbit:g}gbit_{round_trip_ms:g}ms_{kind}"] = seconds.median
                figures[f"push_bytes_{kind}"] = size_bytes.median
                table.append([gbit, round_trip_ms, kind, size_bytes.median / 1e6, *seconds[:3]])
            print(report.table(["Gbit/s", "ms", "push", "MB", "s", "least", "most"], table), flush=True)
        figures["file_bytes"] = pushed[0].stat().st_size
    print(report.save("hosts_push", figures, detail=detail, out=arguments.out))


def make_large(layers: int) -> PreTrainedModel:
    torch.manual_seed(0)
    shape = {"vocab_size": 16384, "hidden_size": 1024, "intermediate_size": 3072, "head_dim": 64}
    config = Qwen3Config(
        **shape, num_hidden_layers=layers, num_attention_heads=16, num_key_value_heads=8, tie_word_embeddings=True
    )
    return Qwen3ForCausalLM(config).float()


def take_steps(lm: PreTrainedModel, rate: float, steps: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the BF16 weights before the first step and after each, with the optimizer settings of `Train`."""
    optimizer = torch.optim.AdamW(lm.parameters(), lr=rate, weight_decay=0.0)
    draw = torch.Generator().manual_seed(0)
    advantages = torch.tensor([1.0, -1.0]).repeat(BATCH // 2)[:, None]
    yield copy(lm)
    for _ in range(steps):
        ids = torch.randint(0, lm.config.vocab_size, (BATCH, LENGTH), generator=draw)
        logprobs = lm(ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
        (-(advantages * logprobs).mean()).backward()
        torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield copy(lm)


def copy(lm: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().bfloat16() for name, parameter in lm.named_parameters()}


def compare_codecs(before: Path, after: Path) -> dict[str, float]:
    """Share of the file's bytes that each way to encode the later file takes; `sent` is what pushes use."""
    base, new = (np.fromfile(file, np.uint8) for file in (before, after))
    manifest = describe_file(new, word_bytes=2)
    sent, whole = 0, 0
    for index in range(len(manifest.digests)):
        chunk, part = manifest.get_chunk(new, index), manifest.get_chunk(base, index)
        encoded = encode_chunk(chunk, part, 2)
        assert decode_chunk(encoded, len(chunk), part, 2).tobytes() == chunk.tobytes()
        sent, whole = sent + len(encoded), whole + len(encode_chunk(chunk, None, 2))
    words, was = new.view("<u2"), base.view("<u2")
    ways = {
        "zstd": new,
        "xor, zstd": new ^ base,
        "xor in planes, zstd": planes((new ^ base).view("<u2")),
        "difference in planes, zstd": planes(words - was),
    }
    sizes = {way: len(zstandard.ZstdCompressor(level=LEVEL).compress(data.tobytes())) for way, data in ways.items()}
    shares = {way: size / len(new) for way, size in (sizes | {"sent whole": whole, "sent": sent}).items()}
    return {"changed weights": float((words != was).mean())} | shares


def planes(words: np.ndarray[Any, Any]) -> Bytes:
    return np.concatenate([words.astype(np.uint8), (words >> 8).astype(np.uint8)])


def push_over(gbit_per_s: float, round_trip_ms: float, files: list[Path]) -> list[dict[str, Any]]:
    """Push the files one after another over a link, from a process of one host to a receiver on the other."""
    program = [sys.executable, "-m", "benchmarks.hosts.push"]
    with Link(gbit_per_s=gbit_per_s, round_trip_s=round_trip_ms / 1000) as link:
        receiving = link.command(link.hosts[1], [*program, "receive", link.addresses[1]])
        with subprocess.Popen(receiving, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as receiver:
            assert receiver.stdin is not None
            assert receiver.stdout is not None
            url = receiver.stdout.readline().strip()
            output = link.run(link.hosts[0], [*program, "send", url, *map(str, files)])
            receiver.stdin.close()
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


async def receive(address: str) -> None:
    """Run a receiver until standard input ends."""
    with tempfile.TemporaryDirectory() as folder:
        async with keep_receiver(address, 0, secret=SECRET, log_path=Path(folder, "log")) as receiver:
            print(f"http://{address}:{receiver.port}", flush=True)
            await asyncio.to_thread(sys.stdin.read)


async def send(url: str, files: list[Path]) -> None:
    """Push the weights in the files, and print a line of JSON for each push."""
    with tempfile.TemporaryDirectory() as folder:
        for number, file in enumerate(files):
            if number < NUM_WHOLE:
                transfer = HttpTransfer(FileTransfer((), Path(folder)), secret=SECRET)  # it knows no base
            weights: Tensors = load_file(file)
            before, began = sent_bytes(), time.perf_counter()
            payload = transfer.publish(weights, number, "bfloat16")
            published = time.perf_counter()
            assert payload.deliver is not None
            await payload.deliver(url)
            ended = time.perf_counter()
            transfer.withdraw()
            push = {
                "kind": "whole" if number < NUM_WHOLE else "delta",
                "bytes": sent_bytes() - before,
                "seconds": ended - began,
                "publish_s": published - began,
            }
            print(json.dumps(push), flush=True)


if __name__ == "__main__":
    main()
