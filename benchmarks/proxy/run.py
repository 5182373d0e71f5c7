"""What one proxy process on one core costs: added latency, requests and tokens a second, two thousand streams held.

    python -m benchmarks.proxy --litellm .cache/litellm/bin/litellm

The engine is scripted (`engine.py`) and streams a token at a time at the pace of a busy server: one every
25 ms, slower where all streams together would pass 4,000 tokens a second. Every call is an episode of its own, its turn
confirmed by a real RabbitMQ before its last byte. Direct calls and calls through the proxy take turns in one run, and so
do swarmq's proxy and LiteLLM's (which records nothing). The proxy that is measured has a core to itself; engine, broker
and callers share the others. Added latency is the difference of the percentiles, of the time to the first token and
of the whole answer. Memory is read when all streams are open and again when they end. Requests and tokens a second are
those of as many callers as there were streams, each making short calls one after another. Streamed tokens a second are those of
long answers, by the clock and by a second of the proxy's processor. `--before` measures the proxy of another version in the same
run, in turns, in these last two parts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import resource
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import uvloop

from benchmarks import report
from swarmq import keys
from swarmq.broker.amqp import AmqpBroker
from swarmq.broker.node.process import PrivateNode
from swarmq.config import SwarmJob
from swarmq.messages import Mode, new_id
from swarmq.runtime.processes import die_with_parent, find_free_port, stop_group

RUN = "proxy-benchmark"
STREAMS = (1, 64, 512, 2000)
PARTS = ("latency", "short", "long")
REPEATS = 5
TOKEN_S, MAX_TOKENS_PER_S = 0.025, 4000
WINDOW_S, HOLD_S, COUNT_S = 5.0, 20.0, 3.0
"""How long a stream of the latency part lasts, how long all of many are open, and how long calls are begun and counted."""
MANY = 512
ARRIVALS_PER_S = 100
"""At which pace streams begin: an avalanche of connections would be measured otherwise."""
COMPARED = 512
"""More callers than this are not sent to LiteLLM, which takes minutes to answer them."""
SHORT, LONG = 16, 400
"""Tokens of the short answers, and of those that are streamed for long."""
OURS = ("swarmq", "before")
LITELLM_KEY = f"sk-{secrets.token_hex(24)}"
OPEN_FILES = 16_384
CORES = sorted(os.sched_getaffinity(0))
MEASURED = ["taskset", "-c", str(CORES[-1])]
"""The proxy that is measured has a core to itself."""


class Target(NamedTuple):
    """Somewhere to send chat completions to."""

    name: str
    url: str
    model: str
    pid: int


class Call(NamedTuple):
    first_s: float
    whole_s: float


class Client:
    """Sends streamed chat completions, each with a key of its own."""

    def __init__(self, http: aiohttp.ClientSession, secret: bytes) -> None:
        self._http = http
        self._secret = secret

    async def stream(self, target: Target, opened: asyncio.Event | None = None) -> Call:
        key = episode_key(self._secret) if target.name in OURS else LITELLM_KEY
        body = {"model": target.model, "messages": [{"role": "user", "content": "hello"}]}
        began, first = time.perf_counter(), 0.0
        async with contextlib.aclosing(streamed(self._http, target.url, key, body)) as blocks:
            async for block in blocks:
                if not first and b"word" in block:
                    first = time.perf_counter()
                    if opened:
                        opened.set()
        if not first:
            raise RuntimeError(f"{target.name} ended a stream without a word")
        return Call(first - began, time.perf_counter() - began)

    async def together(self, target: Target, count: int, *, over_s: float = 0.0) -> list[Call]:
        """So many streams at once, begun evenly over a while, as agents begin theirs."""

        async def one(at: int) -> Call:
            await asyncio.sleep(at * over_s / count)
            return await self.stream(target)

        return list(await asyncio.gather(*(one(at) for at in range(count))))


async def streamed(http: aiohttp.ClientSession, url: str, key: str, body: dict[str, Any]) -> AsyncGenerator[bytes]:
    """The bytes of a chat completion, as they come. Raises RuntimeError for any answer but a whole one."""
    tail = b""
    headers = {"authorization": f"Bearer {key}"}
    async with http.post(f"{url}/chat/completions", json=body | {"stream": True}, headers=headers) as response:
        if response.status != 200:
            raise RuntimeError(f"{url} answered {response.status}: {(await response.text())[:300]}")
        async for block in response.content.iter_any():
            yield block
            tail = (tail + block)[-64:]
    if b"[DONE]" not in tail:
        raise RuntimeError(f"{url} ended a stream with {tail!r}")


def episode_key(secret: bytes, *, mode: Mode = "train") -> str:
    """Of an episode that nobody has seen before."""
    claims = keys.Claims(
        run=RUN, client="b", episode_id=new_id(), policies=("main",), mode=mode, expires_at=time.time() + 3600
    )
    return keys.mint(secret, claims)


async def play(
    folder: Path, *, streams: Sequence[int], litellm: Path | None, before: Path | None, parts: Sequence[str]
) -> AsyncIterator[tuple[dict[str, float], dict[str, Any]]]:
    """Figures and detail, whenever there are more of them."""
    async with contextlib.AsyncExitStack() as stack:
        node = await stack.enter_async_context(PrivateNode(folder / "broker"))
        engine_port, port, litellm_port = find_free_port(), find_free_port(), find_free_port()
        engine = f"http://127.0.0.1:{engine_port}"
        job = SwarmJob.build(
            {
                "run": RUN,
                "folder": str(folder),
                "policies": {"main": {"model": "x", "engine": {"urls": [engine]}, "sampling": {"max_tokens": 10_000}}},
                "broker": {"url": node.amqp_url},
                "proxy": {"port": port},
            }
        )
        (folder / "job.toml").write_text(job.to_toml())
        secret = keys.derive_client_secret(keys.load_root(job.run_folder.root_secret), "b")
        async with AmqpBroker.open(node.amqp_url, name="proxy benchmark") as broker:
            await broker.declare(RUN, policies=["main"], kinds=job.task_kinds)
        python = [sys.executable, "-m"]
        await stack.enter_async_context(
            running(folder, "drain", [*python, "benchmarks.proxy.drain", node.amqp_url, RUN])
        )
        await stack.enter_async_context(
            running(folder, "engine", [*python, "benchmarks.proxy.engine", str(engine_port)])
        )
        ours = [*MEASURED, *python, "swarmq", "proxy", str(folder / "job.toml")]
        proxy = await stack.enter_async_context(running(folder, "proxy", ours))
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=600)
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=connector, timeout=timeout))
        client = Client(http, secret)
        direct = Target("direct", f"{engine}/v1", "scripted", 0)
        swarmq = Target("swarmq", f"http://127.0.0.1:{port}/v1", "main", proxy.pid)
        await until_serving(http, f"{engine}/health")
        await until_serving(http, f"http://127.0.0.1:{port}/health")
        figures: dict[str, float] = {}
        detail: dict[str, Any] = {"latency": {}, "saturated": {}, "streamed": {}, "machine_load": os.getloadavg()}
        for count in streams if "latency" in parts else ():
            detail["latency"][count] = measured = await latency(client, http, engine, direct, swarmq, count)
            print(count, {key: value for key, value in measured.items() if not isinstance(value, list)}, flush=True)
        for count in detail["latency"]:
            for name in ("added_first_p50_ms", "added_first_p99_ms", "added_whole_p50_ms", "added_whole_p99_ms"):
                figures[f"{name.removesuffix('_ms')}_ms_{count}"] = detail["latency"][count][name]
        if detail["latency"]:
            figures["added_p50_ms"] = detail["latency"][streams[0]]["added_first_p50_ms"]
            most = max(streams)
            figures["streams_held"] = detail["latency"][most]["held"]
            figures["rss_growth_ratio"] = detail["latency"][most]["rss_growth_ratio"]
        if 512 in detail["latency"]:
            figures["added_p99_ms_512"] = detail["latency"][512]["added_first_p99_ms"]
        yield figures, detail
        targets = [swarmq]
        if before:
            before_port = find_free_port()
            settings = job.to_toml().replace(str(port), str(before_port))
            (folder / "before.toml").write_text(settings)
            version = ["env", f"PYTHONPATH={before}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"]
            theirs = [*version, *MEASURED, *python, "swarmq", "proxy", str(folder / "before.toml")]
            former = await stack.enter_async_context(running(folder, "before", theirs))
            targets.append(Target("before", f"http://127.0.0.1:{before_port}/v1", "main", former.pid))
            await until_serving(http, f"http://127.0.0.1:{before_port}/health")
        if litellm:
            offline = ["env", "LITELLM_LOCAL_MODEL_COST_MAP=True"]  # or it asks the internet when it starts
            argv = [*offline, *MEASURED, str(litellm), "--config", _litellm_config(folder, engine)]
            other = await stack.enter_async_context(
                running(folder, "litellm", [*argv, "--host", "127.0.0.1", "--port", str(litellm_port)])
            )
            await until_serving(http, f"http://127.0.0.1:{litellm_port}/health/liveliness", within_s=600)
            targets.append(Target("litellm", f"http://127.0.0.1:{litellm_port}/v1", "main", other.pid))
            detail["litellm"] = litellm_version(litellm)
        for count in streams if "short" in parts else ():
            chosen = [one for one in targets if count <= COMPARED or one.name in OURS]
            rates, cpu_ms = await saturated(client, http, engine, chosen, count)
            detail["saturated"][count] = {"requests_per_s": rates, "cpu_ms_per_request": cpu_ms}
            figures[f"requests_per_s_{count}"] = statistics.median(rates["swarmq"])
            figures[f"tokens_per_s_{count}"] = SHORT * figures[f"requests_per_s_{count}"]
            print(count, {name: statistics.median(each) for name, each in rates.items()}, flush=True)
            if "litellm" in rates:
                pairs = zip(rates["swarmq"], rates["litellm"], strict=True)
                figures["over_litellm"] = statistics.median(one / other for one, other in pairs)
            if before:
                pairs = zip(cpu_ms["before"], cpu_ms["swarmq"], strict=True)
                figures[f"calls_per_cpu_s_ratio_{count}"] = statistics.median(one / other for one, other in pairs)
            yield figures, detail
        for count in streams if "long" in parts else ():
            by_clock, by_core = await streamed_rates(
                client, http, engine, [t for t in targets if t.name in OURS], count
            )
            detail["streamed"][count] = {"tokens_per_s": by_clock, "tokens_per_cpu_s": by_core}
            figures[f"streamed_tokens_per_s_{count}"] = statistics.median(by_clock["swarmq"])
            figures[f"streamed_tokens_per_cpu_s_{count}"] = statistics.median(by_core["swarmq"])
            if before:
                pairs = zip(by_core["swarmq"], by_core["before"], strict=True)
                figures[f"streamed_per_cpu_s_ratio_{count}"] = statistics.median(one / other for one, other in pairs)
            print(count, {name: statistics.median(each) for name, each in by_core.items()}, flush=True)
            yield figures, detail


async def latency(
    client: Client, http: aiohttp.ClientSession, engine: str, direct: Target, proxy: Target, count: int
) -> dict[str, Any]:
    """Direct and through the proxy in turns: percentiles of both, their differences, and the proxy's memory."""
    interval_s = max(TOKEN_S, count / MAX_TOKENS_PER_S)
    alone, many = count == 1, count >= MANY
    over_s = 0.0 if alone else max(interval_s, count / ARRIVALS_PER_S)
    tokens = SHORT if alone else int((over_s + HOLD_S if many else WINDOW_S) / interval_s)
    rounds = 40 if alone else 2 if many else REPEATS
    await set_pace(http, engine, tokens=SHORT, interval_s=0.0)
    await client.together(proxy, min(count, 64))  # warm
    await set_pace(http, engine, tokens=tokens, interval_s=interval_s)
    calls: dict[str, list[Call]] = {"direct": [], "swarmq": []}
    growth: list[float] = []
    for _ in range(rounds):
        for target in (direct, proxy):
            async with asyncio.TaskGroup() as tasks:
                watch = (
                    tasks.create_task(_memory(target.pid, over_s, tokens * interval_s)) if many and target.pid else None
                )
                calls[target.name] += await client.together(target, count, over_s=over_s)
            if watch:
                growth.append(watch.result())
    found: dict[str, Any] = {"interval_s": interval_s, "tokens": tokens, "held": count, "calls": len(calls["swarmq"])}
    for field, name in enumerate(("first", "whole")):
        for percent in (50, 99):
            one, other = (percentile([call[field] for call in calls[key]], percent) for key in ("swarmq", "direct"))
            found[f"direct_{name}_p{percent}_ms"] = 1000 * other
            found[f"added_{name}_p{percent}_ms"] = 1000 * (one - other)
    found["rss_growth_ratio"] = max(growth, default=1.0)
    return found


