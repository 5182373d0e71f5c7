"""llms.txt: the pages of docs/ for readers that are programs (llmstxt.org), each with its line in the index that lists it.

python -m docs.generator.llms > llms.txt
"""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
HOME = "docs/index.md"
LINK = re.compile(r"\[([^]]+)\]\(([^)#:]+\.md)\)")


class Entry(NamedTuple):
    title: str
    page: str
    """Path in the repository."""
    note: str


def page() -> str:
    """Return llms.txt. Its links lead to Markdown at the same paths in the repository and in the site."""
    title, summary = (" ".join(part.split()) for part in (ROOT / "README.md").read_text().split("\n\n")[:2])
    parts = ["\n".join([f"## {part.title}\n", *map(_line, list_pages(part.page))]) for part in _entries(HOME)]
    return "\n\n".join([title, f"> {summary}", *parts]) + "\n"


def list_pages(index: str) -> Iterator[Entry]:
    """Yield what an index links, and in their place what the indexes among it link."""
    for entry in _entries(index):
        yield entry
        if entry.page.endswith("/index.md"):
            yield from list_pages(entry.page)


def _entries(index: str) -> Iterator[Entry]:
    """Yield the first link of each item of a list, and of each row of a table, with what else the item or row says."""
    text = re.sub(r"\n  +", " ", (ROOT / index).read_text())
    for line in re.findall(r"^(?:[-|]|\d+\.) .*", text, re.MULTILINE):
        if link := LINK.search(line):
            note = LINK.sub(r"\1", line[: link.start()].strip("-|. 0123456789") or line[link.end() :].strip(":,.| "))
            yield Entry(link[1], posixpath.normpath(posixpath.join(posixpath.dirname(index), link[2])), note)


def _line(entry: Entry) -> str:
    return f"- [{entry.title}]({entry.page})" + (f": {entry.note}" if entry.note else "")


if __name__ == "__main__":
    sys.stdout.write(page())
