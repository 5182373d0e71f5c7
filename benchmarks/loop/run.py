"""The whole loop on one machine: RabbitMQ, vLLM, proxies, collector, learner and multi-turn agents, on one GPU.

    python -m benchmarks.loop --model tiny --steps 4 --warm-up 1 --out /tmp/out     # anywhere
    python -m benchmarks.loop --model 1.7b,4b --steps 24 --deadline 420              # one H200

Weights are random, so that every answer is as long as it may be and no reward can be learned: only speed is measured.
    python -m benchmarks.loop --model 1.7b --device cuda --steps 8 --limit             # and what the parts do alone
    python -m benchmarks.loop --model 1.7b --device cuda --steps 8 --mps learner-low   # both on the GPU at the same time, not in turns
    python -m benchmarks.loop --model 1.7b --device cuda --steps 8 --limit --keep-cache --agents 96     # what clearing the cache, and many agents, cost

Agents go on while the learner steps; what they sample meanwhile is at most `max_staleness` steps old when it is trained.
Measured is the time from the end of the warm-up steps to the last step. Results are saved after every model, beside
those of models measured earlier; one that does not come to its last step before the deadline is measured by those it
came to.

`--limit` measures in the same run what the parts do alone: first vLLM, asked directly by as many conversations at once; then the
proxies, while the agents' first episodes go on and nothing can be trained; at the end the learner, from whose batches agents
and engine are kept away. `loop_over_sum` is the time of a step over the time that its samples take vLLM alone, asked directly, and its training
takes the learner alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import aiohttp
import msgspec

from benchmarks import gpu_busy, report
from benchmarks.gpu_busy import GpuWatch
from benchmarks.loop.agent import SERVER_ENV, Server
from benchmarks.loop.model import make_model
from benchmarks.proxy_h200 import sampled
from swarmq import SwarmTask, keys
from swarmq.broker.amqp import AmqpBroker
from swarmq.client.data.feed import feed
from swarmq.config import SwarmJob
from swarmq.engine.auth import make_auth_headers
from swarmq.engine.server.launch import EngineProcess
from swarmq.messages import Event
from swarmq.observe.monitor import Follower, follow
from swarmq.runtime.processes import die_with_parent, read_tail, stop_group
from swarmq.up import Deployment, deploy

RUN = "loop"
PHASES = ("wait_s", "train_s", "push_s", "pause_s", "step_s")
LEAST_STEPS = 2
"""Without so many there is nothing to measure."""
PROGRESS_S = 20.0
LOOK_S = 0.4
"""Seconds between two readings of the engine's token counter."""


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """Of the work for one model."""

    turns: int
    sampled: int
    """Tokens of an answer."""
    words: int
    """Of an observation, about a token each."""
    groups: int
    """Of 8 episodes, in a batch."""
    at_once: int
    """Episodes."""
    pass_tokens: int
    gpu_share: float
    """Of the GPU's memory, for vLLM."""
    workers: int = 4