async def saturated(
    client: Client, http: aiohttp.ClientSession, engine: str, targets: list[Target], count: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Of short streamed answers, the targets in turns: requests a second, and milliseconds of processor for each."""
    await set_pace(http, engine, tokens=SHORT, interval_s=TOKEN_S)
    rates: dict[str, list[float]] = {target.name: [] for target in targets}
    cpu_ms: dict[str, list[float]] = {target.name: [] for target in targets}
    for target in targets:
        await client.together(target, count)  # warm
    for _ in range(REPEATS):
        for target in targets:
            used_s, began = report.processor_s(target.pid), time.perf_counter()
            done = await _calls(client, target, count, until=began + COUNT_S)
            rates[target.name].append(done / (time.perf_counter() - began))
            cpu_ms[target.name].append(1000 * (report.processor_s(target.pid) - used_s) / done)
    return rates, cpu_ms


async def streamed_rates(
    client: Client, http: aiohttp.ClientSession, engine: str, targets: list[Target], count: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Tokens of long answers a second, by the clock and by the proxy's processor, the targets in turns."""
    await set_pace(http, engine, tokens=LONG, interval_s=TOKEN_S)
    by_clock: dict[str, list[float]] = {target.name: [] for target in targets}
    by_core: dict[str, list[float]] = {target.name: [] for target in targets}
    for target in targets:
        await client.together(target, min(count, 16))  # it learns the engine's pace
    for _ in range(REPEATS):
        for target in targets:
            used_s, began = report.processor_s(target.pid), time.perf_counter()
            await client.together(target, count, over_s=count / ARRIVALS_PER_S)
            by_clock[target.name].append(LONG * count / (time.perf_counter() - began))
            by_core[target.name].append(LONG * count / (report.processor_s(target.pid) - used_s))
    return by_clock, by_core


async def _calls(client: Client, target: Target, count: int, *, until: float) -> int:
    """How many were made, the last of them begun before that time."""
    done = 0

    async def caller() -> None:
        nonlocal done
        while time.perf_counter() < until:
            await client.stream(target)
            done += 1

    async with asyncio.TaskGroup() as tasks:
        for _ in range(count):
            tasks.create_task(caller())
    return done


async def _memory(pid: int, opened_s: float, lasts_s: float) -> float:
    """Resident memory shortly before the first stream ends over that when all are open."""
    await asyncio.sleep(opened_s + 1.0)
    before = resident(pid)
    await asyncio.sleep(lasts_s - opened_s - 1.5)
    return resident(pid) / before


@contextlib.asynccontextmanager
async def running(
    folder: Path, name: str, argv: Sequence[str], *, asked: bool = False
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that ends with the context. `asked`: its standard input and output are ours, not its log's."""
    with (folder / f"{name}.log").open("wb") as sink:
        pipe = asyncio.subprocess.PIPE if asked else None
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=pipe, stdout=pipe or sink, stderr=sink, preexec_fn=die_with_parent
        )
    try:
        yield process
    except Exception:
        print(f"{name}:", *(folder / f"{name}.log").read_text().splitlines()[-20:], sep="\n", flush=True)
        raise
    finally:
        await stop_group(process, grace_s=10)


async def until_serving(http: aiohttp.ClientSession, url: str, *, within_s: float = 180.0) -> None:
    async with asyncio.timeout(within_s):
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with http.get(url) as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.1)


