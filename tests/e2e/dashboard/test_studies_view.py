"""The list of studies and the page of one open in a real browser, also in the dark and on a phone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support.studies import Story, study_of
from swarmq.studies.ledger import LedgerFile
from swarmq.studies.records import TrialParked

from .conftest import Dashboard, Reader

ARM = "a-long-name-of-an-arm-that-goes-on"


@pytest.fixture
def link(tmp_path: Path, dashboards: Callable[..., Dashboard]) -> str:
    story = Story(study_of(arms={"a": {"settings": {"arm": 1}}, ARM: {"settings": {"arm": 2}}}))
    for arm, seed, value in (("a", 0, 1.0), (ARM, 0, 2.0), ("a", 1, 1.2), (ARM, 1, 2.3)):
        story.finish(story.plan(arm, seed), value)
    story.add(TrialParked(trial_id=story.plan("a", 2).id, reason="the trial's process has ended with status 1"))
    story.plan(ARM, 2)
    ledger = LedgerFile(tmp_path / "studies" / "first" / "ledger.jsonl")
    ledger.append([entry.fact for entry in story.entries])
    ledger.close()
    return dashboards(tmp_path).link


def test_studies_open(read: Callable[..., Reader], link: str) -> None:
    reader = read(link)
    reader.open("studies")
    page = reader.page
    assert "4 of 6 trials" in page.locator("main").inner_text()
    assert reader.violations() == []
    page.get_by_role("link", name="first").click()
    page.wait_for_selector("dl.facts")
    states = page.locator("section:has(h2:text-is('Trials')) .badge").all_inner_texts()
    assert states == ["done"] * 4 + ["parked", "waiting"]
    for scheme, width in (("light", 1280), ("light", 390), ("dark", 390), ("dark", 1280)):
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": 740})
        page.wait_for_timeout(100)  # charts follow their box
        assert reader.violations() == []
        assert reader.sideways_overflow() <= 0
    page.set_viewport_size({"width": 390, "height": 740})
    verdict = page.locator("section:has(h2:text-is('Against the baseline')) .badge").bounding_box()
    assert verdict is not None
    assert verdict["x"] + verdict["width"] < 390, "it is in sight"
    assert reader.complaints == []
