"""Every tutorial learns: held-out reward before and after, on two seeds.

    python -m benchmarks.examples                                    # all of them, one after another
    python -m benchmarks.examples countdown frozen_lake --seeds 0 1
    python -m benchmarks.examples --jobs 16 --cores 2                # many at once, each on cores of its own
    python -m benchmarks.examples try countdown --attempts 4         # the warmed-up model alone: rewards, conversations

Each tutorial runs as its README says, with `swarmq up`, `swarmq feed` and `swarmq worker` as processes. Finished rows are kept in
--folder and skipped by a later call, unless the tutorial's files have changed. The curve goes into the tutorial's folder.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import report
from benchmarks.examples import curve
from benchmarks.examples.course import Course, CourseError, Row, row_path, rows_in
from benchmarks.examples.manifest import EXAMPLES, ROOT, digest, load, names
from benchmarks.pinned import STAGGER_S, CorePool


def main() -> None:
    options = parse()
    os.chdir(ROOT)
    if options.names[:1] == ["try"]:
        for name in options.names[1:]:
            try:
                asyncio.run(
                    Course(name, load(name), options.seeds[0], options.folder / "try").attempt(options.attempts)
                )
            except CourseError as error:
                sys.exit(f"{name}: {error}")
        return
    chosen = options.names or names()
    manifests = {name: load(name) for name in chosen}  # every mistake in a manifest is found before the first start
    todo = [
        (name, seed)
        for name in chosen
        for seed in options.seeds
        if options.again or not is_finished(row_path(options.folder, name, seed), name)
    ]
    run_all(todo, options)
    wanted = {(name, seed) for name in chosen for seed in options.seeds}
    rows = [row for row in rows_in(options.folder) if (row.name, row.seed) in wanted]
    summary = [summarize(name, [row for row in rows if row.name == name], manifests[name].gain) for name in chosen]
    for name, one in zip(chosen, summary, strict=True):
        one["title"] = manifests[name].title
        drawn = [row for row in rows if row.name == name and row.rewards]
        if drawn:
            place = options.out / "curves" / f"{name}.png" if options.out else EXAMPLES / name / "curve.png"
            curve.draw(drawn, manifests[name].title, place)
    heads = ("tutorial", "seed", "before", "after", "gain", "wanted", "minutes", "steps", "episodes", "problem")
    print(report.table(heads, [cells(row, manifests[row.name].gain) for row in rows]))
    told = merge(report.kept("examples", out=options.out)[1].get("tutorials", []), summary)
    whole = len(told) == len(names()) and not any(one["problems"] for one in told)
    report.save("examples", figures(told), detail={"tutorials": told}, out=options.out, finished=whole)
    if not all(one["learned"] for one in summary):
        sys.exit(f"did not learn: {', '.join(one['name'] for one in summary if not one['learned'])}")


def parse() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="tutorials, all by default; `try NAME` trains nothing")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--cores", type=int, default=2, help="cores of each run, by taskset")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--folder", type=Path, default=Path("runs/examples"), help="run folders and finished rows")
    parser.add_argument("--minutes", type=float, help="limit of each training, instead of the tutorials' own")
    parser.add_argument("--steps", type=int, help="optimizer steps, instead of the tutorials' own")
    parser.add_argument("--again", action="store_true", help="run finished ones again")
    parser.add_argument("--attempts", type=int, default=8, help="of `try`, at each held-out task")
    options = parser.parse_args()
    options.folder = options.folder.resolve()
    return options


def is_finished(path: Path, name: str) -> bool:
    try:
        row = msgspec.json.decode(path.read_bytes(), type=Row)
    except (OSError, msgspec.DecodeError):
        return False
    return not row.problem and row.digest == digest(name)


def run_all(todo: Sequence[tuple[str, int]], options: argparse.Namespace) -> None:
    """Run each in a process of its own, pinned to free cores; output goes to a log if there are several at once."""
    pool = CorePool(options.jobs, options.cores, stagger_s=STAGGER_S if options.jobs > 1 else 0.0)
    more = [*(("--minutes", str(options.minutes)) if options.minutes else ())]
    more += [*(("--steps", str(options.steps)) if options.steps else ())]

    def run(name: str, seed: int) -> None:
        command = [sys.executable, "-m", "benchmarks.examples.course", name]
        command += ["--seed", str(seed), "--folder", str(options.folder), *more]
        log = options.folder / "logs" / f"{name}-{seed}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with pool.pinned() as pinned:
            began = time.monotonic()
            if options.jobs == 1:
                status = subprocess.run([*pinned, *command], check=False).returncode
            else:
                with log.open("wb") as sink:
                    status = subprocess.run([*pinned, *command], stdout=sink, stderr=sink, check=False).returncode
            what = "done" if status == 0 else f"failed, see {log if options.jobs > 1 else 'above'}"
            print(f"{name}, seed {seed}: {what}, {(time.monotonic() - began) / 60:.1f} minutes", flush=True)

    with ThreadPoolExecutor(options.jobs) as runs:
        for done in [runs.submit(run, *one) for one in todo]:
            done.result()


def summarize(name: str, rows: Sequence[Row], gain: float) -> dict[str, Any]:
    """Return a tutorial's part of the results; it has learned if every seed finished and gained enough."""
    finished = [row for row in rows if row.before and row.after and not row.problem]
    gains = [row.gain for row in finished]
    return {
        "name": name,
        "title": "",
        "wanted_gain": gain,
        "learned": bool(rows) and len(finished) == len(rows) and min(gains) >= gain,
        "gain": round(min(gains), 4) if gains else None,
        "minutes": max((row.minutes for row in rows), default=0.0),
        "model_minutes": max((row.model_minutes for row in rows), default=0.0),
        "problems": [row.problem for row in rows if row.problem],
        "seeds": [msgspec.to_builtins(row, str_keys=True) for row in rows],
    }


def merge(earlier: Sequence[dict[str, Any]], summary: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the parts of all tutorials: those of this call, and the earlier ones of others that still exist."""
    known = {one["name"]: one for one in (*earlier, *summary)}
    return [known[name] for name in names() if name in known]


def figures(summary: Sequence[dict[str, Any]]) -> dict[str, float]:
    gains = [one["gain"] for one in summary if one["learned"]]
    return {
        "tutorials": len(summary),
        "learned": len(gains),
        "reward_gain_min": min(gains, default=0.0),
        "minutes_max": max((one["minutes"] for one in summary), default=0.0),
        "model_minutes_max": max((one["model_minutes"] for one in summary), default=0.0),
    }


def cells(row: Row, wanted: float) -> tuple[Any, ...]:
    def shown(point: Any) -> str:
        return f"{point.reward:.3f} ± {point.standard_error:.3f}" if point else "-"

    gain = f"{row.gain:+.3f}" if row.before and row.after else "-"
    numbers = (row.minutes, row.steps, row.episodes)
    return (row.name, row.seed, shown(row.before), shown(row.after), gain, wanted, *numbers, row.problem)


if __name__ == "__main__":
    main()
