"""Throughput through the proxy over that of vLLM asked directly, with a model that keeps a GPU busy.

    python -m benchmarks.proxy_h200 --shape 1.7b --engine-cores 2            # on a CUDA machine
    python -m benchmarks.proxy_h200 --shape tiny --streams 8 --tokens 32 --prompt 64 --out /tmp/out     # anywhere

Weights are random. So many streams carry one call after another, from several processes; answers are half to one and a half
times `--tokens` long (`ignore_eos`), so that calls end and begin at any moment, as those of agents do. When calls are of every
age, tokens are counted for `--seconds`, by vLLM's own counter. Every call is an episode of its own and its turn is confirmed by
a real RabbitMQ. The ways take turns in one run, forwards and backwards; the first round is not counted. vLLM is asked directly
for text alone, and once more for text with the log-probabilities without which nothing can be trained. vLLM's core is one busy
thread: `--engine-cores` gives it cores of its own, so that what it happens to share one with decides nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil
import uvloop

from benchmarks import report
from benchmarks.proxy.callers import Settings, Target
from benchmarks.proxy.run import OPEN_FILES, RUN, running, until_serving
from benchmarks.timelines.run import SHAPES
from swarmq import keys
from swarmq.broker.amqp import AmqpBroker
from swarmq.broker.node.process import PrivateNode
from swarmq.config import SwarmJob
from swarmq.engine.auth import make_auth_headers
from swarmq.engine.server.launch import EngineProcess
from swarmq.registries.engines import EngineRegistry
from swarmq.runtime.processes import find_free_port

COUNTER = "vllm:generation_tokens_total"
PARTS = {
    "engine core": "VLLM::EngineCore",
    "API servers": "VLLM::APIServer",
    "API server": "vllm.entrypoints",
    "proxies": "swarmq proxy",
    "broker": "beam.smp",
    "callers": "benchmarks.proxy.callers",
}
"""Their processes, by what is in their command lines."""


def make_model(folder: Path, shape: str, device: str) -> None:
    """A model folder with random weights, and a tokenizer that can spell every id of its vocabulary."""
    import torch  # noqa: PLC0415 - only this function needs it
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM  # noqa: PLC0415

    from swarmq.toy_model.tokenizer import build_tokenizer  # noqa: PLC0415

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


class Callers:
    """Processes that share out the streams."""

    def __init__(self, processes: list[asyncio.subprocess.Process], folder: Path) -> None:
        self._processes, self._folder = processes, folder

    @classmethod
    @contextlib.asynccontextmanager
    async def started(cls, folder: Path, secret: bytes, arguments: Any) -> AsyncIterator[Callers]:
        async with contextlib.AsyncExitStack() as stack:
            processes = []
            for number in range(arguments.callers):
                settings = Settings(
                    number=number,
                    streams=len(range(number, arguments.streams, arguments.callers)),
                    tokens=arguments.tokens,
                    prompt=arguments.prompt,
                    secret=secret,
                )
                argv = [sys.executable, "-m", "benchmarks.proxy.callers", msgspec.json.encode(settings).decode()]
                processes.append(
                    await stack.enter_async_context(running(folder, f"callers.{number}", argv, asked=True))
                )
            yield cls(processes, folder)

    async def tell(self, target: Target | None) -> None:
        """Returns when all are under way, or have stopped. Raises RuntimeError when one has ended instead."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(target) + b"\n")
        for number, process in enumerate(self._processes):
            assert process.stdout is not None
            answer = (await process.stdout.readline()).decode().strip()
            if answer != ("stopped" if target is None else "calling"):
                raise RuntimeError(
                    f"callers.{number} ended: {(self._folder / f'callers.{number}.log').read_text()[-2000:]}"
                )


def give_cores(count: int) -> None:
    """To the engine core, for itself: the last `count` of those that everything else may use until now."""
    cores = sorted(os.sched_getaffinity(0))
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        own = PARTS["engine core"] in " ".join(process.cmdline())
        for thread in process.threads():
            os.sched_setaffinity(thread.id, cores[-count:] if own else cores[:-count])


