"""The tests of the parts, in two halves side by side: those that load torch with the collector's, and the others.

Every worker of one common run would load everything that any of its tests needs, which takes longer than most tests.
Arguments go to both halves.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parent.parent / "tests"
BESIDE = ("benchmarks", "collector", "demo", "engine_control", "learner", "timeline", "tree")
NOTHING_FOUND = 5


def main(arguments: list[str]) -> int:
    folders = sorted(folder for folder in (TESTS / "unit").iterdir() if not folder.name.startswith(("_", ".")))
    first = [folder for folder in folders if folder.name in BESIDE]
    others = [folder for folder in folders if folder.name not in BESIDE]
    with tempfile.TemporaryFile() as said:
        beside = subprocess.Popen(pytest(first, arguments), stdout=said, stderr=subprocess.STDOUT)
        # With a worker of its own the broker starts while others collect and run; who needs it comes last.
        statuses = [
            subprocess.run(pytest([*others, TESTS / "contract"], ["-n", "1", *arguments]), check=False).returncode
        ]
        statuses.append(beside.wait())
        said.seek(0)
        print("== those with torch, and the collector", flush=True)
        sys.stdout.buffer.write(said.read())
    failed = [status for status in statuses if status not in {0, NOTHING_FOUND}]
    return failed[0] if failed else min(statuses)


def pytest(folders: list[Path], arguments: list[str]) -> list[str]:
    return [sys.executable, "-m", "pytest", "-m", "not slow", *map(str, folders), *arguments]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
