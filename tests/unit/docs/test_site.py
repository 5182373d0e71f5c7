"""The site builds without warnings, its links lead somewhere, and what is wrong on a page fails the build."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[3]
CONF = ROOT / "docs" / "generator"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Page(HTMLParser):
    """The ids of a page, what it links, and what a browser loads with it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids |= {value for key in ("id", "name") if (value := given.get(key))}
        if tag == "a" and (href := given.get("href")):
            self.links.append(href)
        if tag == "link" and given.get("rel") in {"canonical", "index", "search", "next", "prev", "contents"}:
            return
        if tag in {"script", "link", "img", "iframe"} and (source := given.get("src") or given.get("href")):
            self.loaded.append(source)


def build(source: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going", "--builder", "html"]
    return subprocess.run(
        [*command, "--conf-dir", str(CONF), str(source), str(out)],
        cwd=ROOT, env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("site")
    done = build(ROOT, out)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def pages(site) -> dict[Path, Page]:
    return {path: Page(path) for path in sorted(site.rglob("*.html"))}


def test_every_link_within_the_site_has_a_page_and_an_anchor(site, pages):
    broken = []
    for path, page in pages.items():
        for link in page.links:
            if re.match(r"[a-z]+:", link):
                continue
            name, _, anchor = link.partition("#")
            target = (path.parent / unquote(name.partition("?")[0])).resolve() if name else path
            anchors = pages[target].ids if target in pages else set()
            if not target.is_file() or (anchor and target in pages and unquote(anchor) not in anchors):
                broken.append(f"{path.relative_to(site)}: {link}")
    assert broken == []
    assert sum(len(page.links) for page in pages.values()) > 1000


def test_a_browser_loads_nothing_from_elsewhere(pages):
    assert {source for page in pages.values() for source in page.loaded if re.match(r"(?:[a-z]+:)?//", source)} == set()


def test_the_folder_of_the_site_leads_to_the_home_page_and_the_search_knows_the_reference(site):
    assert 'url=docs/index.html"' in (site / "index.html").read_text()
    index = (site / "searchindex.js").read_text()
    for name in ("policies.POLICY.train.learning_rate", "SwarmClient", "swarmq feed", "swarmq_learner_reward"):
        assert name in index or name.lower() in index, name


def test_programs_find_the_markdown_of_every_page_through_llms_txt(site):
    linked = re.findall(r"\]\(([^)]+)\)", (site / "llms.txt").read_text())
    assert [page for page in linked if not (site / page).is_file()] == []
    assert "policies.POLICY.train.learning_rate" in (site / "docs/reference/settings.md").read_text()


def test_links_that_lead_nowhere_and_forgotten_pages_fail_the_build(tmp_path):
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "index.md").write_text("# Home\n\n[a](a.md), [b](missing.md), [c](a.md#missing)\n")
    (docs / "a.md").write_text("# A\n\n![picture](missing.png), [folder](../docs)\n")
    (docs / "forgotten.md").write_text("# Forgotten\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    said = done.stderr.splitlines()
    for wrong in ("'missing.md'", "'missing'", "missing.png", "forgotten.md: WARNING: document isn't included"):
        assert [wrong in line for line in said].count(True) >= 1, (wrong, done.stderr)
    assert "../docs" not in done.stderr
