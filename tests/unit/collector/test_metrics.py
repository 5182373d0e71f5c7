"""The collector's metrics say what became of every episode."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from swarmq.collector.metrics import CollectorMetrics

STATE: dict[str, Any] = {
    "begun": 20, "finished": 15, "forwarded": 10, "trained": 8, "eval_finished": 4, "open": 5, "waiting": 2, "in_learners": 1,
    "dropped": {"stale": 3, "equal_rewards": 1}, "groups_open": 2, "groups_ready": {"main": 1}, "tickets_out": {"math": 7},
    "versions": {"main": 9}, "pace": "paused",
}  # fmt: skip


def read(metrics: CollectorMetrics) -> dict[str, float]:
    return {
        sample.name.removeprefix("swarmq_collector_") + "".join(f" {value}" for _, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(metrics.page().decode())
        for sample in family.samples
    }  # fmt: skip


def test_every_episode_is_counted_once() -> None:
    found = read(CollectorMetrics(lambda: STATE, lambda: 6))
    closed = {name: value for name, value in found.items() if name.startswith("episodes_closed")}
    assert closed == {
        "episodes_closed_total  trained": 8,
        "episodes_closed_total  evaluated": 4,
        "episodes_closed_total stale dropped": 3,
        "episodes_closed_total equal_rewards dropped": 1,
    }
    pending = sum(value for name, value in found.items() if name.startswith("episodes "))
    assert found["episodes_begun_total"] == 20 == closed["episodes_closed_total  trained"] + 4 + pending
    assert (found["outgoing_messages"], found["tickets math"], found["weight_version main"]) == (6, 7, 9)


def test_transcripts_pace_and_commits_are_there_from_the_start() -> None:
    metrics = CollectorMetrics(lambda: STATE | {"transcripts_lost": 2}, lambda: 0)
    metrics.observe_commit(0.003)
    found = read(metrics)
    assert found["transcripts_lost_total"] == 2
    assert (found["pace paused"], found["pace running"]) == (1, 0)
    assert (found["commit_seconds_count"], found["commit_seconds_bucket 0.0025"]) == (1, 0)
