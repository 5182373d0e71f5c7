"""The version stands in src/swarmq/version.py alone, and is there without installed metadata."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import swarmq

ROOT = Path(__file__).parents[3]


def test_the_build_reads_the_version_from_the_module():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"]
    assert project["project"]["dynamic"] == ["version"]
    source = (ROOT / project["tool"]["hatch"]["version"]["path"]).read_text()
    assert re.search(r'^__version__ = "(.+)"$', source, re.MULTILINE)[1] == swarmq.__version__


def test_the_changelog_opens_with_this_version():
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    assert newest == swarmq.__version__


def test_no_other_module_states_the_version_or_asks_the_metadata_for_it():
    stated = {
        str(path.relative_to(ROOT))
        for folder in ("src", "benchmarks", "scripts")
        for path in (ROOT / folder).rglob("*.py")
        if re.search(rf'"{re.escape(swarmq.__version__)}"|metadata\.version\("swarmq"\)', path.read_text())
    }
    assert stated == {"src/swarmq/version.py"}


def test_a_copy_of_the_source_without_metadata_knows_its_version(tmp_path):
    """On a machine that has the packages and PYTHONPATH=src, but no installed swarmq."""
    shutil.copytree(ROOT / "src/swarmq", tmp_path / "swarmq", ignore=shutil.ignore_patterns("__pycache__"))
    program = (
        "import sys, swarmq; print(swarmq.__version__); "
        "print(sorted({'importlib.metadata', 'msgspec', 'asyncio', 'click'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", program], env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split("\n")[:2] == [swarmq.__version__, "[]"]
