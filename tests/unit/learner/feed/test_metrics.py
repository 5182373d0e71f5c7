"""The learner's metrics are those of its events."""

from __future__ import annotations

import math

from prometheus_client.parser import text_string_to_metric_families

from swarmq.learner.feed.metrics import LearnerMetrics

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def read(metrics: LearnerMetrics) -> Samples:
    families = text_string_to_metric_families(metrics.page().decode())
    return {
        (sample.name.removeprefix("swarmq_learner_"), tuple(v for k, v in sorted(sample.labels.items()) if k != "policy")): sample.value
        for family in families
        for sample in family.samples
    }  # fmt: skip


def test_steps_are_counted_and_the_newest_figures_shown() -> None:
    metrics = LearnerMetrics("main")
    metrics.observe_step(
        {"reward": 0.25, "loss": 1.0, "episodes": 8, "tokens_trained": 100, "step_s": 2.0, "wait_s": 0.5}
    )
    fields = {"reward": 0.75, "loss": None, "episodes": 8, "tokens_trained": 50, "step_s": 4.0, "train_s": 3.0}
    metrics.observe_step(fields | {"staleness": {"0": 2, "3": 6}, "dropped": {"stale": 3}})
    found = read(metrics)
    assert found["reward", ()] == 0.75
    assert found["loss", ()] == 1.0, "a step without a finite loss has none"
    assert (found["steps_total", ()], found["episodes_total", ()], found["tokens_total", ()]) == (2, 16, 150)
    assert found["phase_seconds_sum", ("step",)] == 6.0
    assert found["phase_seconds_count", ("wait",)] == 1
    assert found["staleness_bucket", ("2.0",)] == 2
    assert found["staleness_count", ()] == 8
    assert found["dropped_total", ("stale",)] == 3


def test_the_present_phase_is_the_only_one() -> None:
    metrics = LearnerMetrics("main")
    assert not [name for name, _ in read(metrics) if name == "phase"]
    for phase in ("waiting", "training"):
        metrics.observe_state({"phase": phase, "version": 7, "groups_ready": 3}, waited_s=1.5)
    found = read(metrics)
    assert [labels for name, labels in found if name == "phase"] == [("training",)]
    assert (found["step", ()], found["groups_ready", ()], found["waiting_seconds", ()]) == (7, 3, 1.5)


def test_a_figure_that_is_not_finite_does_not_end_the_page() -> None:
    metrics = LearnerMetrics("main")
    metrics.observe_step({"reward": math.nan, "loss": math.inf})
    assert math.isnan(read(metrics)["reward", ()])
