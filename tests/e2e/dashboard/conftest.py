"""A browser, and dashboards of real run folders in processes of their own."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import msgspec
import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

from support.stored import unpack_run
from swarmq.config import RunFolder

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
STARTS_WITHIN_S = 60.0


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """For one file of tests only: while playwright is open, an event loop runs in this thread, and no other test could run one."""
    found = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if found is None:
        pytest.skip("needs a browser: sudo apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


def address_of(link: str) -> str:
    """Return the address without the token."""
    return link.partition("#")[0]


def read_runs(link: str) -> list[dict[str, Any]]:
    """Return the list of runs, as a program would read it."""
    token = link.partition("#token=")[2]
    request = Request(f"{address_of(link)}api/runs", headers={"authorization": f"Bearer {token}"})
    with urlopen(request) as answer:
        return list(msgspec.json.decode(answer.read())["runs"])


class Reader:
    """A page of the dashboard, and what the browser had to complain about."""

    def __init__(self, page: Page, link: str) -> None:
        """`link`: what `swarmq dashboard` printed, with its token."""
        self.page, self.address = page, address_of(link)
        self.complaints: list[str] = []
        page.on("console", self._note)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.goto(link)
        page.wait_for_selector("main")

    def _note(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def open(self, route: str) -> None:
        """Open a view and wait until nothing on it says that it is loading."""
        self.page.goto(f"{self.address}#/{route}")
        self.settle()

    def settle(self) -> None:
        self.page.wait_for_selector("h1, .state.failed, .state.empty")
        expect(self.page.locator(".state.loading, .state.indexing")).to_have_count(0)

    def violations(self) -> list[str]:
        """Return what axe finds against WCAG 2.1 AA and its own best practices."""
        self.page.evaluate((resources.files("axe_playwright_python") / "axe.min.js").read_text())
        tags = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]
        found = self.page.evaluate("tags => axe.run({runOnly: tags})", tags)["violations"]
        return [f"{one['id']}: {node['html'][:200]}" for one in found for node in one["nodes"]]

    def sideways_overflow(self) -> int:
        return int(self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))


@pytest.fixture
def read(browser: Browser) -> Iterator[Callable[..., Reader]]:
    """Open a page in a fresh browser profile."""
    with contextlib.ExitStack() as stack:

        def read(link: str, **options: Any) -> Reader:
            context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
            stack.callback(context.close)
            return Reader(context.new_page(), link)

        yield read


class Dashboard:
    """`swarmq dashboard` as a process of its own."""

    def __init__(self, *folders: Path) -> None:
        command = [sys.executable, "-m", "swarmq", "dashboard", *map(str, folders), "--port", "0"]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "NO_COLOR": "1"}
        )
        self.said: list[str] = []
        self.link = ""
        """Address with the token."""
        self._known = threading.Event()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        if not self._known.wait(STARTS_WITHIN_S) or not self.link:
            self.end()
            raise AssertionError("the dashboard did not say its address:\n" + "".join(self.said))

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line)
            found = next((word for word in line.split() if word.startswith("http://")), "")
            if found and not self.link:
                self.link = found
                self._known.set()
        self._known.set()

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(20)
        self._listener.join(20)
        if self.process.stdout is not None:
            self.process.stdout.close()


@pytest.fixture(scope="session")
def dashboards() -> Iterator[Callable[..., Dashboard]]:
    """Start dashboards that end with the session."""
    started: list[Dashboard] = []

    def start(*folders: Path) -> Dashboard:
        started.append(Dashboard(*folders))
        return started[-1]

    yield start
    for dashboard in started:
        dashboard.end()


class Folders:
    """A run that ended well, one that died in the middle of everything, and one that this test may write to."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.whole = self._unpack("whole")
        self.crashed = self._unpack("crashed")
        self.live = self._unpack("live")
        self._crash(self.crashed)

    def _unpack(self, name: str) -> RunFolder:
        _, folder = unpack_run(self.root / "unpacked")
        return RunFolder(shutil.move(folder.path, self.root / name))

    def _crash(self, folder: RunFolder) -> None:
        """Tear the last event, cut the batch log in the middle of a record, and lose the collector's file."""
        folder.events.write_bytes(folder.events.read_bytes()[:-40])
        [log] = folder.path.glob("main/batches/*.log")
        os.truncate(log, log.stat().st_size - 100)
        folder.inbox.unlink()

    def append(self, name: str, source: str, at: float, **fields: Any) -> None:
        """Append an event to the live run, as its recorder would."""
        event = {
            "type": "event",
            "schema": 1,
            "run": "faults",
            "source": source,
            "name": name,
            "at": at,
            "fields": fields,
        }
        with self.live.events.open("ab") as file:
            file.write(msgspec.json.encode(event) + b"\n")


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def link(dashboards: Callable[..., Dashboard], folders: Folders) -> str:
    """Link to a dashboard of all three."""
    return dashboards(folders.root / "whole", folders.root / "crashed", folders.root / "live").link


@pytest.fixture(scope="session")
def run_ids(link: str) -> dict[str, str]:
    """Name of a folder -> the run's id in the dashboard's addresses."""
    return {Path(run["folder"]).name: run["id"] for run in read_runs(link)}