SIZES = {
    "tiny": Size(turns=3, sampled=16, words=8, groups=2, at_once=16, pass_tokens=2048, gpu_share=0.1, workers=1),
    "1.7b": Size(turns=8, sampled=128, words=64, groups=8, at_once=192, pass_tokens=16384, gpu_share=0.32),
    "4b": Size(turns=8, sampled=128, words=64, groups=4, at_once=96, pass_tokens=16384, gpu_share=0.24),
}
GROUP_SIZE = 8
ALONE_S = {"cpu": 4.0, "cuda": 8.0}
"""Seconds for which tokens of the rollout alone are counted: less than an episode takes, so that nothing can be trained yet."""
RAMP_S = 2.0
"""Seconds between the first call and the first counted token."""
CALL_SECONDS = re.compile(r"^swarmq_(first_token|call|confirm)_seconds_(sum|count)\{.*\} (\S+)$", re.MULTILINE)
"""Lines of a proxy's metrics."""
START_S = 60.0
"""Seconds within which the callers' processes must have started."""
DRAIN_S = 40.0
"""Seconds within which agents must have used up their tickets."""
ALONE_STEPS, STEP_S = 3, 20.0
"""Number of steps of the learner alone, and the most seconds that one may take."""
MPS_FOLDERS = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
LOW_PRIORITY = ("env", "CUDA_MPS_CLIENT_PRIORITY=1", sys.executable)
"""Command prefix for a process whose CUDA kernels wait for those of normal priority."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """Of a run, on the command line."""

    device: str
    steps: int
    warm_up: int
    deadline: float
    placement: str = "auto"
    as_shipped: bool = False
    limit: bool = False
    mps: str = "off"
    keep_cache: bool = False
    fp8_cache: bool = False
    agents: int | None = None

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Asked:
        return msgspec.convert(vars(arguments), cls, strict=False)


def main() -> None:
    arguments = parse()
    kind = "loop" if arguments.placement != "split" else "loop_split"
    kind += "_as_shipped" if arguments.as_shipped else ""
    kind += "_limit" if arguments.limit else ""
    kind += "_keep_cache" if arguments.keep_cache else ""
    kind += "_fp8_cache" if arguments.fp8_cache else ""
    kind += f"_{arguments.agents}_agents" if arguments.agents else ""
    kind += f"_mps_{arguments.mps.replace('-', '_')}" if arguments.mps != "off" else ""
    name = f"{kind}_{report.place(arguments.device)}"
    figures, detail = report.kept(name, out=arguments.out)
    models = arguments.model.split(",")
    with multi_process_service(Path(arguments.scratch or tempfile.gettempdir()), wanted=arguments.mps != "off"):
        failed = measure_all(name, models, arguments, figures, detail)
    sys.exit(failed)


def measure_all(
    name: str, models: Sequence[str], arguments: argparse.Namespace, figures: dict[str, float], detail: dict[str, Any]
) -> int:
    """Measure all models, and return the number of those that failed."""
    failed = 0
    for model in models:
        with tempfile.TemporaryDirectory(prefix="swarmq-loop-", dir=arguments.scratch) as folder:
            try:
                asked = Asked.of(arguments)
                size = msgspec.structs.replace(SIZES[model], at_once=asked.agents or SIZES[model].at_once)
                found, detail[model] = asyncio.run(measure(Path(folder), model, size, asked))
            except Exception:  # the other model is measured all the same
                failed += 1
                traceback.print_exc()
                show_logs(Path(folder))
                continue
        figures.update({_named(figure, model): value for figure, value in found.items()})
        print(
            report.table(("figure", "value"), [[figure, float(value)] for figure, value in found.items()]), flush=True
        )
        finished = model == models[-1]
        report.save(name, figures | overall(figures), detail=detail, out=arguments.out, finished=finished)
    return failed


def parse() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("--model", default="tiny", help=f"one or more of {', '.join(SIZES)}, separated by commas")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--warm-up", type=int, default=3, help="steps before the measured ones")
    parser.add_argument("--deadline", type=float, default=420.0, help="seconds for one model, its start included")
    parser.add_argument(
        "--placement", default="auto", choices=("auto", "shared", "split"), help="of learner and engine"
    )
    parser.add_argument(
        "--as-shipped", action="store_true", help="with checkpoints, token log and trackers, which are off otherwise"
    )
    parser.add_argument("--limit", action="store_true", help="measure engine, proxies and learner alone, too")
    parser.add_argument(
        "--mps",
        default="off",
        choices=("off", "equal", "learner-low"),
        help="CUDA's multi-process service for engine and learner; learner-low: kernels of the engine go first",
    )
    parser.add_argument(
        "--keep-cache", action="store_true", help="engine.keep_cache: pushes do not clear the engine's cache"
    )
    parser.add_argument("--fp8-cache", action="store_true", help="engine.kv_cache_dtype: keys and values in FP8")
    parser.add_argument("--agents", type=int, help="at once, instead of the model's number")
    parser.add_argument("--scratch", help="where model and run folder are written")
    return parser.parse_args()


async def measure(folder: Path, model: str, size: Size, asked: Asked) -> tuple[dict[str, float], dict[str, Any]]:
    """Figures and detail of one model."""
    began = time.monotonic()
    (folder / "model").mkdir()
    make_model(folder / "model", model, asked.device)
    job = job_of(
        folder,
        size,
        cuda=asked.device == "cuda",
        placement=asked.placement,
        as_shipped=asked.as_shipped,
        launcher=LOW_PRIORITY if asked.mps == "learner-low" else (),
        keep_cache=asked.keep_cache,
        fp8_cache=asked.fp8_cache,
    )
    if asked.device == "cuda":
        gpu_busy.check()
    alone = dict[str, float]()
    counted = dict[str, tuple[float, float]]()
    call_s = dict[str, dict[str, float]]()
    async with contextlib.AsyncExitStack() as stack:
        deployment = await stack.enter_async_context(deploy(job, report=_say))
        broker = await stack.enter_async_context(AmqpBroker.open(deployment.invite.amqp_url, name="loop benchmark"))
        follower = await stack.enter_async_context(follow(deployment.job, broker, record=job.run_folder.events))
        tasks = [SwarmTask(f"t{number}", "default", None) for number in range(2 * (asked.steps + 8) * size.groups)]
        fed = folder / "fed.json"
        await feed(broker, job.run, tasks, "default", repeats=GROUP_SIZE, progress_file=fed)
        meter = await stack.enter_async_context(TokenMeter.of(deployment))
        watch = stack.enter_context(GpuWatch())
        _say(f"up after {time.monotonic() - began:.0f} s")
        if asked.limit:
            async with workers(deployment, size, folder, direct=True):
                alone["direct_tokens_per_s"] = rate = await meter.rate(ALONE_S[asked.device])
                counted["direct"] = meter.counted
                alone["cache_lost_s"] = await meter.cost_of_lost_cache(rate, ALONE_S[asked.device] / 2)
            await meter.until_idle()
        agents = await stack.enter_async_context(workers(deployment, size, folder))
        if asked.limit:
            alone["proxy_tokens_per_s"] = await meter.rate(ALONE_S[asked.device])
            counted["proxy"] = meter.counted
            call_s["before_training"] = await call_times(deployment)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(asked.deadline - (time.monotonic() - began)):
                await until_step(follower, asked.steps)
        loop_until = time.time()
        call_s["whole_run"] = await call_times(deployment)
        alone_from = math.inf
        if asked.limit:
            try:
                alone_from = await let_learner_alone(deployment, meter, agents, follower)
            except Exception:  # what the loop did is saved all the same
                traceback.print_exc()
        stop_without_checkpoint(deployment)
    events = [msgspec.json.decode(line, type=Event) for line in job.run_folder.events.read_bytes().splitlines()]
    steps = [event for event in events if event.name == "step" and event.at <= loop_until][: asked.steps]
    if len(steps) < asked.warm_up + LEAST_STEPS:
        raise RuntimeError(f"{model}: {len(steps)} steps within {asked.deadline:.0f} s are too few to measure")
    figures, detail = summary(steps, events, watch, warm_up=asked.warm_up)
    measured = steps[asked.warm_up :]
    detail["engine_tokens_per_s"] = engine_rates(measured, meter)
    detail["call_s"] = call_s
    detail["sampled_by_step"] = [meter.between(step.at - step.fields["step_s"], step.at) for step in measured]
    if asked.limit:
        later = [e for e in events if e.name == "step" and training(e)[0] >= alone_from]
        try:
            figures |= limits(figures, measured=measured, alone=later, rates=alone)
        except RuntimeError:  # nor is it lost without steps of the learner alone
            traceback.print_exc()
            figures |= alone
        detail["gpu_busy_alone"] = {way: watch.busy(span) for way, span in counted.items()}
        detail["alone"] = [{phase: event.fields[phase] for phase in (*PHASES, "mfu")} for event in later]
    told = list(read_log(job.run_folder.logs / "learner.main.log"))
    waited = [fields["training_waited_s"] for fields in told if fields.get("event") == "checkpoint"]
    ways = sorted({fields["method"] for fields in told if fields.get("event") == "push_route"})
    return figures, detail | {"push_ways": ways, "training_waited_for_checkpoints_s": waited}


def job_of(
    folder: Path,
    size: Size,
    *,
    cuda: bool,
    placement: str = "auto",
    as_shipped: bool = False,
    launcher: Sequence[str] = (),
    keep_cache: bool = False,
    fp8_cache: bool = False,
) -> SwarmJob:
    length = 512 + size.turns * 3 * (size.sampled + size.words)
    bare = {"checkpoint_every": 1_000_000, "token_log": False, "trackers": []}
    policy = {
        "model": str(folder / "model"),
        "placement": placement,
        "engine": {
            "max_model_len": length,
            "gpu_memory_utilization": size.gpu_share,
            "keep_cache": keep_cache,
            "kv_cache_dtype": "fp8" if fp8_cache else "auto",
            "arguments": ["--max-num-seqs", str(size.at_once)],
        },
        "sampling": {"max_tokens": size.sampled},
        "train": {
            "micro_batch_tokens": max(size.pass_tokens, length),
            "launcher": launcher,
            **({} if as_shipped else bare),
        },
    }
    return SwarmJob.build(
        {
            "run": RUN,
            "folder": str(folder / "runs"),
            "policies": {"main": policy},
            "groups": {"group_size": GROUP_SIZE, "groups_per_batch": size.groups},
            "proxy": {"count": 2 if cuda else 1},
        }
    )


@contextlib.asynccontextmanager
async def workers(
    deployment: Deployment, size: Size, folder: Path, *, direct: bool = False
) -> AsyncIterator[list[asyncio.subprocess.Process]]:
    """Run processes that share the agents; they are killed at the end, in the middle of their episodes. `direct`: they ask vLLM itself."""
    arguments = [str(size.at_once // size.workers), str(size.turns), str(size.words)]
    environment = {"OMP_NUM_THREADS": "1", "SWARMQ_SPOOL": str(folder / "spool")}
    if direct:
        engine, model = deployment.engines["main.0"], deployment.job.policies["main"].model
        sampling = {"max_tokens": size.sampled, "logprobs": True, "temperature": 1.0}
        server = Server(base_url=f"{engine.url}/v1", api_key=engine.secret, model=model, sampling=sampling)
        environment[SERVER_ENV] = msgspec.json.encode(server).decode()
    async with contextlib.AsyncExitStack() as stack:
        processes = []
        for number in range(size.workers):
            with (deployment.job.run_folder.logs / f"worker.{number}.log").open("ab") as sink:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "benchmarks.loop.agent", *arguments),
                    env=os.environ | environment | {"SWARMQ_INVITE": deployment.invite.encode()},
                    stdin=subprocess.DEVNULL,
                    stdout=sink,
                    stderr=sink,
                    preexec_fn=die_with_parent,
                )
            processes.append(process)
            stack.push_async_callback(stop_group, process, grace_s=0.0)
        yield processes


class TokenMeter:
    """Tokens that the engine has sampled, by frequent readings of vLLM's own counter."""

    def __init__(self, http: aiohttp.ClientSession, engine: EngineProcess) -> None:
        self._http, self._engine = http, engine
        self.looks: list[tuple[float, float]] = []
        """Readings: Unix time, and tokens so far."""
        self.counted = (0.0, 0.0)
        """Unix time of the first and the last count of the newest `rate`."""

    @classmethod
    @contextlib.asynccontextmanager
    async def of(cls, deployment: Deployment) -> AsyncIterator[TokenMeter]:
        async with aiohttp.ClientSession() as http:
            meter = cls(http, deployment.engines["main.0"])
            looking = asyncio.create_task(meter._look())
            try:
                yield meter
            finally:
                looking.cancel()

    async def _look(self) -> None:
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                self.looks.append((time.time(), await sampled(self._http, self._engine)))
            await asyncio.sleep(LOOK_S)

    async def rate(self, seconds: float) -> float:
        """Return the tokens sampled per second from now on, once calls are under way."""
        async with asyncio.timeout(START_S):
            while await sampled(self._http, self._engine) == await self._next():
                pass  # the callers' processes are still starting
        await asyncio.sleep(RAMP_S)
        before, began = await sampled(self._http, self._engine), time.time()
        await asyncio.sleep(seconds)
        tokens = await sampled(self._http, self._engine) - before
        self.counted = began, time.time()
        return tokens / (self.counted[1] - began)

    async def cost_of_lost_cache(self, rate: float, seconds: float) -> float:
        """Return the seconds of sampling at `rate` that are lost in the next `seconds` when the cache is cleared, as at a push: all contexts
        are computed again."""
        before, began = await sampled(self._http, self._engine), time.monotonic()
        for path in ("pause?mode=keep&clear_cache=true", "resume"):
            async with self._http.post(
                f"{self._engine.url}/{path}", headers=make_auth_headers(self._engine.secret)
            ) as response:
                response.raise_for_status()
        await asyncio.sleep(seconds)
        tokens = await sampled(self._http, self._engine) - before
        return time.monotonic() - began - tokens / rate

    async def _next(self) -> float:
        await asyncio.sleep(LOOK_S)
        return await sampled(self._http, self._engine)

    async def until_idle(self) -> None:
        """Return when nothing was sampled between two readings."""
        while await sampled(self._http, self._engine) != await self._next():
            pass

    def between(self, begin: float, end: float) -> float:
        return _at(self.looks, end) - _at(self.looks, begin)


