"""Documents of a folder, cut into passages that fit into a question to the teacher."""

from __future__ import annotations

import html.parser
from collections.abc import Iterator
from pathlib import Path

import msgspec

from swarmq.errors import TaskError

SUFFIXES = (".md", ".markdown", ".txt", ".rst", ".html", ".htm", ".tex", ".org")
MAX_FILE_BYTES = 20_000_000
MIN_CHARS = 200
"""Minimum characters of a passage. A shorter one at the end of a file is joined to the passage before it."""


class Passage(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a document."""

    path: str
    """Path of the document, relative to the folder."""
    start: int
    """Position of its first character in the document's text."""
    text: str

    @property
    def name(self) -> str:
        return f"{self.path}@{self.start}"


class Documents(msgspec.Struct, frozen=True, kw_only=True):
    """All passages of a folder."""

    passages: list[Passage]
    files: int
    skipped: dict[str, str]
    """Path -> why the file was not read."""


def read_documents(folder: Path, *, passage_chars: int = 4000) -> Documents:
    """Read all documents below a folder, in the order of their paths. Raises TaskError if there is none that can be read."""
    if not folder.is_dir():
        raise TaskError(f"{folder}: {'a file' if folder.exists() else 'does not exist'}; give a folder of documents")
    passages: list[Passage] = []
    skipped: dict[str, str] = {}
    files = 0
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(path.relative_to(folder))
        if any(part.startswith(".") for part in path.relative_to(folder).parts):
            continue
        if path.suffix.lower() not in SUFFIXES:
            skipped[name] = f"not a text document ({', '.join(SUFFIXES)}); convert it to text first"
            continue
        try:
            text = _read_text(path)
        except (OSError, UnicodeDecodeError, ValueError) as error:
            skipped[name] = str(error)
            continue
        files += 1
        passages += [Passage(path=name, start=start, text=piece) for start, piece in split(text, passage_chars)]
    if not passages:
        first = next(iter(skipped.items()), None)
        why = f" (e.g. {first[0]}: {first[1]})" if first else ""
        raise TaskError(f"{folder}: contains no document with text{why}")
    return Documents(passages=passages, files=files, skipped=skipped)


def split(text: str, passage_chars: int) -> Iterator[tuple[int, str]]:
    """Yield the passages of a text with their positions: whole paragraphs of up to `passage_chars` characters together.

    A longer paragraph is cut. A passage of less than 200 characters at the end belongs to the one before.
    """
    pieces: list[tuple[int, str]] = []
    start = end = 0
    for first, last in _paragraphs(text, passage_chars):
        if end > start and last - start > passage_chars:
            pieces.append((start, text[start:end]))
            start = first
        elif end == start:
            start = first
        end = last
    if text[start:end].strip():
        pieces.append((start, text[start:end]))
    if len(pieces) > 1 and len(pieces[-1][1]) < MIN_CHARS:
        begin = pieces[-2][0]
        pieces[-2:] = [(begin, text[begin : pieces[-1][0] + len(pieces[-1][1])])]
    yield from pieces


def _paragraphs(text: str, longest: int) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each paragraph without the empty lines around it; long ones in pieces."""
    place = 0
    for block in text.split("\n\n"):
        first, last = place, place + len(block)
        place = last + 2
        while first < last and text[first].isspace():
            first += 1
        while last > first and text[last - 1].isspace():
            last -= 1
        while last - first > longest:
            cut = text.rfind(" ", first, first + longest)
            cut = cut if cut > first else first + longest
            yield first, cut
            first = cut
            while first < last and text[first].isspace():
                first += 1
        if last > first:
            yield first, last


def _read_text(path: Path) -> str:
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"larger than {MAX_FILE_BYTES // 1_000_000} MB")
    text = path.read_text(encoding="utf-8-sig").replace("\r\n", "\n")
    if "\0" in text:
        raise ValueError("not text: it has NUL characters")
    if path.suffix.lower() not in (".html", ".htm"):
        return text
    page = _PageText()
    page.feed(text)
    page.close()
    return "".join(page.parts)


class _PageText(html.parser.HTMLParser):
    """Collects the visible text of an HTML page, with an empty line between blocks."""

    HIDDEN = frozenset({"script", "style", "head", "nav", "noscript", "template"})
    BLOCKS = frozenset(
        {
            "p",
            "div",
            "section",
            "article",
            "li",
            "tr",
            "table",
            "h1",
            "h2",
            "h3",
            "h4",
            "h5",
            "h6",
            "pre",
            "br",
            "dd",
            "dt",
        }
    )

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002
        self._hidden += tag in self.HIDDEN
        if tag in self.BLOCKS:
            self.parts.append("\n\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in self.HIDDEN:
            self._hidden = max(0, self._hidden - 1)
        if tag in self.BLOCKS:
            self.parts.append("\n\n")

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.parts.append(data)