async def set_pace(http: aiohttp.ClientSession, engine: str, *, tokens: int, interval_s: float) -> None:
    async with http.post(f"{engine}/pace", json={"tokens": tokens, "interval_s": interval_s}) as response:
        response.raise_for_status()


def percentile(values: Sequence[float], percent: int) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) * percent // 100, len(ordered) - 1)]


def resident(pid: int) -> float:
    """MiB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def _litellm_config(folder: Path, engine: str) -> str:
    path = folder / "litellm.yaml"
    path.write_text(
        "model_list:\n- model_name: main\n  litellm_params:\n    model: openai/scripted\n"
        f"    api_base: {engine}/v1\n    api_key: none\n"
        f"litellm_settings:\n  telemetry: false\ngeneral_settings:\n  master_key: {LITELLM_KEY}\n"
    )
    return str(path)


def litellm_version(program: Path) -> str:
    told = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    return told.strip().rpartition(" ")[2]


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--litellm", type=Path, help="the `litellm` program of a virtual environment of its own")
    parser.add_argument("--streams", type=int, nargs="+", default=STREAMS)
    parser.add_argument("--before", type=Path, help="the `src` of a checkout whose proxy is measured, too")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    arguments = parser.parse_args()
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (OPEN_FILES, max(OPEN_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    )
    os.sched_setaffinity(0, CORES[:-1] or CORES)
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(measure(Path(folder), arguments))


async def measure(folder: Path, arguments: argparse.Namespace) -> None:
    """Play, and save after each part: what cuts a run short leaves what it had. A run of some parts, or of two versions, has a result of
    its own."""
    parts = arguments.parts if set(arguments.parts) != set(PARTS) else ()
    name = "_".join(["proxy", *parts, *(["before"] if arguments.before else ())])
    figures: dict[str, float] = {}
    detail: dict[str, Any] = {}
    chosen = {name: getattr(arguments, name) for name in ("streams", "litellm", "before", "parts")}
    async with contextlib.aclosing(play(folder, **chosen)) as measured:
        async for figures, detail in measured:
            report.save(name, figures, detail=detail, out=arguments.out, finished=False)
    report.save(name, figures, detail=detail, out=arguments.out)
    print(report.table(["figure", "value"], [[name, float(value)] for name, value in figures.items()]))
