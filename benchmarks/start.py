"""Seconds from `swarmq up` to the first answer that an agent gets, the first time and the second time on one host.

    python -m benchmarks.start                                    without a GPU, the smallest model
    python -m benchmarks.start --device cuda --model 1.7b         about four minutes on one GPU
    python -m benchmarks.start --device cuda --model 1.7b --variants shipped spawn no-estimate --deadline 240     other ways to start, too

The model has random weights and is made before. The first start has no caches of compiled code (vLLM's, inductor's, Triton's); the second
has what the first one left. With `--variants` each is started once after a first start of the first one. Each start ends with the stop of the run, so files, ports and queues are those of a run that goes on.
`$VLLM_*` and other variables are passed on.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import report
from benchmarks.loop.model import make_model
from benchmarks.timelines.run import SHAPES
from swarmq import Episode, SwarmClient, SwarmJob, ask

RUN = "start"
LENGTH = 2048
"""Largest number of tokens of prompt and answer together."""

FEW_GRAPHS = ("--compilation-config", json.dumps({"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128, 256]}))


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """Environment and engine arguments of a start."""

    environment: dict[str, str] = {}
    arguments: tuple[str, ...] = ()


VARIANTS = {
    "shipped": Variant(),
    "spawn": Variant(environment={"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}),  # the engine core imports vLLM again
    "no-estimate": Variant(environment={"VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS": "0"}),  # graphs are captured once
    "two-servers": Variant(arguments=("--api-server-count", "2")),
    "few-graphs": Variant(arguments=FEW_GRAPHS),
}


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """One start, in seconds since the command was given."""

    variant: str = "shipped"
    up_s: float
    first_completion_s: float
    processor_s: float
    """Processor time of all processes of the run, its stop included."""
    stages: dict[str, float]
    """Line of the command's output -> seconds after which it came."""


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--model", default="tiny", choices=SHAPES)
    parser.add_argument("--starts", type=int, default=2, help="of the first variant")
    parser.add_argument("--variants", nargs="+", default=["shipped"], choices=VARIANTS)
    parser.add_argument("--deadline", type=float, default=3600.0, help="seconds after which no start begins")
    parser.add_argument(
        "--scratch", type=Path, help="an empty folder for model, run and caches, kept; or that of an earlier call"
    )
    arguments = parser.parse_args()
    began, failed = time.monotonic(), 0
    figures, detail = report.kept("start", out=arguments.out)
    device = "gpu" if arguments.device == "cuda" else "cpu"
    starts: list[Start] = []
    with tempfile.TemporaryDirectory(prefix="swarmq-start-") as temporary:
        folder = (arguments.scratch or Path(temporary)).absolute()
        if not (folder / "model").exists():
            make_model(folder / "model", arguments.model, arguments.device)
        planned = [*arguments.variants[:1] * (arguments.starts - 1), *arguments.variants]
        for variant in planned:
            if time.monotonic() - began > arguments.deadline:
                print(f"{variant}: no time left", flush=True)
                continue
            try:
                starts.append(measure(write_job(folder, VARIANTS[variant].arguments), folder, variant))
            except Exception:  # the other variants are started all the same
                failed += 1
                traceback.print_exc()
                continue
            detail[device] = {
                "model": arguments.model,
                "hardware": report.hardware(),
                "commit": report.commit(),
                "load": os.getloadavg(),
                "starts": msgspec.to_builtins(starts),
            }
            report.save(
                "start",
                figures | figures_of(device, starts),
                detail=detail,
                out=arguments.out,
                finished=len(starts) == len(planned),
            )
    rows = [[one.variant, one.up_s, one.first_completion_s, one.processor_s] for one in starts]
    print(report.table(("start", "up, s", "first completion, s", "processor, s"), rows), flush=True)
    sys.exit(failed)


def figures_of(device: str, starts: Sequence[Start]) -> dict[str, float]:
    """The first start, and the last one of the first variant."""
    own = [one.first_completion_s for one in starts if one.variant == starts[0].variant]
    return {f"{device}_first_s": own[0]} | ({f"{device}_second_s": own[-1]} if len(own) > 1 else {})


def write_job(folder: Path, arguments: Sequence[str]) -> Path:
    policy = {
        "model": str(folder / "model"),
        "engine": {"max_model_len": LENGTH, "arguments": arguments},
        "sampling": {"max_tokens": 8},
        "train": {"trackers": []},
    }
    groups = {"group_size": 4, "groups_per_batch": 2}
    job = SwarmJob.build({"run": RUN, "folder": str(folder / "runs"), "groups": groups, "policies": {"main": policy}})
    path = folder / "job.toml"
    path.write_text(job.to_toml())
    return path


def caches(folder: Path) -> dict[str, str]:
    """Return the environment variables for caches of compiled code in the folder."""
    names = {"XDG_CACHE_HOME": "", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
    return {name: str(folder / "cache" / part) for name, part in names.items()}


def measure(job: Path, folder: Path, variant: str) -> Start:
    """Start the run, get an answer, and stop the run."""
    stages: dict[str, float] = {}
    used, began = _processor_s(), time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-m", "swarmq", "up", str(job)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | caches(folder) | VARIANTS[variant].environment,
    ) as process:
        assert process.stdout
        for line in process.stdout:
            text = line.strip().partition(" s  ")[2]
            stages.setdefault(text[:60], round(time.monotonic() - began, 2))
            if text.startswith("Ctrl-C"):
                break
        else:
            raise RuntimeError(f"`swarmq up` ended with status {process.wait()}: {list(stages)[-5:]}")
        up_s = time.monotonic() - began
        try:
            first_s = _first_answer(SwarmJob.load(job).run_folder.path) - began
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate()
    return Start(
        variant=variant, up_s=up_s, first_completion_s=first_s, processor_s=_processor_s() - used, stages=stages
    )


def _first_answer(run: Path) -> float:
    """Attempt a task, and return when the first answer came."""
    answered: list[float] = []

    def attempt(ep: Episode) -> float:
        ask(ep, "Write.")
        answered.append(time.monotonic())
        return 0.0

    with SwarmClient(run) as client:
        client.run_episodes_until_all_complete([{"id": str(time.time_ns())}], attempt, progress=False)
    return answered[0]


def _processor_s() -> float:
    used: Any = resource.getrusage(resource.RUSAGE_CHILDREN)
    return float(used.ru_utime + used.ru_stime)


if __name__ == "__main__":
    main()