async def play(folder: Path, arguments: Any) -> tuple[dict[str, float], dict[str, Any]]:
    """Figures and detail."""
    async with contextlib.AsyncExitStack() as stack:
        node = await stack.enter_async_context(PrivateNode(folder / "broker"))
        port, ports = find_free_port(), [find_free_port() for _ in range(arguments.proxies)]
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
            EngineProcess(
                job.policies["main"],
                port=port,
                log_path=folder / "engine.log",
                secret=EngineRegistry(job).secret(),
                progress=print,
            )
        )
        if arguments.engine_cores:
            give_cores(arguments.engine_cores)
        policy["engine"]["urls"] = [engine.url]
        job = SwarmJob.build({**tree, "proxy": {"count": arguments.proxies}})
        (folder / "job.toml").write_text(job.to_toml())
        secret = keys.derive_client_secret(keys.load_root(job.run_folder.root_secret), "b")
        async with AmqpBroker.open(node.amqp_url, name="proxy benchmark") as broker:
            await broker.declare(RUN, policies=["main"], kinds=job.task_kinds)
        drain = [sys.executable, "-m", "benchmarks.proxy.drain", node.amqp_url, RUN]
        await stack.enter_async_context(running(folder, "drain", drain))
        callers = await stack.enter_async_context(Callers.started(folder, secret, arguments))
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
            "direct": Target(*plain, logprobs=False, key=engine.secret),
            "direct_logprobs": Target(*plain, logprobs=True, key=engine.secret),
            "proxy": Target(proxies, "main", logprobs=False),
        }
        rates: dict[str, list[float]] = {name: [] for name in ways}
        busy: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
        for number in range(1 + arguments.repeats):
            order = reversed(ways.items()) if number % 2 else ways.items()  # machines get quicker or slower meanwhile
            for name, target in order:
                tokens_per_s, spent = await rate(http, engine, callers, target, arguments.seconds)
                each = ", ".join(f"{part} {micros:.0f}" for part, micros in spent.items())
                print(f"{name}: {tokens_per_s:.0f} tokens/s; us of processor a token: {each}", flush=True)
                if number:
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


def processor_seconds() -> dict[tuple[str, int], float]:
    """What the parts' processes have spent until now, by part and process id."""
    seconds: dict[tuple[str, int], float] = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, OSError):
            line = " ".join(process.cmdline())
            part = next((name for name, mark in PARTS.items() if mark in line), None)
            if part is not None:
                seconds[part, process.pid] = report.processor_s(process.pid)
    return seconds


async def rate(
    http: aiohttp.ClientSession, engine: EngineProcess, callers: Callers, target: Target, seconds: float
) -> tuple[float, dict[str, float]]:
    """Sampled tokens a second with all streams open, and microseconds of processor a token, by part."""
    await callers.tell(target)
    before, counted, began = processor_seconds(), await sampled(http, engine), time.perf_counter()
    await asyncio.sleep(seconds)
    tokens, took_s = await sampled(http, engine) - counted, time.perf_counter() - began
    spent: Counter[str] = Counter()
    for (part, process), now in processor_seconds().items():
        spent[part] += 1e6 * (now - before.get((part, process), now)) / tokens
    await callers.tell(None)
    return tokens / took_s, dict(spent)


async def sampled(http: aiohttp.ClientSession, engine: EngineProcess) -> float:
    """Tokens that vLLM has sampled until now."""
    async with http.get(f"{engine.url}/metrics", headers=make_auth_headers(engine.secret)) as response:
        lines = (await response.text()).splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(COUNTER))


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--shape", default="1.7b", choices=sorted(SHAPES))
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=256, help="sampled in a call, on average")
    parser.add_argument("--prompt", type=int, default=512, help="tokens, about")
    parser.add_argument("--seconds", type=float, default=4.0, help="for which tokens are counted each time")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--proxies", type=int, default=4)
    parser.add_argument("--callers", type=int, default=4, help="processes that share out the streams")
    parser.add_argument("--engine-cores", type=int, default=0, help="for vLLM's core alone")
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
