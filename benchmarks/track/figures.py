"""What is tracked: which benchmarks are run, and which of their figures are kept, in units that differ little between machines."""

from __future__ import annotations

from typing import Literal, NamedTuple

Unit = Literal["ratio", "reward", "count", "per reference", "references"]
"""`ratio`: a figure that does not depend on the machine. `reward`: a mean reward between 0 and 1. `count`: must be 0. `per reference`: a rate,
times the reference; `references`: seconds, divided by the reference (`reference.py`)."""


class Figure(NamedTuple):
    """A figure of a benchmark, as a line of the record has it."""

    name: str
    benchmark: str
    key: str
    """Name among the benchmark's figures."""
    unit: Unit
    better: Literal["higher", "lower"]
    meaning: str


class Part(NamedTuple):
    """A benchmark of the set, with the arguments that it is run with."""

    benchmark: str
    arguments: tuple[str, ...] = ()
    result: str = ""
    """Name of its result, if that is not the benchmark's."""


PARTS = (
    Part("wire"),
    Part("collector"),
    Part("learner", ("--device", "cpu", "--model", "tiny", "--rows", "128,512", "--tokens", "2048"), "learner_cpu"),
    Part(
        "timelines",
        ("--device", "cpu", "--model", "tiny", "--only", "linear_10,forks_3", "--no-check"),
        "timelines_cpu",
    ),
    Part("demo", ("--seeds", "0")),
    Part("faults", ("--injections", "200", "--seed", "1")),
)
FIGURES = (
    Figure("demo_reward", "demo", "reward_after_min", "reward", "higher", "held-out reward after the demo, seed 0"),
    Figure("demo_time", "demo", "train_seconds_max", "references", "lower", "training of the demo"),
    Figure("faults_lost", "faults", "lost", "count", "lower", "finished episodes that 200 faults lost"),
    Figure("faults_twice", "faults", "twice", "count", "lower", "episodes that were trained twice"),
    Figure("faults_hangs", "faults", "hangs", "count", "lower", "faults after which a run stood still"),
    Figure("wire_bytes", "wire", "bytes_per_sampled_token_20", "ratio", "lower", "bytes of messages for a sampled token, 20 turns"),
    Figure("collector_rate", "collector", "episodes_per_cpu_s", "per reference", "higher", "episodes of ten turns that one core's collector takes"),
    Figure("learner_speed", "learner", "over_baseline_tiny", "ratio", "higher", "speed of a step over plain transformers, at least"),
    Figure("timelines_chat", "timelines", "speedup_linear_10", "ratio", "higher", "chats of ten turns: speed-up of folding"),
    Figure("timelines_forks", "timelines", "speedup_forks", "ratio", "higher", "episodes that fork: speed-up of prefix trees"),
)  # fmt: skip
