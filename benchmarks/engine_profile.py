"""Where a step of vLLM's time goes at the load of the loop benchmark: GPU kernels by kind, from vLLM's own profiler.

    python -m benchmarks.engine_profile --shape 1.7b --device cuda          # two minutes on one GPU
    python -m benchmarks.engine_profile --shape tiny --device cpu           # anywhere; operators in place of kernels

The engine is started as `swarmq up` starts it, and as many conversations as in benchmarks/loop ask it directly. First tokens are counted, then
some steps are traced. A step is the time between two of the engine's calls of the model; the profiler slows the processor, so the time in which
the GPU computes is what a trace tells, and the rate is told without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec

from benchmarks import report
from benchmarks.loop.agent import SERVER_ENV, Server
from benchmarks.loop.model import make_model
from benchmarks.loop.run import SIZES, Size, TokenMeter
from swarmq.config import EngineSettings, Policy
from swarmq.engine.auth import make_auth_headers
from swarmq.engine.server.launch import EngineProcess
from swarmq.runtime.processes import die_with_parent, find_free_port, stop_group

T = TypeVar("T")

STEPS = 24
COUNTED_S, TRACED_S, WRITE_S, LOOK_S = 12.0, 2.0, 60.0, 0.2
SKIPPED = 2
"""Steps of a trace in which the profiler itself starts."""
KINDS = (
    ("cache write", r"reshape_and_cache|cache_kernel"),
    ("attention", r"flash|fmha|attn|attention|FlashAttn|reduce_segments"),
    ("sampling and log-probabilities", r"gumbel|topk|softmax|logprob|ranks?_kernel|sampl|argmax|rejection"),
    ("matrix products", r"gemm|nvjet|cublas|splitK|xmma|gemv|cutlass|aten::(mm|addmm|linear|matmul|bmm)|mkldnn"),
    ("norms, rotations, activations", r"triton_(poi|red|per|tem)|rms_?norm|rotary|silu|swiglu|layernorm|rope"),
)
"""Kind of kernel, and a pattern of its names; the first that is found in a name decides."""
OTHER = "other"


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """Of one engine process, in milliseconds per step."""

    steps: int
    step_ms: float
    busy_ms: float
    """Time in which at least one kernel ran."""
    kinds: dict[str, float]
    kernels: dict[str, float]
    """The longest ones by name."""


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--shape", default="1.7b", choices=SIZES)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="swarmq-engine-") as folder:
        rate, trace = asyncio.run(measure(Path(folder), arguments.shape, cuda=arguments.device == "cuda"))
    shares = [[kind, ms, ms / trace.busy_ms] for kind, ms in trace.kinds.items()]
    print(report.table(("kernels", "ms per step", "share of the busy time"), shares))
    figures = {
        "tokens_per_s": rate,
        "step_ms": trace.step_ms,
        "busy_ms": trace.busy_ms,
        **{f"share_{re.sub('[^a-z]+', '_', kind)}": ms / trace.busy_ms for kind, ms in trace.kinds.items()},
    }
    name = f"engine_profile_{report.place(arguments.device)}"
    print(report.save(name, figures, detail=msgspec.to_builtins(trace), out=arguments.out))


async def measure(folder: Path, shape: str, *, cuda: bool) -> tuple[float, Trace]:
    """Return the tokens per second without the profiler, and a trace."""
    size, model, traces = SIZES[shape], folder / "model", folder / "traces"
    for made in (model, traces):
        made.mkdir()
    make_model(model, shape, "cuda" if cuda else "cpu")
    profiler = {"profiler": "torch", "torch_profiler_dir": str(traces), "ignore_frontend": True}
    settings = EngineSettings(
        max_model_len=512 + size.turns * 3 * (size.sampled + size.words),
        gpu_memory_utilization=0.5 if cuda else None,
        arguments=("--max-num-seqs", str(size.at_once), "--profiler-config", json.dumps(profiler)),
    )
    policy = Policy(model=str(model), engine=settings)
    log = folder / "engine.log"
    async with EngineProcess(policy, port=find_free_port(), log_path=log, gpus=(0,) if cuda else None) as engine:
        headers = make_auth_headers(engine.secret)
        async with aiohttp.ClientSession(headers=headers, raise_for_status=True) as http, asking(engine, model, size):
            rate = await TokenMeter(http, engine).rate(COUNTED_S)
            async with http.post(f"{engine.url}/start_profile", json={"max_iterations": STEPS}):
                await asyncio.sleep(TRACED_S)
            async with http.post(f"{engine.url}/stop_profile"):
                pass
            async with asyncio.timeout(WRITE_S):
                while not (files := await later(asyncio.to_thread(lambda: [*traces.glob("*.json*")]))):
                    pass
    return rate, read_trace(max(files, key=lambda file: file.stat().st_size).read_bytes())


async def later(asked: Awaitable[T]) -> T:
    await asyncio.sleep(LOOK_S)
    return await asked


@contextlib.asynccontextmanager
async def asking(engine: EngineProcess, model: Path, size: Size) -> AsyncIterator[None]:
    """Let the conversations of benchmarks/loop/agent.py ask the engine until the block ends."""
    sampling = {"max_tokens": size.sampled, "logprobs": True, "temperature": 1.0}
    server = Server(base_url=f"{engine.url}/v1", api_key=engine.secret, model=str(model), sampling=sampling)
    environment = os.environ | {SERVER_ENV: msgspec.json.encode(server).decode(), "OMP_NUM_THREADS": "1"}
    words = [str(size.at_once // size.workers), str(size.turns), str(size.words)]
    command = (sys.executable, "-m", "benchmarks.loop.agent", *words)
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(size.workers):
            process = await asyncio.create_subprocess_exec(
                *command, env=environment, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent
            )
            stack.push_async_callback(stop_group, process, grace_s=0.0)
        yield


def read_trace(raw: bytes) -> Trace:
    """Read a trace of torch's profiler, compressed or not. Raises ValueError if it holds too few steps."""
    told = json.loads(gzip.decompress(raw) if raw.startswith(b"\x1f\x8b") else raw)["traceEvents"]
    events = [event for event in told if event.get("ph") == "X" and "dur" in event]
    begins = sorted(
        event["ts"]
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith("execute_")
    )
    if len(begins) < SKIPPED + 2:
        raise ValueError(f"the trace holds {len(begins)} steps; at least {SKIPPED + 2} are needed")
    begin, end, steps = begins[SKIPPED], begins[-1], len(begins) - 1 - SKIPPED
    worked = [event for event in events if event.get("cat") in {"kernel", "gpu_memcpy", "gpu_memset"}]
    worked = worked or [*_innermost([event for event in events if event.get("cat") == "cpu_op"])]
    worked = sorted((event for event in worked if begin <= event["ts"] < end), key=lambda event: event["ts"])
    kinds, kernels, busy, until = Counter[str](), Counter[str](), 0.0, begin
    for event in worked:
        kinds[kind_of(event["name"])] += event["dur"]
        kernels[event["name"][:100]] += event["dur"]
        stop = event["ts"] + event["dur"]
        busy += max(0.0, stop - max(event["ts"], until))
        until = max(until, stop)

    def per_step(each: Sequence[tuple[str, float]]) -> dict[str, float]:
        return {name: round(us / steps / 1e3, 4) for name, us in each}

    return Trace(
        steps=steps,
        step_ms=(end - begin) / steps / 1e3,
        busy_ms=busy / steps / 1e3,
        kinds=per_step(kinds.most_common()),
        kernels=per_step(kernels.most_common(20)),
    )


def kind_of(kernel: str) -> str:
    return next((kind for kind, pattern in KINDS if re.search(pattern, kernel, re.IGNORECASE)), OTHER)


def _innermost(operators: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the operators that have no other one of their thread inside."""
    threads: dict[Any, list[dict[str, Any]]] = {}
    for operator in operators:
        threads.setdefault(operator["tid"], []).append(operator)
    for each in threads.values():
        each.sort(key=lambda operator: (operator["ts"], -operator["dur"]))
        for operator, later in zip(each, [*each[1:], None], strict=True):
            if later is None or later["ts"] >= operator["ts"] + operator["dur"]:
                yield operator


if __name__ == "__main__":
    main()