async def call_times(deployment: Deployment) -> dict[str, float]:
    """Return by phase the mean seconds of a call in the proxies: until its first token, its sampling, and then the broker's confirm."""
    job = deployment.job
    secret = keys.derive_operator_secret(keys.load_root(job.run_folder.root_secret), RUN)
    reader = keys.Operator(run=job.run, name=RUN, roles=("read",), expires_at=time.time() + START_S)
    headers = {"authorization": f"Bearer {keys.mint_operator(secret, reader)}"}
    sums: defaultdict[str, float] = defaultdict(float)
    try:
        async with aiohttp.ClientSession(headers=headers, raise_for_status=True) as http:
            for name, url in deployment.metrics_urls().items():
                if name.startswith("proxy"):
                    async with http.get(url) as response:
                        for found in CALL_SECONDS.finditer(await response.text()):
                            sums[f"{found[1]}_{found[2]}"] += float(found[3])
    except aiohttp.ClientError:  # the loop is measured all the same
        traceback.print_exc()
    return {phase: sums[f"{phase}_sum"] / (sums[f"{phase}_count"] or 1) for phase in ("first_token", "call", "confirm")}


async def let_learner_alone(
    deployment: Deployment, meter: TokenMeter, agents: Sequence[asyncio.subprocess.Process], follower: Follower
) -> float:
    """Stop the learner until agents have sampled all that they may, then stop the agents and let the learner train it. Returns
    the Unix time from which on it was alone."""
    learner = deployment.daemons["learner.main"].process
    assert learner is not None
    learner.send_signal(signal.SIGSTOP)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_S):
            await meter.until_idle()
    for agent in agents:
        agent.send_signal(signal.SIGSTOP)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_S):
            await meter.until_idle()
    begin = time.time()
    learner.send_signal(signal.SIGCONT)
    version = int(follower.board.steps["main"][-1]["version"])
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(STEP_S * (1 + ALONE_STEPS)):
            await until_step(follower, version + 1 + ALONE_STEPS)  # the first of them had begun before
    return begin


