"""Whatever is killed of a study: no result is lost or counted twice, no budget exceeded, and the report is that of an undisturbed study."""

import asyncio

import pytest
from benchmarks.studies import run_study

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(900)]

KILLS = 30
SIZE = {"arms": 4, "seeds": 2}


def test_thirty_kills_change_nothing_that_a_report_is_made_of(tmp_path):
    quiet = asyncio.run(run_study(tmp_path / "quiet", **SIZE, kills=0, gpu_seconds=1e6))
    killed = asyncio.run(run_study(tmp_path / "killed", **SIZE, kills=KILLS, gpu_seconds=1e6))
    assert sum(killed["kills"].values()) == KILLS
    assert killed["starts"] > quiet["starts"] == quiet["trials"]
    for one in (quiet, killed):
        assert (one["stopped"], one["lost"], one["twice"], one["overrun"]) == ("complete", 0, 0, 0.0)
    assert killed["report"] == quiet["report"]


def test_a_budget_holds_while_workers_are_killed(tmp_path):
    tight = asyncio.run(run_study(tmp_path / "tight", **SIZE, kills=3, gpu_seconds=100))
    assert (tight["twice"], tight["overrun"]) == (0, 0.0)
