"""What looking at a run costs: index, first view and memory of the dashboard of a large run, what a browser loads, and what recording
transcripts costs the collector.

A run folder of 100,000 episodes is made by the parts that make real ones. The index is built once, then a fresh server opens it and a
headless Chromium reads every view. Needs the development requirements and Chromium. Example:

    python -m benchmarks.dashboard --episodes 100000
"""

from __future__ import annotations

import gzip
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from benchmarks import report
from benchmarks.collector import compare_transcripts
from benchmarks.dashboard.large_run import RUN, make_run
from swarmq.dashboard.export import STATIC
from swarmq.observe.index import RunIndex

VIEWS = (
    *(
        "overview",
        "curves",
        "time",
        "ledger",
        "episodes",
        "clients",
        "mix",
        "evaluation",
        "engines",
        "settings",
        "logs",
    ),
    *("group/{group}", "episode/{episode}", "tokens/{episode}"),
)
"""Views of a run; the list of runs and the comparison of runs come besides."""
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
FIRST_VIEWS = 5
AXE_TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--pairs", type=int, default=7, help="passes of the collector with and without transcripts")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        began = time.perf_counter()
        folder = make_run(Path(scratch), episodes=arguments.episodes)
        print(f"made {arguments.episodes} episodes in {time.perf_counter() - began:.0f} s", flush=True)
        cache = Path(scratch) / "cache"
        index = RunIndex(folder, cache=cache / "swarmq" / "index")
        index_s = report.seconds(index.update)
        row = next(iter(index.page(None, limit=2000).rows), None)
        assert row is not None and index.ledger().is_balanced  # noqa: PT018 - what is measured must be right
        print(f"index: {index_s:.1f} s", flush=True)
        first, rss, violations = _read_in_browser(folder.path, cache, row.id, row.group)
    ratios = compare_transcripts(pairs=arguments.pairs)
    bundle = sum(len(gzip.compress((STATIC / name).read_bytes(), 9)) for name in ("index.html", "app.js", "app.css"))
    figures = {
        "views": len(VIEWS) + 2,
        f"first_view_s_{arguments.episodes // 1000}k": statistics.median(first),
        f"index_s_{arguments.episodes // 1000}k": index_s,
        "rss_mb": rss / 1e6,
        "bundle_kb_gz": bundle / 1000,
        "collector_ratio_transcripts": statistics.median(ratios),
        "axe_violations": len(violations),
    }
    print(report.table(["figure", "value"], list(figures.items())))
    detail = {"episodes": arguments.episodes, "first_view_s": first, "ratios": ratios, "violations": violations}
    report.save("dashboard", figures, detail=detail, out=arguments.out)


def _read_in_browser(folder: Path, cache: Path, episode: str, group: str) -> tuple[list[float], int, list[str]]:
    """Return seconds until the first view of fresh servers, bytes of the last server after all views, and what axe found."""
    chromium = next(filter(None, map(shutil.which, CHROMIUM)), None)
    assert chromium, "needs a browser: sudo apt-get install chromium"
    seconds, rss, violations = list[float](), 0, list[str]()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for number in range(FIRST_VIEWS):
            with _serve(folder, cache) as (link, process):
                page = browser.new_context(bypass_csp=True).new_page()  # axe is injected
                page.goto(link)
                page.wait_for_selector("h1")
                base = link.partition("#")[0]
                began = time.perf_counter()
                page.goto(f"{base}#/run/{RUN}/episodes")
                page.wait_for_selector(f"text={episode[-6:]}")
                seconds.append(time.perf_counter() - began)
                if number == FIRST_VIEWS - 1:
                    violations = list(_violations(page, base, episode, group))
                    rss = _rss(process.pid)
                page.context.close()
        browser.close()
    return seconds, rss, violations


def _violations(page: Page, base: str, episode: str, group: str) -> Iterator[str]:
    script = (resources.files("axe_playwright_python") / "axe.min.js").read_text()
    for view in VIEWS:
        page.goto(f"{base}#/run/{RUN}/" + view.format(episode=episode, group=group.replace("/", "%2F")))
        page.wait_for_selector("h1")
        page.wait_for_function("document.querySelectorAll('.state.loading, .state.indexing').length === 0")
        page.evaluate(script)
        found = page.evaluate("tags => axe.run({runOnly: tags})", AXE_TAGS)["violations"]
        yield from (f"{view}: {one['id']}: {node['html'][:200]}" for one in found for node in one["nodes"])


@contextmanager
def _serve(folder: Path, cache: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run `swarmq dashboard`; yields its link."""
    process = subprocess.Popen(
        [sys.executable, "-m", "swarmq", "dashboard", str(folder), "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
    )
    try:
        assert process.stdout is not None
        link = next(found.group() for line in process.stdout if (found := re.search(r"http://\S+", line)))
        yield link, process
    finally:
        process.terminate()
        process.wait(20)


def _rss(pid: int) -> int:
    """Return the resident bytes of a process."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return int(fields["VmHWM"].split()[0]) * 1024