def limits(
    figures: dict[str, float], *, measured: Sequence[Event], alone: Sequence[Event], rates: dict[str, float]
) -> dict[str, float]:
    """Return the loop's figures relative to those of its parts alone. `alone`: steps of the learner beside an idle engine.

    `loop_over_sum` counts what was sampled in a step's time, which is less than what is trained while a backlog lasts.
    """
    if not alone:
        raise RuntimeError("the learner made no step alone")
    rollout_s = figures["sampled_tokens_per_s"] * figures["step_s"] / rates["direct_tokens_per_s"]
    learner_s = statistics.median(event.fields["train_s"] + event.fields["push_s"] for event in alone)
    return rates | {
        "proxy_over_direct": rates["proxy_tokens_per_s"] / rates["direct_tokens_per_s"],
        "rollout_alone_s": rollout_s,
        "learner_alone_s": learner_s,
        "loop_over_sum": figures["step_s"] / (rollout_s + learner_s),
        "mfu_in_loop": statistics.median(event.fields["mfu"] for event in measured),
        "mfu_alone": statistics.median(event.fields["mfu"] for event in alone),
    }


def engine_rates(steps: Sequence[Event], meter: TokenMeter) -> dict[str, float]:
    """Return the tokens that the engine sampled per second, while the learner computed and while it did not."""
    spans = [training(step) for step in steps]
    beside, beside_s = sum(meter.between(*span) for span in spans), sum(end - begin for begin, end in spans)
    begin, end = spans[0][0], steps[-1].at
    others, others_s = meter.between(begin, end) - beside, end - begin - beside_s
    return {"beside_the_learner": beside / beside_s, "without": others / others_s if others_s > 0 else 0.0}


