"""Files that the documentation names exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PATH = re.compile(r"(?:src/swarmq|tests|benchmarks|scripts|examples|requirements)/[\w./-]*\w/?|`((?:\w+/)+\w+\.py)`")
FOLDERS = (ROOT, ROOT / "src/swarmq", *(folder for folder in (ROOT / "src/swarmq").iterdir() if folder.is_dir()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page):
    named = {found[1] or found[0] for found in PATH.finditer(page.read_text())}
    missing = {name for name in named if not any((folder / name).exists() for folder in FOLDERS)}
    assert not {name for name in missing if not name.startswith("benchmarks/results/")}
