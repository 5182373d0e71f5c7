"""The collector's metrics for Prometheus: fates of episodes, what waits, and how long commits take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector as Source

COMMIT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
PACES = ("running", "paused", "draining", "drained")


class CollectorMetrics(Source):
    """The metrics of one collector, in a registry of its own."""

    def __init__(self, read_state: Callable[[], Mapping[str, Any]], count_outgoing: Callable[[], int]) -> None:
        """`read_state`: returns the fields of the `state` event. `count_outgoing`: returns the number of decided messages that
        the broker has not confirmed."""
        self._read_state, self._count_outgoing = read_state, count_outgoing
        self._registry = CollectorRegistry()
        self._commit = Histogram(
            "swarmq_collector_commit_seconds",
            "Duration of one transaction of the ledger.",
            buckets=COMMIT_S,
            registry=self._registry,
        )
        self._registry.register(self)

    def page(self) -> bytes:
        return generate_latest(self._registry)

    def observe_commit(self, seconds: float) -> None:
        self._commit.observe(seconds)

    def collect(self) -> Iterator[Metric]:
        state = self._read_state()
        yield CounterMetricFamily(
            "swarmq_collector_episodes_begun", "Training episodes that began.", value=state["begun"]
        )
        closed = CounterMetricFamily(
            "swarmq_collector_episodes_closed",
            "Episodes by what became of them: trained, dropped for a reason, or evaluated.",
            labels=["state", "reason"],
        )
        closed.add_metric(["trained", ""], state["trained"])
        closed.add_metric(["evaluated", ""], state["eval_finished"])
        for reason, count in state["dropped"].items():
            closed.add_metric(["dropped", reason], count)
        yield closed
        yield _make_metric("swarmq_collector_episodes", "Training episodes whose end is not decided yet.", "state", {
            name: state[name] for name in ("open", "waiting", "in_learners")
        })  # fmt: skip
        yield GaugeMetricFamily("swarmq_collector_groups_open", "Groups that lack members.", value=state["groups_open"])
        yield _make_metric(
            "swarmq_collector_groups_ready", "Groups that wait for a learner.", "policy", state["groups_ready"]
        )
        yield _make_metric(
            "swarmq_collector_tickets", "Tickets that were issued and not used.", "kind", state["tickets_out"]
        )
        yield _make_metric(
            "swarmq_collector_weight_version", "Steps that the learner has reported.", "policy", state["versions"]
        )
        yield GaugeMetricFamily(
            "swarmq_collector_outgoing_messages",
            "Decided messages that the broker has not confirmed.",
            value=self._count_outgoing(),
        )
        yield CounterMetricFamily(
            "swarmq_collector_transcripts_lost",
            "Transcripts that were lost because the disk was full or too slow.",
            value=state.get("transcripts_lost", 0),
        )
        pace = state.get("pace", "running")
        yield _make_metric("swarmq_collector_pace", "1 for the present pace of the run.", "pace", {
            name: int(name == pace) for name in PACES
        })  # fmt: skip


def _make_metric(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
