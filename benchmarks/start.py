"""Seconds from `swarmq up` to the first answer that an agent gets, the first time and the second time on one host.

    python -m benchmarks.start                                    without a GPU, the smallest model
    python -m benchmarks.start --device cuda --model 1.7b         about four minutes on one GPU

The model has random weights and is made before. The first start has no caches of compiled code (vLLM's, inductor's, Triton's); the second
has what the first one left. Each start ends with the stop of the run, so files, ports and queues are those of a run that goes on.
`$VLLM_*` and other variables are passed on.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
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


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """One start, in seconds since the command was given."""

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
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument(
        "--scratch", type=Path, help="an empty folder for model, run and caches, kept; or that of an earlier call"
    )
    arguments = parser.parse_args()
    figures, detail = report.kept("start", out=arguments.out)
    with tempfile.TemporaryDirectory(prefix="swarmq-start-") as temporary:
        folder = (arguments.scratch or Path(temporary)).absolute()
        if not (folder / "model").exists():
            make_model(folder / "model", arguments.model, arguments.device)
        job = write_job(folder)
        starts = [measure(job, caches(folder)) for _ in range(arguments.starts)]
    device = "gpu" if arguments.device == "cuda" else "cpu"
    figures |= {f"{device}_first_s": starts[0].first_completion_s, f"{device}_second_s": starts[-1].first_completion_s}
    detail[device] = {
        "model": arguments.model,
        "hardware": report.hardware(),
        "commit": report.commit(),
        "load": os.getloadavg(),
        "starts": msgspec.to_builtins(starts),
    }
    rows = [[number, start.up_s, start.first_completion_s, start.processor_s] for number, start in enumerate(starts, 1)]
    print(report.table(("start", "up, s", "first completion, s", "processor, s"), rows), flush=True)
    report.save("start", figures, detail=detail, out=arguments.out)


def write_job(folder: Path) -> Path:
    policy = {
        "model": str(folder / "model"),
        "engine": {"max_model_len": LENGTH},
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


def measure(job: Path, environment: dict[str, str]) -> Start:
    """Start the run, get an answer, and stop the run."""
    stages: dict[str, float] = {}
    used, began = _processor_s(), time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-m", "swarmq", "up", str(job)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
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
    return Start(up_s=up_s, first_completion_s=first_s, processor_s=_processor_s() - used, stages=stages)


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