@contextlib.contextmanager
def multi_process_service(folder: Path, *, wanted: bool) -> Iterator[None]:
    """Run CUDA's multi-process service for all processes that are started in the block: their kernels run at the same time."""
    if not wanted:
        yield
        return
    with (
        tempfile.TemporaryDirectory(prefix="mps-", dir=folder) as place,
        patch.dict(os.environ, dict.fromkeys(MPS_FOLDERS, place)),  # what is measured next is no client of it
    ):
        # a daemon that sees some GPUs only would number them anew for its clients
        every_gpu = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        subprocess.run(["nvidia-cuda-mps-control", "-d"], env=every_gpu, check=True, timeout=30)
        try:
            yield
        finally:
            subprocess.run(["nvidia-cuda-mps-control"], input=b"quit\n", check=False, timeout=60)
            for log in Path(place).glob("*.log"):
                _say(f"{log.name}: {log.read_text()[-1500:]}")


async def until_step(follower: Follower, step: int) -> None:
    told = 0.0

    def reached(board: Any) -> bool:
        nonlocal told
        steps = board.steps.get("main")
        version = int(steps[-1]["version"]) if steps else 0
        if time.monotonic() > told + PROGRESS_S:
            told = time.monotonic()
            last = {phase: round(steps[-1].get(phase, 0.0), 3) for phase in PHASES} if steps else {}
            _say(f"step {version}, {board.tokens_per_s():.0f} tokens/s sampled, {last}")
            for warned in board.warnings:
                _say(f"warning of {warned.source}: {warned.text[:300]}")
        return version >= step

    await follower.until(reached)


