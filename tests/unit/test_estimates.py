"""Intervals agree with published ones, and nothing that users report as a metric grows without bound or becomes NaN."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmq.estimates import (
    MAX_METRIC_NAME,
    MAX_METRICS,
    MetricNames,
    MetricSum,
    add_metrics,
    keep_most_reported,
    shorten_name,
    sum_metrics,
    wilson,
)
from swarmq.learner.store.records import EpisodeSums

METRICS = st.lists(st.dictionaries(st.text(), st.floats(allow_nan=False, allow_infinity=False), max_size=5), max_size=5)


def test_wilson_agrees_with_the_published_example_and_stays_inside_0_and_1() -> None:
    low, high = wilson(0.0, 10)  # 0 of 10: [0, 0.2775]
    assert low == 0.0
    assert high == pytest.approx(0.2775, abs=1e-4)
    assert wilson(1.0, 10)[1] == pytest.approx(1.0)
    assert wilson(1.0, 10)[1] <= 1.0


def test_an_interval_of_few_tasks_is_wide_even_where_all_agree() -> None:
    low, high = wilson(1.0, 5)
    assert (round(low, 2), high) == (0.57, 1.0)


@given(METRICS, METRICS)
def test_means_are_finite_and_sums_of_parts_are_sums_of_the_whole(
    one: list[dict[str, float]], other: list[dict[str, float]]
) -> None:
    together, whole = add_metrics(sum_metrics(one), sum_metrics(other)), sum_metrics([*one, *other])
    assert {name: sums.count for name, sums in together.items()} == {name: sums.count for name, sums in whole.items()}
    assert all(math.isfinite(sums.mean) and sums.mean == pytest.approx(whole[n].mean) for n, sums in together.items())


def test_the_largest_floats_of_both_signs_have_a_finite_mean() -> None:
    sums = sum_metrics([{"x": 1.7e308}] * 3 + [{"y": -1.7e308}, {"y": 1.7e308}])
    assert sums["x"].mean == pytest.approx(1e100)
    assert sums["y"].mean == 0.0


def test_each_metric_is_a_mean_over_the_episodes_that_report_it() -> None:
    sums = sum_metrics([{"a": 1.0}, {"a": 3.0, "b": 5.0}, {}])
    assert {name: one.mean for name, one in sums.items()} == {"a": 2.0, "b": 5.0}


def test_long_names_are_cut_and_stay_different() -> None:
    one, other = shorten_name("x" * 500 + "a"), shorten_name("x" * 500 + "\udc80")
    assert (len(one), len(other)) == (MAX_METRIC_NAME, MAX_METRIC_NAME)
    assert one != other
    assert shorten_name("y" * MAX_METRIC_NAME) == "y" * MAX_METRIC_NAME


def test_an_episode_with_ten_thousand_names_adds_a_bounded_number() -> None:
    assert len(sum_metrics([{f"m{number}": 0.0 for number in range(10_000)}])) == 2 * MAX_METRICS


def test_the_most_reported_metrics_are_kept() -> None:
    sums = {f"m{number:03d}": MetricSum(number, 0.0) for number in range(1, 100)}
    assert list(keep_most_reported(sums)) == [f"m{number:03d}" for number in range(36, 100)]


def test_names_admitted_once_stay_and_the_first_refused_one_is_said_once_a_kind() -> None:
    names, full = MetricNames(), {f"m{number}": MetricSum(1, 1.0) for number in range(MAX_METRICS)}
    assert names.admit("a", full) == (full, "")
    shown, warning = names.admit("a", {"new": MetricSum(1, 1.0), "m3": MetricSum(2, 1.0)})
    assert shown == {"m3": MetricSum(2, 1.0)}
    assert "'new'" in warning
    assert names.admit("a", {"new": MetricSum(1, 1.0)}) == ({}, "")
    assert names.admit("b", {"new": MetricSum(1, 1.0)})[1] == ""


def test_sums_written_before_metrics_existed_are_read() -> None:
    old = msgspec.msgpack.encode([3, 1.5, 2, 1])
    assert msgspec.msgpack.decode(old, type=EpisodeSums) == EpisodeSums(episodes=3, reward=1.5, judged=2, successes=1)
