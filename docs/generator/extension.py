"""What the site adds to plain Markdown, so that every page stays readable on a code host.

Menu        the list of links in an `index.md` becomes the menu below it; a page that no index names fails the build
Reference   `<!-- generated: NAME -->` is replaced by what `docs.generator.reference` makes of the code
Programs    `llms.txt`, and beside each page its Markdown, to which `llms.txt` leads
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from docs.generator import llms
from docs.generator.reference import GENERATED
from sphinx.application import Sphinx

GENERATED_HERE = re.compile(r"^<!-- generated: ([\w-]+) -->$", re.MULTILINE)
LINK_TO_PAGE = re.compile(r"\]\(([^)#:]+)\.md\)")
LINK = re.compile(r"\[([^]]*)\]\(([^)#:]+)\)")
NO_MENU = ("README",)
"""Pages that are linked and shown, but have no place in the menu."""
TUTORIALS = "docs/tutorials/index"
"""The page below which every example with a README is in the menu, also those that it does not link."""
CURVE = re.compile(r"!\[[^]]*\]\((curve\.png)\)")
NO_CURVE = "*`make examples ARGS={}` draws the curve of this tutorial.*"
REDIRECT = """<!doctype html>
<meta charset="utf-8"><title>swarmq</title>
<meta http-equiv="refresh" content="0; url={home}.html"><link rel="canonical" href="{home}.html">
"""


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", complete)
    app.connect("build-finished", write_files_of_the_site)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}


def complete(app: Sphinx, page: str, source: list[str]) -> None:
    """Fill in the generated parts of a page and its menu, and keep its Markdown. Links to folders, which the site has no page for,
    become plain text."""
    folder = (Path(app.srcdir) / page).parent
    text = GENERATED_HERE.sub(lambda found: GENERATED[found[1]](), source[0])
    copy = Path(app.outdir, f"{page}.md")
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_text(text)
    text = LINK.sub(lambda found: found[1] if (folder / found[2]).is_dir() else found[0], text)
    text = CURVE.sub(lambda found: found[0] if (folder / found[1]).exists() else NO_CURVE.format(folder.name), text)
    if page in NO_MENU:
        text = f"---\norphan: true\n---\n{text}"
    elif page.rpartition("/")[2] == "index":
        targets = [*linked_pages(page, text)]
        if page == TUTORIALS:
            targets += sorted(found for found in app.project.docnames if found.startswith("examples/"))
        entries = "\n".join(f"/{target}" for target in dict.fromkeys(targets) if target not in NO_MENU)
        text += f"\n\n```{{toctree}}\n:hidden:\n\n{entries}\n```\n"
    source[0] = text


def linked_pages(page: str, text: str) -> Iterator[str]:
    """Yield the pages that a page links, by their paths in the repository without `.md`."""
    for found in LINK_TO_PAGE.finditer(text):
        parts: list[str] = []
        for part in (PurePosixPath(page).parent / found[1]).parts:
            if part == "..":
                parts.pop()
            else:
                parts.append(part)
        yield "/".join(parts)


def write_files_of_the_site(app: Sphinx, error: Exception | None) -> None:
    """Lead from the folder of the site to its home page, and tell programs of all pages."""
    if error is None:
        Path(app.outdir, "index.html").write_text(REDIRECT.format(home=app.config.root_doc))
        Path(app.outdir, "llms.txt").write_text(llms.page())