def read_log(log: Path) -> Iterator[dict[str, Any]]:
    """What a daemon logged."""
    lines = (line for line in log.read_bytes().splitlines() if line.startswith(b"{"))
    return (msgspec.json.decode(line) for line in lines)


def stop_without_checkpoint(deployment: Deployment) -> None:
    """A learner that is asked to stop would save optimizer and weights first, minutes for nothing here."""
    process = deployment.daemons["learner.main"].process
    if process is not None and process.returncode is None:
        process.kill()


def summary(
    steps: Sequence[Event], events: Sequence[Event], watch: GpuWatch, *, warm_up: int
) -> tuple[dict[str, float], dict[str, Any]]:
    """Of the steps after the warm-up."""
    begin, measured = steps[warm_up - 1].at, steps[warm_up:]
    end = measured[-1].at
    seconds = end - begin
    trained = sum(event.fields["tokens_trained"] for event in measured)
    phases = {phase: report.Spread.of(float(event.fields[phase]) for event in measured) for phase in PHASES}
    figures = {
        "steps": float(len(measured)),
        "pause_s": phases["pause_s"].median,
        "step_s": seconds / len(measured),
        "wait_s": phases["wait_s"].median,
        "train_s": phases["train_s"].median,
        "push_s": phases["push_s"].median,
        "sampled_tokens_per_s": sampled_between(events, begin, end) / seconds,
        "trained_tokens_per_s": trained / seconds,
    }
    if (busy := watch.busy((begin, end))) is not None:
        figures["gpu_idle_share"] = 1 - busy
    computing = [training(event) for event in measured]
    shares = {str(gpu): watch.busy(*computing, gpu=gpu) for gpu in sorted({look.gpu for look in watch.looks})}
    staleness: Counter[str] = Counter()
    for event in measured:
        staleness.update(event.fields["staleness"])
    pick = (
        "layout",
        "folding",
        "tokens_computed",
        "tokens_trained",
        "mfu",
        "staleness",
        "episodes",
        "step_s",
        "drifted",
        "dropped",
    )
    detail = {
        "seconds": seconds,
        "phases": {phase: spread._asdict() for phase, spread in phases.items()},
        "steps": [{key: event.fields.get(key) for key in pick} for event in measured],
        "gpu_most_used_gib": watch.most_used_gib(),
        "gpu_busy_while_the_learner_computes": shares,
        "staleness": dict(sorted(staleness.items())),
        "warnings": [event.fields.get("text") for event in events if event.name == "warning"][:20],
    }
    return figures, detail


