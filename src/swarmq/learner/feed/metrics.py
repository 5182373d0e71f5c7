"""The learner's metrics for Prometheus, served by its batch feeder, which is never busy with a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector as Source

PHASE_SECONDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
STEP_PHASES = {"step": "step_s", "wait": "wait_s", "train": "train_s", "push": "push_s", "pause": "pause_s"}
"""Phase label -> field of the step event with the phase's seconds."""
LEVELS = {
    "reward": ("reward", "Mean reward of the newest batch."),
    "loss": ("loss", "Loss of the newest step."),
    "grad_norm": ("grad_norm", "Gradient norm of the newest step."),
    "entropy": ("entropy", "Mean entropy of the newest step, in nats."),
    "kl": ("kl_k3", "KL divergence between sampling and training weights in the newest step."),
    "value_loss": ("value_loss", "Loss of the critic in the newest step."),
    "explained_variance": (
        "explained_variance",
        "Share of the variance of returns that the critic's values explained in the newest step.",
    ),
    "learning_rate": ("learning_rate", "Learning rate of the newest step."),
}
"""Metric name -> field of the step event, and help text."""
SUMS = {
    "episodes": ("episodes", "Episodes that were trained."),
    "tokens": ("tokens_trained", "Sampled tokens that were trained."),
    "computed_tokens": ("tokens_computed", "Tokens of forward and backward passes."),
}


class LearnerMetrics(Source):
    """The metrics of one learner, in a registry of its own."""

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self._state: Mapping[str, Any] = {}
        registry = self._registry = CollectorRegistry()
        self._levels = {
            name: Gauge(f"swarmq_learner_{name}", text, ["policy"], registry=registry)
            for name, (_, text) in LEVELS.items()
        }
        self._sums = {
            name: Counter(f"swarmq_learner_{name}", text, ["policy"], registry=registry)
            for name, (_, text) in SUMS.items()
        }
        self._steps = Counter("swarmq_learner_steps", "Steps of this process.", ["policy"], registry=registry)
        self._dropped = Counter(
            "swarmq_learner_dropped",
            "Episodes that the learner dropped, by reason.",
            ["policy", "reason"],
            registry=registry,
        )
        self._staleness = Histogram(
            "swarmq_learner_staleness",
            "Steps between the sampling of an episode's oldest token and its training.",
            ["policy"],
            buckets=(0, 1, 2, 3, 4, 6, 8, 12, 16),
            registry=registry,
        )
        self._phases = Histogram(
            "swarmq_learner_phase_seconds",
            "Duration of a step and of its phases.",
            ["policy", "phase"],
            buckets=PHASE_SECONDS,
            registry=registry,
        )
        registry.register(self)

    def page(self) -> bytes:
        return generate_latest(self._registry)

    def observe_state(self, fields: Mapping[str, Any], *, waited_s: float) -> None:
        """Update the metrics from the fields of a `state` event and the seconds that the trainer has waited for a batch."""
        self._state = {**fields, "waited_s": waited_s}

    def observe_step(self, fields: Mapping[str, Any]) -> None:
        """Update the metrics from the fields of a `step` event. Missing and non-finite values are ignored."""
        policy = self._policy
        self._steps.labels(policy).inc()
        for name, (field, _) in LEVELS.items():
            if (level := fields.get(field)) is not None:
                self._levels[name].labels(policy).set(level)
        for name, (field, _) in SUMS.items():
            self._sums[name].labels(policy).inc(fields.get(field) or 0)
        for reason, count in fields.get("dropped", {}).items():
            self._dropped.labels(policy, reason).inc(count)
        for staleness, count in fields.get("staleness", {}).items():
            for _ in range(int(count)):
                self._staleness.labels(policy).observe(int(staleness))
        for phase, field in STEP_PHASES.items():
            if (seconds := fields.get(field)) is not None:
                self._phases.labels(policy, phase).observe(seconds)

    def collect(self) -> Iterator[Metric]:
        state = self._state
        for name, text, value in (
            ("step", "Number of steps that the weights have seen.", state.get("version", 0)),
            ("groups_ready", "Groups that the learner holds and has not trained.", state.get("groups_ready", 0)),
            (
                "waiting_seconds",
                "Seconds that the trainer has waited for a batch; 0 while it has one.",
                state.get("waited_s", 0),
            ),
        ):
            family = GaugeMetricFamily(f"swarmq_learner_{name}", text, labels=["policy"])
            family.add_metric([self._policy], value)
            yield family
        phase = GaugeMetricFamily(
            "swarmq_learner_phase", "1 for what the learner does now.", labels=["policy", "phase"]
        )
        if "phase" in state:
            phase.add_metric([self._policy, state["phase"]], 1)
        yield phase
