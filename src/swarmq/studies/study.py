"""The file that states a study, written before its first trial: question, metric, arms, seeds, budget, design, stopping rule."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

Whole = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]
Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]


class Metric(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The primary metric, by which arms are compared."""

    name: str
    """Name of a metric that every trial returns. Trials of `swarmq train` return `held_out` and `held_out_before` (mean reward on
    the held-out tasks after and before training), `reward` (mean training reward of the last steps) and `seconds`."""
    direction: Literal["maximize", "minimize"] = "maximize"


class TrialPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every trial runs: `swarmq train` with a job and an agent, or a Python function."""

    job: str = ""
    """Job file of `swarmq train`, beside the study file. Empty for a function."""
    agent: str = ""
    """Agent of `swarmq train`."""
    function: str = ""
    """`module:function` instead of a job and an agent. It gets a `swarmq.studies.trial.Attempt` and returns a dict of metrics."""
    tasks: str = ""
    """Tasks to train on, beside the study file."""
    held_out: str = ""
    """Tasks that no trial trains on and no planner sees."""
    code: tuple[str, ...] = ()
    """Files and folders beside the study file that a trial's result depends on, apart from the job, the agent's module and tasks."""
    max_seconds: Positive
    """Longest time that a trial may take. The trial's whole time is reserved before it starts, and it is killed at the end."""
    gpus: Count = 1
    """Number of GPUs that a trial uses. A host without GPUs counts as one."""
    max_calls: Whole = 0
    """Largest number of paid calls that a trial makes."""
    max_money: NotNegative = 0.0
    """Largest amount of money that a trial spends, in the currency of the budget."""


class Arm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of the alternatives that a study compares. What is empty is as in the trial's plan."""

    settings: dict[str, Any] = {}
    """Settings of the job by path, e.g. `{"policies.main.train.loss.name" = "cispo"}`; of a function, its arguments."""
    agent: str = ""
    tasks: str = ""


class Parameter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One axis of a search space: either `values`, or a range."""

    values: tuple[Any, ...] = ()
    low: float | None = None
    high: float | None = None
    log: bool = False
    """Whether the range is searched on a logarithmic scale."""
    whole: bool = False
    """Whether the range holds whole numbers only."""


class Budget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hard caps of a study. None: no cap. Trials reserve what they may need before they start."""

    gpu_seconds: Positive | None = None
    """Seconds of trials, times their GPUs."""
    calls: Whole | None = None
    money: NotNegative | None = None
    wall_clock_s: Positive | None = None
    """Seconds in which a leader of the study runs, by its monotonic clock."""
    trials: Count | None = None
    """Number of starts of a trial, repeated starts included."""


class Design(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which trials are made, and in which order."""

    kind: Literal["grid", "random", "sequential", "halving", "asha", "optuna"] = "grid"
    """`grid`: every arm, or every combination of the space's values, with every seed. `random`: `num_arms` draws from the space.
    `sequential`: as grid, seed by seed, so that a study may stop after any number of whole seeds. `halving`: all arms at the first
    rung; after each rung the best share goes on. `asha`: the same without waiting for a whole rung. `optuna`: arms proposed by one
    of Optuna's samplers."""
    num_arms: Count = 16
    """Number of arms that `random` and `optuna` draw, and `halving` and `asha` if there is a search space."""
    seed: Whole = 0
    """Seed of the draws."""
    rungs: tuple[Count, ...] = ()
    """Steps at which `halving` and `asha` compare, ascending. A promoted trial continues where it stopped."""
    keep: Annotated[float, Meta(gt=0, lt=1)] = 0.5
    """Share of the arms that goes on from each rung."""
    sampler: Literal["TPESampler", "GPSampler", "CmaEsSampler", "RandomSampler", "QMCSampler"] = "TPESampler"
    """Sampler of Optuna."""


class StoppingRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a study ends."""

    kind: Literal["fixed", "anytime"] = "fixed"
    """`fixed`: after all planned trials. `anytime`: as soon as an anytime-valid interval excludes 0 or the smallest effect."""
    alpha: Annotated[float, Meta(gt=0, lt=1)] = 0.05
    """Error rate of the study's claims."""
    power: Annotated[float, Meta(gt=0, lt=1)] = 0.8
    """Power that the number of seeds shall have for the smallest effect."""
    look_every: Count = 1
    """Number of whole seeds between two looks of an `anytime` study."""


class Planner(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who proposes arms beyond those of the file."""

    kind: Literal["design", "endpoint"] = "design"
    """`design`: nobody; the design decides alone. `endpoint`: a model behind an OpenAI endpoint."""
    base_url: str = ""
    model: str = ""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the endpoint's key."""
    approval: Literal["none", "arm", "budget"] = "none"
    """What a person approves: nothing, each arm, or each step of the budget."""
    files: tuple[str, ...] = ()
    """Files that the planner may change, by a diff."""
    max_arms: Whole = 0
    """Number of arms that the planner may add."""


class Study(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A study file."""

    name: str
    """Name of the study, of its folder and of its queues: lower-case letters, digits and hyphens, at most 32."""
    question: str
    metric: Metric
    smallest_effect: Positive
    """Smallest difference of the metric that would matter."""
    trial: TrialPlan
    settings: dict[str, Any] = {}
    """Settings that all arms share."""
    arms: dict[str, Arm] = {}
    """Arms by name. The first one is the baseline."""
    space: dict[str, Parameter] = {}
    """Search space by path of the setting, instead of arms."""
    seeds: Annotated[tuple[Whole, ...], Meta(min_length=1)]
    """Seeds of every arm. Arms are compared seed by seed."""
    noise_trials: Whole = 0
    """Number of further seeds with which the baseline is run against itself, to measure the noise of seeds (A/A)."""
    budget: Budget
    design: Design = Design()
    stopping: StoppingRule = StoppingRule()
    planner: Planner = Planner()
    max_failures: Count = 3
    """Number of infrastructure failures after which a trial is parked with its log."""
