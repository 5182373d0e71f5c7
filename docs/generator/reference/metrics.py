"""Every metric of collector, learners and proxies: the pages that they serve to Prometheus, with one sample of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from docs.generator.reference.source import cell
from prometheus_client.parser import text_string_to_metric_families

from swarmq.collector.metrics import CollectorMetrics
from swarmq.learner.feed.metrics import LEVELS, SUMS, LearnerMetrics
from swarmq.proxy.completions.limiter import CallLimiter
from swarmq.proxy.counters import Counters
from swarmq.proxy.engines.pool import EngineView
from swarmq.proxy.episodes.cache import EpisodeCache
from swarmq.proxy.http.metrics import Metrics
from swarmq.token_drift import Drift

SUFFIXES = {"counter": "_total", "histogram": "_bucket, _sum, _count"}


def page() -> str:
    return "\n".join(
        line
        for title, text in (("Collector", _collector()), ("Learners", _learner()), ("Proxies", _proxy()))
        for line in _table(title, text)
    )


def _table(title: str, served: bytes) -> Iterator[str]:
    yield f"## {title}\n\n| name | type | labels | meaning |\n|---|---|---|---|"
    for family in text_string_to_metric_families(served.decode()):
        if family.name.endswith("_created"):
            continue
        labels = {label: None for sample in family.samples for label in sample.labels if label != "le"}
        suffix = SUFFIXES.get(family.type, "")
        name = (
            f"`{family.name}{suffix}`"
            if "," not in suffix
            else f"`{family.name}` ({suffix.replace('_', chr(92) + '_')})"
        )
        yield f"| {name} | {family.type} | {', '.join(f'`{label}`' for label in labels)} | {cell(family.documentation)} |"
    yield ""


def _collector() -> bytes:
    by_name = {"NAME": 1}
    state: Mapping[str, Any] = {
        **dict.fromkeys(("begun", "trained", "eval_finished", "open", "waiting", "in_learners", "groups_open"), 0),
        **dict.fromkeys(("dropped", "groups_ready", "tickets_out", "versions"), by_name),
    }
    return CollectorMetrics(lambda: state, lambda: 0).page()


def _learner() -> bytes:
    metrics = LearnerMetrics("POLICY")
    metrics.observe_state({"phase": "waiting"}, waited_s=0.0)
    measured = dict.fromkeys((field for field, _ in (LEVELS | SUMS).values()), 1.0)
    metrics.observe_step({**measured, "step_s": 1.0, "dropped": {"REASON": 1}, "staleness": {"0": 1}})
    return metrics.page()


def _proxy() -> bytes:
    counters, episodes = Counters(drift=Drift(branches={"REASON": 1})), EpisodeCache(idle_s=1.0)
    counters.by_kind["KIND"].update(calls=1)
    counters.unusable["REASON"] = counters.left_out["WHAT"] = episodes.counts["REASON"] = 1
    engine = EngineView(url="URL", healthy=True, draining=False, version=1, open_calls=0)
    pools: Any = SimpleNamespace(views=lambda: {"POLICY": [engine]})
    metrics = Metrics(counters, CallLimiter(max_open=1, max_waiting=1), pools, episodes)
    turn: Any = SimpleNamespace(policy="POLICY", timings=SimpleNamespace(first_token_s=1.0, total_s=1.0))
    for observe in counters.watchers:
        observe(turn, 1.0)
    return metrics.text()