def training(step: Event) -> tuple[float, float]:
    """From when until when, in Unix time, the learner computed: after its wait, before its push."""
    begin = step.at - step.fields["step_s"] + step.fields["wait_s"]
    return begin, begin + float(step.fields["train_s"])


def sampled_between(events: Sequence[Event], begin: float, end: float) -> float:
    """Tokens that the proxies recorded, interpolated between what they said before and after."""
    said: dict[str, list[tuple[float, float]]] = {}
    for event in events:
        if event.name == "state" and "sampled_tokens" in event.fields:
            said.setdefault(event.source, []).append((event.at, float(event.fields["sampled_tokens"])))
    return sum(_at(points, end) - _at(points, begin) for points in said.values())


def _at(points: Sequence[tuple[float, float]], moment: float) -> float:
    before = max((point for point in points if point[0] <= moment), default=points[0])
    after = min((point for point in points if point[0] >= moment), default=points[-1])
    share = (moment - before[0]) / (after[0] - before[0]) if after[0] > before[0] else 0.0
    return before[1] + share * (after[1] - before[1])


def overall(figures: dict[str, float]) -> dict[str, float]:
    """Return the idle share of the model with the largest one, and rates and ratios of the first model."""
    idle = [value for figure, value in figures.items() if figure.startswith("gpu_idle_share_")]
    wanted = ("sampled_tokens_per_s", "trained_tokens_per_s", "loop_over_sum", "proxy_over_direct", "mfu_in_loop")
    first = {
        name: next(value for figure, value in figures.items() if figure.startswith(f"{name}_"))
        for name in wanted
        if any(figure.startswith(f"{name}_") for figure in figures)
    }
    return first | ({"gpu_idle_share": max(idle)} if idle else {})


def _named(figure: str, model: str) -> str:
    """`pause_s` of 1.7b is `pause_1p7b_s`, rates and shares end in the model."""
    short = model.replace(".", "p")
    if figure.endswith("_s") and not figure.endswith("per_s"):
        return f"{figure.removesuffix('_s')}_{short}_s"
    return f"{figure}_{short}"


def show_logs(folder: Path) -> None:
    """The ends of all logs, for who was not there."""
    for log in sorted(folder.glob("runs/*/logs/*.log")):
        print(f"--- the end of {log.name}\n{read_tail(log)}", flush=True)


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)
