"""Every view opens in a real browser, on a run that ended well and on one that died, and can be used without a mouse or eyes."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import expect

from .conftest import Folders, Reader

Read = Callable[..., Reader]
VIEWS = (
    "overview",
    "curves",
    "time",
    "evaluation",
    "ledger",
    "episodes",
    "mix",
    "clients",
    "engines",
    "settings",
    "logs",
)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("which", ["whole", "crashed"])
def test_a_view_opens(read: Read, link: str, run_ids: dict[str, str], which: str, view: str) -> None:
    reader = read(link)
    reader.open(f"run/{run_ids[which]}/{view}")
    assert reader.page.locator(".state.failed").all_inner_texts() == []
    assert reader.page.locator("main h1").count() == 1
    assert reader.violations() == []
    reader.page.emulate_media(color_scheme="dark")
    assert reader.violations() == []
    reader.page.set_viewport_size({"width": 360, "height": 740})
    reader.page.wait_for_timeout(100)  # charts follow their box
    assert reader.sideways_overflow() <= 0
    assert reader.complaints == []


def test_the_list_of_runs_opens(read: Read, link: str, run_ids: dict[str, str]) -> None:
    reader = read(link)
    reader.open("runs")
    assert reader.page.locator("main tbody tr").count() == len(run_ids) == 3
    assert reader.violations() == []
    reader.page.set_viewport_size({"width": 360, "height": 740})
    assert reader.sideways_overflow() <= 0
    assert reader.complaints == []


def test_runs_are_compared(read: Read, link: str, run_ids: dict[str, str], folders: Folders) -> None:
    reader = read(link)
    reader.open("runs")
    boxes = reader.page.locator("main tbody input[type=checkbox]")
    boxes.nth(0).check()
    boxes.nth(1).check()
    reader.page.get_by_role("link", name="Compare", exact=True).click()
    reader.page.get_by_role("heading", name="Settings that differ").wait_for()
    reader.settle()
    assert reader.violations() == []
    reader.page.get_by_role("link", name="Their curves over each other").click()
    reader.page.wait_for_selector(".plot canvas")
    assert reader.page.locator(".run-key .legend-item").count() == 2
    assert reader.complaints == []


def test_a_number_of_the_ledger_opens_its_episodes(read: Read, link: str, run_ids: dict[str, str]) -> None:
    reader = read(link)
    reader.open(f"run/{run_ids['whole']}/ledger")
    term = reader.page.locator(".equation a", has_text="trained")
    count = term.locator(".term-count").inner_text()
    assert re.fullmatch(r"[\d,]+", count)
    assert count != "0"
    term.click()
    reader.page.get_by_role("heading", level=1, name="Episodes").wait_for()
    reader.page.get_by_text(f"{count} episodes").first.wait_for()
    assert "state=trained" in reader.page.url
    assert reader.complaints == []


def test_the_sum_of_the_ledger_is_right(read: Read, link: str, run_ids: dict[str, str]) -> None:
    reader = read(link)
    reader.open(f"run/{run_ids['whole']}/ledger")
    begun, *parts = [
        int(text.replace(",", "")) for text in reader.page.locator(".equation .term-count").all_inner_texts()
    ]
    assert begun == sum(parts) > 0


def test_a_live_run_moves(read: Read, link: str, run_ids: dict[str, str], folders: Folders) -> None:
    reader = read(link)
    reader.open(f"run/{run_ids['live']}/curves")
    newest = reader.page.locator(".legend-at").first
    expect(newest).to_have_text("step 17")
    folders.append("step", "learner.main", time.time(), version=18, reward=9.5, episodes=8, step_s=0.4)
    expect(newest).to_have_text("step 18")
    assert "9.5" in reader.page.locator(".legend").first.inner_text()
    assert reader.complaints == []


def test_text_of_others_is_shown_and_never_run(
    read: Read, link: str, run_ids: dict[str, str], folders: Folders
) -> None:
    hostile = '<img src=x onerror="window.ran = true"><script>window.ran = true</script> \x1b[31mred \u202eback\u202c \u200bwidth'
    folders.append("warning", "learner.main", time.time(), text=hostile)
    reader = read(link)
    reader.open(f"run/{run_ids['live']}/overview")
    alarm = reader.page.locator(".alarm-text", has_text="onerror")
    alarm.wait_for()
    shown = alarm.inner_text()
    assert '<img src=x onerror="window.ran = true"><script>window.ran = true</script>' in shown
    assert "ESC[31m" in shown
    assert "[U+202E]back[U+202C] [U+200B]width" in shown
    assert alarm.locator("img, script").count() == 0
    assert reader.page.evaluate("window.ran") is None
    assert reader.complaints == []


def test_the_keyboard_is_enough(read: Read, link: str, run_ids: dict[str, str]) -> None:
    reader = read(link)
    page = reader.page
    reader.open(f"run/{run_ids['whole']}/overview")
    page.keyboard.press("?")
    page.get_by_role("dialog", name="Keyboard shortcuts").wait_for()
    assert reader.violations() == []
    page.keyboard.press("Escape")
    assert page.locator("dialog[open]").count() == 0
    page.keyboard.press("g")
    page.keyboard.press("l")
    page.wait_for_selector(".equation")
    assert page.evaluate("document.activeElement.tagName") == "H1"
    page.keyboard.press("j")
    assert page.evaluate("document.activeElement.closest('[data-row]') !== null")
    page.keyboard.press("Enter")
    page.get_by_role("heading", level=1, name="Episodes").wait_for()
    assert reader.complaints == []


def test_cursors_of_all_charts_move_together(read: Read, link: str, run_ids: dict[str, str]) -> None:
    reader = read(link)
    reader.open(f"run/{run_ids['whole']}/curves")
    reader.page.wait_for_selector(".plot canvas")
    reader.page.locator(".plot").first.focus()
    for _ in range(3):
        reader.page.keyboard.press("ArrowLeft")
    cursors = reader.page.locator(".legend-at")
    assert cursors.count() > 1
    expect(cursors).to_have_text(["step 15"] * cursors.count())


@pytest.mark.parametrize("system", ["light", "dark"])
def test_the_theme_is_the_systems_until_the_reader_chooses(read: Read, link: str, system: str) -> None:
    other = {"light": "dark", "dark": "light"}[system]
    reader = read(link, color_scheme=system)
    background = "getComputedStyle(document.body).backgroundColor"
    reader.open("runs")
    by_system = reader.page.evaluate(background)
    reader.page.get_by_role("button", name=f"Switch to the {other} theme").click()
    chosen = reader.page.evaluate(background)
    assert chosen != by_system
    reader.page.reload()
    reader.settle()
    assert reader.page.evaluate(background) == chosen


def test_settings_can_be_searched_and_the_search_can_be_sent(read: Read, link: str, run_ids: dict[str, str]) -> None:
    reader = read(link)
    reader.open(f"run/{run_ids['whole']}/settings")
    reader.page.get_by_label("Path contains").fill("learning_rate")
    expect(reader.page).to_have_url(re.compile("find=learning_rate"))
    paths = (
        "[...document.querySelectorAll('main section:first-of-type tbody td:first-child')].map(td => td.textContent)"
    )
    found: list[Any] = reader.page.evaluate(paths)
    assert all("learning_rate" in path for path in found)
    again = read(link)
    again.open(reader.page.url.split("#/")[1])
    assert again.page.evaluate(paths) == found


def test_what_is_not_there_is_said(read: Read, link: str, run_ids: dict[str, str]) -> None:
    reader = read(link)
    reader.open("run/nosuch/overview")
    assert reader.page.get_by_role("alert").inner_text() != ""
    reader.open(f"run/{run_ids['whole']}/nosuch")
    assert "no view named" in reader.page.locator("main").inner_text()


@pytest.mark.parametrize(("view", "number"), [("ledger", ".term-count"), ("clients", "tbody td")])
def test_while_the_index_is_built_its_progress_stands_in_place_of_numbers(
    read: Read, link: str, run_ids: dict[str, str], view: str, number: str
) -> None:
    reader = read(link)
    index = {"episodes": 1234, "share": 0.4, "is_done": False, "notes": []}
    address = f"**/api/runs/{run_ids['whole']}/{view}"
    reader.page.route(address, lambda route: route.fulfill(json={"index": index, "clients": []}))
    reader.page.goto(f"{reader.address}#/run/{run_ids['whole']}/{view}")
    reader.page.get_by_text("1,234 episodes so far, 40 %").wait_for()
    assert reader.page.locator(number).count() == 0
    assert reader.violations() == []
    reader.page.unroute(address)
    reader.page.wait_for_selector(number)
    assert reader.page.locator(".state.indexing").count() == 0
    assert reader.complaints == []
