"""Files that the documentation names exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
PATH = re.compile(r"(?:src/swarmq|tests|benchmarks|scripts|examples|requirements)/[\w./-]*\w/?|`((?:\w+/)+\w+\.py)`")
HEADING_OR_ROW = re.compile(r"^### (?:`(\w+/)`)?|^\| (`[^|]*`) \|", re.MULTILINE)
FOLDERS = (ROOT, ROOT / "src/swarmq", *(folder for folder in (ROOT / "src/swarmq").iterdir() if folder.is_dir()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_file_that_a_page_names_exists(page):
    named = {found[1] or found[0] for found in PATH.finditer(page.read_text())}
    missing = {name for name in named if not any((folder / name).exists() for folder in FOLDERS)}
    assert not {name for name in missing if not name.startswith("benchmarks/results/") and "NAME" not in name}


def test_the_map_of_files_names_every_module_once():
    section = (ROOT / "docs/explanation/architecture.md").read_text().partition("\n## Which file decides what\n")[2]
    package, listed = "", []
    for found in HEADING_OR_ROW.finditer(section):
        if found[2]:
            listed += [package + name for name in re.findall(r"`([\w/]+\.py)`", found[2])]
        else:
            package = found[1] or ""
    source = ROOT / "src/swarmq"
    modules = {path.relative_to(source).as_posix() for path in source.rglob("*.py") if not path.name.startswith("__")}
    assert {"missing": modules - set(listed), "no such file": set(listed) - modules} == {
        "missing": set(),
        "no such file": set(),
    }
    assert len(listed) == len(modules), "a file is listed twice"
