"""Prometheus metrics at `/metrics`: the proxy's counters, its engines, and three durations."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from swarmq.messages import Turn
from swarmq.proxy.completions.limiter import CallLimiter
from swarmq.proxy.counters import Counters
from swarmq.proxy.engines.pools import EnginePools
from swarmq.proxy.episodes.cache import EpisodeCache

NOT_RECEIVED = {
    "orphan_turns": "Recorded turns of the whole run that are not trained, because their agents did not receive the answers.",
    "unseen_turns": "Orphan turns of the whole run whose proxy was killed before it could report on them.",
    "rewards_uncredited": "Rewards of the whole run for single calls that are not trained.",
}
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
BY_KIND = {
    "calls": "Model calls that were admitted, by the kind of task that the key names.",
    "episodes": "Episodes whose first call here was answered.",
    "prompt_tokens": "Prompt tokens of answered calls.",
    "sampled_tokens": "Sampled tokens that the broker has confirmed.",
    "turns": "Turns that the broker has confirmed.",
}


class Metrics(Collector):
    """The metrics of one proxy, in a registry of its own."""

    def __init__(self, meter: Counters, gate: CallLimiter, fleet: EnginePools, episodes: EpisodeCache) -> None:
        self._meter, self._gate, self._fleet, self._episodes = meter, gate, fleet, episodes
        self._registry = CollectorRegistry()
        self._first_token, self._whole, self._confirm = (
            Histogram(f"swarmq_{name}_seconds", text, ["policy"], buckets=SECONDS, registry=self._registry)
            for name, text in (
                ("first_token", "From a call's arrival to its first token."),
                ("call", "From a call's arrival to the end of its sampling."),
                ("confirm", "From the end of sampling to the broker's confirm."),
            )
        )
        self._registry.register(self)
        meter.watchers.append(self._observe)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def _observe(self, turn: Turn, confirm_s: float) -> None:
        self._first_token.labels(turn.policy).observe(turn.timings.first_token_s)
        self._whole.labels(turn.policy).observe(turn.timings.total_s)
        self._confirm.labels(turn.policy).observe(confirm_s)

    def collect(self) -> Iterator[Metric]:
        meter = self._meter
        for name, text in BY_KIND.items():
            counted = CounterMetricFamily(f"swarmq_{name}", text, labels=["kind"])
            for kind, counts in meter.by_kind.items():
                counted.add_metric([kind], counts[name])
            yield counted
        for name, text, count in (
            *((name, text, self._episodes.not_received[name]) for name, text in NOT_RECEIVED.items()),
            ("errors", "Calls that were answered with an error.", meter.errors),
            ("turns_continued", "Turns with an earlier turn to continue.", meter.drift.continued),
            (
                "turns_repaired",
                "Turns whose prompt keeps recorded tokens where a fresh rendering has other tokens.",
                meter.drift.repaired,
            ),
        ):
            yield CounterMetricFamily(f"swarmq_{name}", text, value=count)
        branches = CounterMetricFamily(
            "swarmq_branches", "Turns that could not continue, by reason.", labels=["reason"]
        )
        for reason, count in meter.drift.branches.items():
            branches.add_metric([reason], count)
        yield branches
        unusable = CounterMetricFamily(
            "swarmq_unusable_answers", "Answers of engines that could not be used, by reason.", labels=["reason"]
        )
        for reason, count in meter.unusable.items():
            unusable.add_metric([reason], count)
        yield unusable
        left_out = CounterMetricFamily(
            "swarmq_left_out", "Requests from which a tool or parameter was left out, by its name.", labels=["what"]
        )
        for what, count in meter.left_out.items():
            left_out.add_metric([what], count)
        yield left_out
        forgotten = CounterMetricFamily(
            "swarmq_episodes_forgotten", "Episodes that the proxy has forgotten, by reason.", labels=["reason"]
        )
        for reason, count in self._episodes.counts.items():
            forgotten.add_metric([reason], count)
        yield forgotten
        for name, text, level in (
            ("open_calls", "Calls that are being rendered or sampled.", self._gate.open),
            ("waiting_calls", "Calls that wait for a slot.", self._gate.waiting),
            ("episodes_remembered", "Episodes that the proxy remembers.", len(self._episodes)),
            ("memory_bytes", "Bytes of memory for the conversations of these episodes.", self._episodes.size_bytes),
        ):
            yield GaugeMetricFamily(f"swarmq_{name}", text, value=level)
        yield from self._engines()

    def _engines(self) -> Iterator[Metric]:
        labels = ["policy", "engine"]
        up = GaugeMetricFamily("swarmq_engine_up", "1 if the engine answered the last probe, else 0.", labels=labels)
        open_calls = GaugeMetricFamily("swarmq_engine_open_calls", "Calls of this proxy at an engine.", labels=labels)
        version = GaugeMetricFamily(
            "swarmq_engine_weight_version", "Version of the weights that an engine serves.", labels=labels
        )
        for policy, views in self._fleet.views().items():
            for view in views:
                up.add_metric([policy, view.url], int(view.healthy))
                open_calls.add_metric([policy, view.url], view.open_calls)
                if view.version is not None:
                    version.add_metric([policy, view.url], view.version)
        yield from (up, open_calls, version)
