"""llms.txt lists every page of docs/ with one line each, and is as fresh as the indexes that it is made from."""

from pathlib import Path

from docs.generator import llms

ROOT = Path(__file__).parents[3]


def test_the_file_is_what_the_indexes_say():
    assert (ROOT / "llms.txt").read_text() == llms.page(), "run: python -m docs.generator.llms > llms.txt"


def test_it_opens_with_title_and_summary_and_then_lists_links():
    title, summary, *parts = (ROOT / "llms.txt").read_text().split("\n\n")
    assert title == "# swarmq"
    assert summary.startswith("> ")
    assert [part for part in parts[::2] if not part.startswith("## ")] == []
    assert [line for part in parts[1::2] for line in part.splitlines() if not line.startswith("- [")] == []


def test_every_page_is_listed_once():
    listed = [entry.page for entry in llms.list_pages(llms.HOME)]
    assert len(listed) == len(set(listed))
    # trials are those of a study that was run from this checkout
    pages = [path.relative_to(ROOT) for path in (ROOT / "docs").rglob("*.md")]
    assert {path.as_posix() for path in pages if "trials" not in path.parts} <= {llms.HOME, *listed}
    assert [page for page in listed if not (ROOT / page).is_file()] == []
