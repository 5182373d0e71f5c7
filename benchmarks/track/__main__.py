"""Run a fixed set of benchmarks on this machine's processor, and append a line with the commit to `benchmarks/track.jsonl`.

    python -m benchmarks.track              # all parts, about a quarter of an hour on two idle cores
    python -m benchmarks.track --gate       # compare the newest line with those before it; status 1 if a figure has fallen
    python -m benchmarks.track --noise 5    # run the set five times at this commit: how much its figures vary

Each benchmark is a process of its own; nothing else should run beside it. Seconds and rates are kept in units of a reference that is
measured before and after the set.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from benchmarks import report
from benchmarks.track import picture, record
from benchmarks.track.figures import FIGURES, PARTS, Part
from benchmarks.track.record import Line, Verdict, append_line, compare, convert, read_lines, read_noise
from benchmarks.track.reference import measure_reference_s


def main() -> int:
    parser = report.parser(__doc__)
    parser.add_argument("--gate", action="store_true", help="measure nothing: compare the newest line")
    parser.add_argument("--noise", type=int, metavar="N", help="measure the noise of the figures by N runs of the set")
    parser.add_argument(
        "--accept",
        action="append",
        default=[],
        metavar="FIGURE=REASON",
        help="from this line on, compare the figure only with newer lines: it is worse on purpose",
    )
    parser.add_argument("--only", default="", help="benchmarks of the set, separated by commas")
    arguments = parser.parse_args()
    path = record.RECORD if arguments.out is None else arguments.out / record.RECORD.name
    if arguments.gate:
        return gate(read_lines(path))
    wanted = [name for name in arguments.only.split(",") if name]
    if unknown := set(wanted) - {part.benchmark for part in PARTS}:
        parser.error(f"--only {','.join(sorted(unknown))}: the set has {', '.join(part.benchmark for part in PARTS)}")
    accepted = dict(one.partition("=")[::2] for one in arguments.accept)
    if unknown := {
        name for name, reason in accepted.items() if not reason or name not in {one.name for one in FIGURES}
    }:
        parser.error(f"--accept {min(unknown)}: write the name of a tracked figure, = and why it may be worse")
    parts = [part for part in PARTS if not wanted or part.benchmark in wanted]
    if arguments.noise:
        return save_noise([run(parts) for _ in range(arguments.noise)], arguments.out)
    append_line(msgspec.structs.replace(run(parts), accepted=accepted), path)
    lines = read_lines(path)
    picture.draw(lines, path.with_suffix(".svg"))
    return gate(lines)


def run(parts: list[Part]) -> Line:
    """Run the parts one after the other."""
    references = [measure_reference_s()]
    measured: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for part in parts:
            print(f"{datetime.now(UTC):%H:%M:%S} {part.benchmark} {' '.join(part.arguments)}", flush=True)
            measured[part.benchmark] = run_part(part, Path(folder))
    references.append(measure_reference_s())
    reference_s = statistics.fmean(references)
    return Line(
        commit=report.commit(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        hardware=report.hardware(),
        versions=report.versions(),
        reference_s=reference_s,
        figures={
            figure.name: convert(figure, measured[figure.benchmark][figure.key], reference_s)
            for figure in FIGURES
            if figure.benchmark in measured
        },
    )


def run_part(part: Part, folder: Path) -> dict[str, float]:
    """Return the figures of one benchmark. Exits with its output if it fails."""
    command = [sys.executable, "-m", f"benchmarks.{part.benchmark}", *part.arguments, "--out", str(folder)]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{part.benchmark} ended with status {done.returncode}:\n{done.stdout[-4000:]}")
    figures: dict[str, float] = msgspec.json.decode((folder / f"{part.result or part.benchmark}.json").read_bytes())[
        "figures"
    ]
    return figures


def gate(lines: list[Line]) -> int:
    """Print how the newest line compares; return the exit status."""
    if not lines:
        sys.exit(f"{record.RECORD.name} has no line yet: run `make track`")
    verdicts = compare(lines, read_noise())
    print(f"commit {lines[-1].commit} compared with {len(lines) - 1} lines before it\n")
    heads = ["figure", "newest", "before", "better by", "noise allows", "", "what it is"]
    print(report.table(heads, [_row(verdict) for verdict in verdicts]))
    return int(any(verdict.has_fallen for verdict in verdicts))


def save_noise(lines: list[Line], out: Path | None) -> int:
    samples = {name: [line.figures[name] for line in lines] for name in lines[0].figures}
    by_name = {figure.name: figure for figure in FIGURES}
    noise = {name: record.measure_noise(by_name[name], values) for name, values in samples.items()}
    known, detail = report.kept("track_noise", out=out)  # parts may be measured one by one
    print(report.table(["figure", "noise"], list(noise.items())))
    print(report.save("track_noise", {**known, **noise}, detail={**detail, **samples}, out=out))
    return 0


def _row(verdict: Verdict) -> list[str]:
    return [
        verdict.figure.name,
        f"{verdict.newest:.4g}",
        "-" if verdict.before is None else f"{verdict.before:.4g}",
        f"{verdict.change:+.3f}",
        f"{verdict.allowed:.3f}",
        "FALLEN" if verdict.has_fallen else "",
        verdict.figure.meaning,
    ]


if __name__ == "__main__":
    sys.exit(main())
