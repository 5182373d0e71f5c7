"""The tests of the parts, three runs side by side: those that load torch, those of collector, proxy and timelines, and
the others.

Every worker of one common run would load everything that any of its tests needs, which takes longer than most tests.
Three runs keep two cores busy, as the others wait now and then, for the broker above all. Arguments go to each.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

TESTS = Path(__file__).parent.parent / "tests"
BESIDE = {
    "those with torch": ("benchmarks", "demo", "learner", "weights"),
    "collector, proxy and timelines": ("collector", "proxy", "timeline"),
}
NOTHING_FOUND = 5


def main(arguments: list[str]) -> int:
    parts = sorted(path for path in (TESTS / "unit").iterdir() if not path.name.startswith(("_", ".")))
    others = [path for path in parts if not any(path.name in names for names in BESIDE.values())]
    with ExitStack() as files:
        running = []
        for title, names in BESIDE.items():
            said = files.enter_context(tempfile.TemporaryFile())
            command = pytest([TESTS / "unit" / name for name in names], arguments)
            running.append((title, subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT), said))
        # With a worker of its own the broker starts while others collect and run; who needs it comes last.
        statuses = [
            subprocess.run(pytest([*others, TESTS / "contract"], ["-n", "1", *arguments]), check=False).returncode
        ]
        for title, process, said in running:
            statuses.append(process.wait())
            said.seek(0)
            print(f"== {title}", flush=True)
            sys.stdout.buffer.write(said.read())
    failed = [status for status in statuses if status not in {0, NOTHING_FOUND}]
    return failed[0] if failed else min(statuses)


def pytest(paths: list[Path], arguments: list[str]) -> list[str]:
    return [sys.executable, "-m", "pytest", "-m", "not slow", *map(str, paths), *arguments]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
