"""From a number of the ledger to the token that was clipped; filters that can be sent; exports that open without a server."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from playwright.sync_api import Route, expect

from support.run_folder import make_whole_run
from swarmq.dashboard.export import collect_episode, collect_group, export_html
from swarmq.observe.run import Run

from .conftest import Dashboard, Reader, address_of, read_runs

Read = Callable[..., Reader]

HOSTILE = (
    '</script><script>window.ran = true</script><img src=x onerror="window.ran = true"><!-- '
    "\x1b[31mred\x1b[0m \u202eback\u202c \u200bwidth \u2028 end"
)
SHOWN = '</script><script>window.ran = true</script><img src=x onerror="window.ran = true"><!--'
LONG = "a line of a log that never ends\n" * 100_000


class Made:
    """A run with an episode in every state, one of them hostile, and a dashboard of it."""

    def __init__(self, folder: Path) -> None:
        self.run, self.ids = make_whole_run(folder)
        self.ids["hostile"] = self._talk("hostile", HOSTILE)
        self.ids["long"] = self._talk("long", LONG)
        self.run.write_transcripts()
        self.folder = self.run.folder.path

    def _talk(self, task: str, text: str) -> str:
        """Play an episode that fails and in which everything is `text`."""
        said = [
            {"role": "user", "content": text},
            {"role": "assistant", "content": "", "reasoning": text[:500],
             "tool_calls": [{"id": "c", "function": {"name": text[:90], "arguments": json.dumps({"code": text[:500]})}}]},
        ]  # fmt: skip
        episode = self.run.begin(task, turns=1, said=said)
        return self.run.end(episode, status="failed", reason=text[:200], metadata={"note": text[:500]})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    made = Made(tmp_path_factory.mktemp("made"))
    yield made
    made.run.close()


@pytest.fixture(scope="module")
def link(dashboards: Callable[..., Dashboard], made: Made) -> str:
    return dashboards(made.folder).link


@pytest.fixture(scope="module")
def run_id(link: str) -> str:
    return str(read_runs(link)[0]["id"])


@pytest.fixture
def exported(made: Made, tmp_path: Path) -> Callable[..., Path]:
    """Write an export and return its path."""
    run = Run(made.folder, cache=tmp_path / "cache")
    run.refresh()

    def write(kind: str, name: str) -> Path:
        collect = collect_episode if kind == "episode" else collect_group
        path = tmp_path / f"{kind}.html"
        path.write_bytes(export_html(kind, collect(run, "r", name)))  # type: ignore[arg-type]
        return path

    return write


def open_file(read: Read, path: Path) -> Reader:
    """Open a file by double click, in a browser without any network."""
    reader = read(path.as_uri(), offline=True)
    reader.page.on("request", lambda request: request.url.startswith("file:") or reader.complaints.append(request.url))
    reader.page.goto(path.as_uri())
    reader.settle()
    return reader


def test_a_number_of_the_ledger_leads_to_the_token_that_was_clipped(
    read: Read, link: str, run_id: str, made: Made
) -> None:
    reader = read(link)
    page = reader.page
    reader.open(f"run/{run_id}/ledger")
    page.locator(".equation a", has_text="trained").click()
    page.get_by_role("heading", level=1, name="Episodes").wait_for()
    reader.settle()
    page.locator(f"main [data-row] a[title='{made.ids['trained']}']").click()
    page.get_by_text("Trained in step 1 of main").wait_for()
    page.locator("main").get_by_role("link", name="Tokens", exact=True).click()
    page.get_by_text("clipped 1", exact=True).wait_for()
    entry = page.locator(".find-entry").first
    entry.click()
    page.wait_for_selector(".tok.current.is-clipped")
    said = page.locator(".inspector").inner_text()
    assert "its ratio is beyond the bound" in said
    assert "Advantage\n\u22120.5" in said
    assert "Ratio\n1.284" in said
    assert page.evaluate("document.querySelector('.tok.current').getBoundingClientRect().bottom <= innerHeight")
    assert reader.complaints == []


def test_filters_travel_with_a_link(read: Read, link: str, run_id: str, made: Made) -> None:
    reader = read(link)
    reader.open(f"run/{run_id}/episodes")
    reader.page.get_by_role("combobox", name="State", exact=True).select_option("dropped")
    reader.page.get_by_role("combobox", name="Reason", exact=True).select_option("equal_rewards")
    reader.page.get_by_text("2 episodes").first.wait_for()
    again = read(link)
    again.page.goto(reader.page.url)
    again.page.get_by_text("2 episodes").first.wait_for()
    assert again.page.locator("main [data-row]").count() == 2
    assert again.page.get_by_role("combobox", name="Reason", exact=True).input_value() == "equal_rewards"
    again.page.get_by_role("button", name="Remove filter State dropped").click()
    again.page.get_by_role("button", name="Remove filter Reason equal_rewards").click()
    again.page.locator(f"a[title='{made.ids['open']}']").wait_for()
    assert reader.complaints == again.complaints == []


def test_a_bar_of_the_rewards_shows_its_episodes(read: Read, link: str, run_id: str, made: Made) -> None:
    reader = read(link)
    reader.open(f"run/{run_id}/episodes?state=trained")
    reader.page.get_by_role("link", name="Reward").last.click()
    reader.page.get_by_text("1 episode", exact=True).first.wait_for()
    assert "reward_min=" in reader.page.url
    assert "state=trained" in reader.page.url


def test_rows_are_walked_by_keyboard(read: Read, link: str, run_id: str) -> None:
    reader = read(link)
    reader.open(f"run/{run_id}/episodes")
    reader.page.wait_for_selector("main [data-row]")
    for key in "jjk":
        reader.page.keyboard.press(key)
    first = reader.page.evaluate("document.activeElement.title")
    reader.page.keyboard.press("j")
    assert reader.page.evaluate("document.activeElement.title") != first
    reader.page.keyboard.press("k")
    reader.page.keyboard.press("Enter")
    reader.page.locator(f"h1 [title='{first}']").wait_for()


@pytest.mark.parametrize("view", ["episodes", "episode/{trained}", "episode/{hostile}", "episode/{open}", "tokens/{trained}", "tokens/{trained}?colour=advantage", "group/taught%2F0"])  # fmt: skip
def test_a_view_is_accessible_and_fits_narrow_screens(
    read: Read, link: str, run_id: str, made: Made, view: str
) -> None:
    reader = read(link)
    reader.open(f"run/{run_id}/{view.format(**made.ids)}")
    assert reader.page.locator(".state.failed").all_inner_texts() == []
    assert reader.violations() == []
    reader.page.emulate_media(color_scheme="dark")
    assert reader.violations() == []
    reader.page.set_viewport_size({"width": 360, "height": 740})
    reader.page.wait_for_timeout(100)  # charts follow their box
    assert reader.sideways_overflow() <= 0
    assert reader.complaints == []


def test_hostile_text_is_shown_and_never_run(read: Read, exported: Callable[..., Path], made: Made) -> None:
    reader = open_file(read, exported("episode", made.ids["hostile"]))
    page = reader.page
    page.get_by_role("button", name="Unfold tools and prompts").click()
    for shown in page.locator(".said .longtext, .detail .longtext, .fold > summary").all_inner_texts():
        if "script" in shown:
            assert SHOWN[:60] in shown.replace('\\"', '"')
    assert "[U+202E]back[U+202C] [U+200B]width [U+2028] end" in page.locator(".role-user .longtext").inner_text()
    assert "ESC[31mred" in page.locator(".role-user .longtext").inner_text()
    assert page.locator("main img, main script").count() == 0
    assert page.evaluate("window.ran") is None
    assert reader.complaints == []


def test_an_exported_episode_opens_offline_with_its_tokens(
    read: Read, exported: Callable[..., Path], made: Made
) -> None:
    reader = open_file(read, exported("episode", made.ids["trained"]))
    page = reader.page
    page.get_by_text("Trained in step 1 of main").wait_for()
    assert page.get_by_role("link", name="Export").count() == 0
    assert page.get_by_role("navigation").count() == 0
    page.locator("main").get_by_role("link", name="Tokens", exact=True).click()
    page.get_by_text("clipped 1", exact=True).wait_for()
    page.locator("[data-tokens]").focus()
    page.keyboard.press("n")
    page.wait_for_selector(".tok.current.is-clipped")
    page.keyboard.press("n")
    page.wait_for_selector(".tok.current.is-filtered")
    assert "Left out by a filter" in page.locator(".inspector").inner_text()
    assert reader.violations() == []
    assert reader.complaints == []


def test_an_exported_group_opens_offline_with_its_episodes(
    read: Read, exported: Callable[..., Path], made: Made
) -> None:
    reader = open_file(read, exported("group", "taught/0"))
    page = reader.page
    assert page.locator(".attempt").count() == 2
    assert page.locator(".attempt-numbers dd").all_inner_texts() == ["0", "\u22121", "1", "+1"]
    page.get_by_role("button", name="Compare last answers").click()
    page.wait_for_selector(".last-answer .longtext")
    page.get_by_role("link", name="Conversation").first.click()
    page.get_by_text("Trained in step 1 of main").wait_for()
    assert reader.complaints == []


def test_megabytes_are_folded_and_unfold_without_freezing(
    read: Read, exported: Callable[..., Path], made: Made
) -> None:
    reader = open_file(read, exported("episode", made.ids["long"]))
    page = reader.page
    text = page.locator(".role-user")
    assert len(text.inner_text()) < 10_000
    frames = """async () => {
      let worst = 0, last = performance.now();
      for (let left = 5; left > 0; left -= document.querySelector('.longtext [role=status]') ? 0 : 1) {
        await new Promise(requestAnimationFrame);
        const now = performance.now();
        worst = Math.max(worst, now - last);
        last = now;
      }
      return worst;
    }"""
    text.get_by_role("button", name="Show all").click()
    assert page.evaluate(frames) < 1000
    assert page.evaluate("document.querySelector('.role-user .longtext').textContent.length") > len(LONG) * 0.95
    text.get_by_role("button", name="Fold").click()
    assert len(text.inner_text()) < 10_000
    assert reader.complaints == []


def test_a_report_is_downloaded_and_opens_offline_with_sample_episodes(
    read: Read, link: str, run_id: str, made: Made, tmp_path: Path
) -> None:
    online = read(link)
    online.open(f"run/{run_id}/overview")
    with online.page.expect_download() as download:
        online.page.get_by_role("link", name="Export").click()
    path = tmp_path / "report.html"
    download.value.save_as(path)
    reader = open_file(read, path)
    page = reader.page
    page.get_by_role("heading", level=1, name="Overview").wait_for()
    for view in ("Curves", "Ledger", "Evaluation", "Episodes"):
        page.get_by_role("navigation").get_by_role("link", name=view, exact=True).click()
        page.get_by_role("heading", level=1, name=view).wait_for()
        reader.settle()
        assert page.locator(".state.failed").count() == 0
    page.locator(f"a[title='{made.ids['open']}']").click()
    page.get_by_text("It is running").wait_for()
    assert reader.complaints == []


def open_report(read: Read, link: str, run_id: str, path: Path) -> Reader:
    """Download the report of the run and open it as a file."""
    token = link.partition("#token=")[2]
    address = f"{address_of(link)}api/runs/{run_id}/export/report"
    with urlopen(Request(address, headers={"authorization": f"Bearer {token}"})) as answer:
        path.write_bytes(answer.read())
    return open_file(read, path)


def test_a_number_of_a_report_opens_those_of_its_sample_episodes_that_it_counts(
    read: Read, link: str, run_id: str, tmp_path: Path
) -> None:
    reader = open_report(read, link, run_id, tmp_path / "report.html")
    page = reader.page
    page.get_by_role("navigation").get_by_role("link", name="Ledger", exact=True).click()
    page.locator("table").get_by_role("link", name=re.compile("equal rewards")).click()
    page.get_by_text("Shown are those with state dropped, reason equal rewards").wait_for()
    states = page.locator("main [role=row] .badge, main tbody .badge").all_inner_texts()
    assert states
    assert set(states) == {"dropped"}
    shown = len(states)
    page.get_by_role("link", name="Show all of the sample").click()
    expect(page.get_by_text("Shown are those")).to_have_count(0)
    page.locator("main [role=row] .badge, main tbody .badge").nth(shown).wait_for()
    assert reader.complaints == []


def test_no_link_of_a_report_is_dead_and_no_path_of_this_machine_is_in_it(
    read: Read, link: str, run_id: str, made: Made, tmp_path: Path
) -> None:
    path = tmp_path / "report.html"
    reader = open_report(read, link, run_id, path)
    model = str(made.run.job.policies["main"].model)
    assert str(made.folder.parent) not in path.read_text().replace(model, "")
    page, seen, todo = reader.page, set[str](), {page_hash(reader.page.url)}
    while todo:
        route = todo.pop()
        seen.add(route)
        page.goto(f"{path.as_uri()}#{route}")
        reader.settle()
        assert page.locator(".state.failed").all_inner_texts() == [], route
        assert page.get_by_text("There is no view named").count() == 0, route
        found = page.evaluate("[...document.querySelectorAll('a[href^=\"#/\"]')].map(a => a.getAttribute('href'))")
        todo |= {one.removeprefix("#").partition("?")[0] for one in found if one != "#/runs"} - seen
        assert len(seen) < 200
    assert not any("/logs" in route for route in seen)
    assert any("/tokens/" in route for route in seen)
    assert reader.complaints == []


def page_hash(url: str) -> str:
    return url.partition("#")[2].partition("?")[0]


def test_tasks_that_begin_alike_are_told_apart(read: Read, link: str, run_id: str) -> None:
    reader = read(link)

    def lengthen(route: Route) -> None:
        answer = route.fetch()
        page = answer.json()
        for number, row in enumerate(page["rows"]):
            row["task"] = f"customer-service/airline/refund-of-a-cancelled-flight/{number:04}"
        route.fulfill(response=answer, json=page)

    reader.page.route("**/episodes?*", lengthen)
    reader.open(f"run/{run_id}/episodes")
    cells = reader.page.get_by_role("cell").filter(has_text="customer-service/").all()
    ends = [cell.locator(".name > :last-child") for cell in cells]
    assert [end.inner_text()[-5:] for end in ends] == [f"/{number:04}" for number in range(len(ends))]
    for cell, end in zip(cells, ends, strict=True):
        assert end.evaluate("end => end.getBoundingClientRect().right") <= cell.evaluate(
            "cell => cell.getBoundingClientRect().right"
        )
    assert len(ends) > 3
