"""Throughput through the proxy over that of vLLM asked directly, with a model that keeps a GPU busy.

    python -m benchmarks.proxy_h200 --shape 1.7b            # on a CUDA machine
    python -m benchmarks.proxy_h200 --shape tiny --streams 8 --tokens 32 --prompt 64 --out /tmp/out     # anywhere

Weights are random. So many callers make one call after another; answers are half to one and a half times `--tokens` long
(`ignore_eos`), so that calls end and begin at any moment, as those of agents do. Once every caller has had an answer, tokens are
counted for `--seconds`, by vLLM's own counter. Every call is an episode of its own and its turn is confirmed by a real RabbitMQ.
The ways take turns in one run. vLLM is asked directly for text alone, and once more for text with the log-probabilities
without which nothing can be trained.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import uvloop

from benchmarks import report
from benchmarks.proxy import OPEN_FILES, RUN, episode_key, running, streamed, until_serving
from benchmarks.timelines import SHAPES
from swarmq import keys
from swarmq.broker.amqp import AmqpBroker
from swarmq.broker.node import PrivateNode
from swarmq.config import SwarmJob
from swarmq.engine.launch import EngineProcess
from swarmq.process import free_port

COUNTER = "vllm:generation_tokens_total"
PARTS = {
    "engine core": "VLLM::EngineCore",
    "API servers": "VLLM::APIServer",
    "API server": "vllm.entrypoints",
    "proxies": "swarmq proxy",
    "broker": "beam.smp",
}
"""Their processes, by what is in their command lines."""


def make_model(folder: Path, shape: str, device: str) -> None:
    """A model folder with random weights, and a tokenizer that can spell every id of its vocabulary."""
    import torch  # noqa: PLC0415 - only this function needs it
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM  # noqa: PLC0415

    from swarmq.demo.tokenizer import build_tokenizer  # noqa: PLC0415

    small = build_tokenizer(["What is the sum of 17 and 25? The sum is 42, and that is that. One two three four five."])
    config = Qwen3Config(
        **SHAPES[shape], tie_word_embeddings=True, eos_token_id=small.eos_token_id, pad_token_id=small.pad_token_id
    )
    spelled = json.loads(small.backend_tokenizer.to_str())
    vocabulary = spelled["model"]["vocab"]
    taken = {*vocabulary.values(), *(token["id"] for token in spelled["added_tokens"])}
    vocabulary |= {f"w{number}": number for number in range(config.vocab_size) if number not in taken}
    (folder / "tokenizer.json").write_text(json.dumps(spelled))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token=small.eos_token, pad_token=small.pad_token
    )
    tokenizer.chat_template = small.chat_template
    with torch.device(device):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16 if device == "cuda" else torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


async def play(folder: Path, arguments: Any) -> tuple[dict[str, float], dict[str, Any]]:
    """Figures and detail."""
    async with contextlib.AsyncExitStack() as stack:
        node = await stack.enter_async_context(PrivateNode(folder / "broker"))
        port, ports = free_port(), [free_port() for _ in range(arguments.proxies)]
        policy = {
            "model": str(folder / "model"),
            "engine": {
                "max_model_len": arguments.prompt + 2 * arguments.tokens + 256,
                "gpu_memory_utilization": 0.8,
                "arguments": ["--max-num-seqs", str(max(arguments.streams, 8))],
            },
            "sampling": {"max_tokens": 2 * arguments.tokens},
        }
        tree = {"run": RUN, "folder": str(folder), "policies": {"main": policy}, "broker": {"url": node.amqp_url}}
        job = SwarmJob.build(tree)
        engine = await stack.enter_async_context(
            EngineProcess(job.policies["main"], port=port, log_path=folder / "engine.log", progress=print)
        )
        policy["engine"]["urls"] = [engine.url]
        job = SwarmJob.build({**tree, "proxy": {"count": arguments.proxies}})
        (folder / "job.toml").write_text(job.to_toml())
        secret = keys.client_secret(keys.load_root(job.run_folder.root_secret), "b")
        async with AmqpBroker.open(node.amqp_url, name="proxy benchmark") as broker:
            await broker.declare(RUN, policies=["main"], kinds=job.task_kinds)
        drain = [sys.executable, "-m", "benchmarks.proxy_drain", node.amqp_url, RUN]
        await stack.enter_async_context(running(folder, "drain", drain))
        http = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=600))
        )
        argv = [sys.executable, "-m", "swarmq", "proxy", str(folder / "job.toml")]
        for number, own in enumerate(ports):
            line = [*argv, "--port", str(own), "--number", str(number)]
            await stack.enter_async_context(running(folder, f"proxy.{number}", line))
        for own in ports:
            await until_serving(http, f"http://127.0.0.1:{own}/health")
        proxies = [f"http://127.0.0.1:{own}/v1" for own in ports]
        plain = ([f"{engine.url}/v1"], str(folder / "model"))
        ways = {
            "direct": (*plain, False),
            "direct_logprobs": (*plain, True),
            "proxy": (proxies, "main", False),
        }
        rates: dict[str, list[float]] = {name: [] for name in ways}
        busy: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
        for measured in (False, *[True] * arguments.repeats):
            for name, (urls, model, logprobs) in ways.items():
                tokens_per_s, spent = await rate(http, engine.url, urls, model, secret, logprobs, arguments)
                each = ", ".join(f"{part} {micros:.0f}" for part, micros in spent.items())
                print(f"{name}: {tokens_per_s:.0f} tokens/s; us of processor a token: {each}", flush=True)
                if measured:
                    rates[name].append(tokens_per_s)
                    busy[name].append(spent)
    over = {
        name: report.Spread.of(one / other for one, other in zip(rates["proxy"], rates[name], strict=True))
        for name in ("direct", "direct_logprobs")
    }
    figures = {
        f"throughput_over_direct_{arguments.streams}": over["direct"].median,
        f"throughput_over_direct_logprobs_{arguments.streams}": over["direct_logprobs"].median,
        **{f"tokens_per_s_{name}": statistics.median(samples) for name, samples in rates.items()},
    }
    settings = {key: value for key, value in vars(arguments).items() if key != "out"}
    ratios = {name: spread.samples for name, spread in over.items()}
    return figures, {
        **settings,
        "ratio": ratios,
        "tokens_per_s": rates,
        "micros_a_token": busy,
        "load": os.getloadavg(),
    }


def processor_seconds() -> dict[str, float]:
    """What the parts have spent until now, by part, over all their processes."""
    seconds: dict[str, float] = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, OSError):
            line = " ".join(process.cmdline())
            part = next((name for name, mark in PARTS.items() if mark in line), None)
            if part is not None:
                seconds[part] = seconds.get(part, 0.0) + report.processor_s(process.pid)
    return seconds


async def rate(
    http: aiohttp.ClientSession,
    engine: str,
    urls: list[str],
    model: str,
    secret: bytes,
    logprobs: bool,
    arguments: Any,
) -> tuple[float, dict[str, float]]:
    """Sampled tokens a second with so many streams always open, and microseconds of processor a token, by part."""
    dice, answered, over = random.Random(7), set[int](), False

    async def call(url: str) -> None:
        body = {
            "model": model,
            "messages": [{"role": "user", "content": "one two three " * (arguments.prompt // 8)}],
            "max_tokens": dice.randint(arguments.tokens // 2, 3 * arguments.tokens // 2),
            "ignore_eos": True,
            "temperature": 1.0,
            "logprobs": logprobs,
        }
        async with contextlib.aclosing(streamed(http, url, episode_key(secret, mode="eval"), body)) as blocks:
            async for _ in blocks:
                pass

    async def caller(number: int) -> None:
        while not over:
            await call(urls[number % len(urls)])
            answered.add(number)

    async with asyncio.TaskGroup() as callers:
        for number in range(arguments.streams):
            callers.create_task(caller(number))
        while len(answered) < arguments.streams:  # noqa: ASYNC110 - a glance is all there is to do
            await asyncio.sleep(0.05)
        before, counted, began = processor_seconds(), await sampled(http, engine), time.perf_counter()
        await asyncio.sleep(arguments.seconds)
        tokens, took_s = await sampled(http, engine) - counted, time.perf_counter() - began
        spent = {part: 1e6 * (now - before.get(part, 0.0)) / tokens for part, now in processor_seconds().items()}
        over = True
    return tokens / took_s, spent


async def sampled(http: aiohttp.ClientSession, engine: str) -> float:
    """Tokens that vLLM has sampled until now."""
    async with http.get(f"{engine}/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(COUNTER))


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--shape", default="1.7b", choices=sorted(SHAPES))
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=256, help="sampled in a call, on average")
    parser.add_argument("--prompt", type=int, default=512, help="tokens, about")
    parser.add_argument("--seconds", type=float, default=6.0, help="for which tokens are counted each time")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--proxies", type=int, default=4)
    parser.add_argument("--device", default="cpu", help="where the weights are made: cuda is quicker")
    arguments = parser.parse_args()
    limit = max(OPEN_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, limit))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model").mkdir()
        make_model(folder / "model", arguments.shape, arguments.device)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            figures, detail = runner.run(play(folder, arguments))
    print(report.table(["figure", "value"], [[name, float(value)] for name, value in figures.items()]))
    report.save("proxy_h200", figures, detail=detail, out=arguments.out)


if __name__ == "__main__":
    main()
