"""What the measurements are made of: the report's format, and workloads that are what they are called."""

import json
import math

import pytest
from benchmarks import report
from benchmarks.timelines.workloads import WORKLOADS, Source, batch

from swarmq.timeline import PrefixTree, fold


def test_a_report_holds_what_is_needed_to_repeat_it(tmp_path):
    path = report.save("sample", {"speed": 2.0}, detail={"why": "a test"}, out=tmp_path)
    saved = json.loads(path.read_text())
    assert list(saved) == ["name", "command", "commit", "date", "hardware", "versions", "figures", "detail"]
    assert saved["figures"] == {"speed": 2.0}
    (line,) = (tmp_path / "history.jsonl").read_text().splitlines()
    assert json.loads(line)["figures"] == {"speed": 2.0}


def test_every_run_adds_a_line_to_the_history(tmp_path):
    for _ in range(3):
        report.save("sample", {"speed": 2.0}, out=tmp_path)
    assert len((tmp_path / "history.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_figure_is_a_finite_number(tmp_path, value):
    with pytest.raises(ValueError, match="figure speed of sample"):
        report.save("sample", {"speed": value}, out=tmp_path)


def test_a_spread_is_median_and_extremes():
    assert report.Spread.of([3.0, 1.0, 2.0])[:3] == (2.0, 1.0, 3.0)


def test_numbers_stand_to_the_right_and_words_to_the_left():
    assert report.table(["name", "n"], [["a", 1], ["bcdef", 1000.0]]).splitlines() == [
        "name      n",
        "-----  ----",
        "a         1",
        "bcdef  1000",
    ]


def ratios(name):
    made = next(w for w in WORKLOADS if w.name == name).make(Source(unit=64, vocab=150_000))
    tokens = sum(len(turn) for turns in made for turn in turns)
    return tokens / sum(len(row) for turns in made for row in fold(turns)), tokens / PrefixTree(made).num_tokens


def test_forks_are_merged_about_four_times_by_rows_and_more_than_eight_by_trees():
    rows, tree = ratios("forks_3")
    assert 3.8 < rows < 4.5
    assert tree > 8


def test_a_template_that_strips_thoughts_defeats_rows_but_not_trees():
    rows, tree = ratios("think_stripped_10")
    assert rows == 1
    assert tree > 4


def test_linear_chats_fold_into_one_row_each():
    assert ratios("linear_30")[0] == pytest.approx(16.2, abs=0.1)


@pytest.mark.parametrize(
    ("name", "shared"), [("prompt_0", 0), ("prompt_1k", 1024), ("prompt_4k", 4096), ("prompt_8k", 8192)]
)
def test_a_shared_prompt_is_as_long_as_its_name_says(name, shared):
    made = next(w for w in WORKLOADS if w.name == name).make(Source(unit=128, vocab=150_000))
    rows = sum(len(row) for turns in made for row in fold(turns))
    assert rows - PrefixTree(made).num_tokens == (len(made) - 1) * shared
    assert {len(turns[0].prompt_ids) for turns in made} == {shared + 4 * 128}


def test_there_is_as_much_work_as_asked_for():
    for workload in WORKLOADS:
        made = batch(workload, Source(unit=4, vocab=1000), at_least=5000)
        assert sum(len(turn) for turns in made for turn in turns) >= 5000
        assert PrefixTree(batch(workload, Source(unit=4, vocab=1000), 0, tree_at_least=3000)).num_tokens >= 3000
