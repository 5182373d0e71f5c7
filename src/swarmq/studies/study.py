"""The file that states a study, written before its first trial: question, metric, arms, seeds, budget, design, stopping rule."""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections import Counter
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from swarmq.config_errors import explain
from swarmq.errors import ConfigError
from swarmq.studies.factorial import fractional

KILL_S = 1.0
"""Seconds in which a trial ends after it was killed at its time limit; reserved with it."""
NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")

Whole = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]
Words = Annotated[str, Meta(min_length=1)]
Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]


class Metric(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The primary metric, by which arms are compared."""

    name: Words
    """Name of a metric that every trial returns. Trials of `swarmq train` return `held_out` (mean reward on the held-out tasks
    after training), `held_out_success` (share of successes there), both also with `_before`, `reward` (mean training reward of the last
    steps), `staleness`, `trained_episodes`, `trained_calls`, `trained_tokens`, `dropped_episodes`, `steps` and `seconds`."""
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
    """One of the alternatives that a study compares. Fields that are empty have the values of `[trial]`."""

    settings: dict[str, Any] = {}
    """Settings of the job by path, e.g. `{"policies.main.train.loss.name" = "cispo"}`; of a function, its arguments."""
    agent: str = ""
    tasks: str = ""
    files: dict[str, str] = {}
    """Files beside the study file that have another content for this arm, by path. A planner's changes are such files."""


class Parameter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One axis of a search space: either `values`, or a range."""

    values: tuple[Any, ...] = ()
    low: float | None = None
    high: float | None = None
    log: bool = False
    """Whether the range is searched on a logarithmic scale."""
    whole: bool = False
    """Whether the range holds whole numbers only."""


class StudyBudget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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

    kind: Literal["grid", "fractional", "random", "sequential", "halving", "asha", "optuna"] = "grid"
    """`grid`: every arm, or every combination of the space's values, with every seed. `fractional`: `num_arms` combinations
    of two values for each setting, chosen so that the effects of the settings can be told apart. `random`: `num_arms` draws from the space.
    `sequential`: as grid, seed by seed, so that a study may stop after any number of whole seeds. `halving`: all arms at the first
    rung; after each rung the best share goes on, and the baseline. `asha`: the same without waiting for a whole rung. `optuna`: arms proposed by one
    of Optuna's samplers."""
    num_arms: Count = 16
    """Number of arms that `fractional` chooses (a power of two), that `random` and `optuna` draw, and `halving` and `asha` if there is a search space."""
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
    """Files beside the study file that the planner may change. Their content is in its prompts."""
    tests: tuple[str, ...] = ()
    """Python programs beside the study file that must exit with 0 before a changed file is tried. They run in a sandbox, beside
    `files` and `trial.code`, without installed packages."""
    budget_step: Annotated[float, Meta(gt=0, le=1)] = 0.25
    """Share of the budget that accepted arms may use with `approval = "budget"` before a person approves another one."""
    max_arms: Whole = 0
    """Number of arms that the planner may add."""
    prompt_price: NotNegative = 0.0
    """Price of a million tokens of prompts, in the currency of `budget.money`."""
    answer_price: NotNegative = 0.0
    """Price of a million tokens of answers."""
    max_tokens: Count = 16_384
    """Largest number of tokens of one answer, which requests state if answers have a price."""


class Study(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A study file."""

    name: str
    """Name of the study, of its folder and of its queues: lower-case letters, digits and hyphens, at most 32."""
    question: Words
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
    budget: StudyBudget
    design: Design = Design()
    stopping: StoppingRule = StoppingRule()
    planner: Planner = Planner()
    max_failures: Count = 3
    """Number of infrastructure failures after which a trial is parked with its log."""
    lease_s: Positive = 30.0
    """Seconds of silence after which a worker has lost its trial, and after which a worker that cannot reach the broker ends it."""
    parent: str = ""
    """`NAME@DIGEST` of the study from which this one was forked, with the digest of that study's ledger."""

    def __post_init__(self) -> None:
        check(self)


def load_study(path: Path) -> Study:
    """Read a study file. Raises ConfigError that names the file and the setting."""
    try:
        tree = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); write one with `swarmq study new NAME`"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    try:
        return msgspec.convert(tree, Study)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {explain(str(error), tree, Study)}") from error


def hash_study(study: Study) -> str:
    """Return the hash of what the study file says, whatever its layout and comments."""
    return hash_json(study)


def hash_json(value: Any) -> str:
    """Return the SHA-256 of a value as JSON with sorted keys."""
    return hashlib.sha256(msgspec.json.encode(value, order="deterministic")).hexdigest()


def check(study: Study) -> None:
    """Raise ValueError for a study that cannot be run, with the path of the setting in front."""
    check_name(study.name)
    trial, design = study.trial, study.design
    if bool(trial.function) == bool(trial.job):
        raise ValueError("trial: give either job and agent, or function")
    if trial.job and not (trial.agent or all(arm.agent for arm in study.arms.values())):
        raise ValueError(
            "trial.agent: missing; name the function that attempts the tasks, as for `swarmq train --agent`"
        )
    targets = {"trial.function": trial.function, "trial.agent": trial.agent}
    for where, target in (targets | {f"arms.{name}.agent": arm.agent for name, arm in study.arms.items()}).items():
        if target and ":" not in target:
            raise ValueError(f"{where}: {target!r} is not of the form module:function, e.g. my_agent:attempt")
    if trial.job and study.metric.name.startswith("held_out") and not trial.held_out:
        raise ValueError(
            f"trial.held_out: missing, but the metric is {study.metric.name}; name tasks that are never trained"
        )
    if repeated := [seed for seed, times in Counter(study.seeds).items() if times > 1]:
        raise ValueError(f"seeds: {repeated[0]} is given twice; every seed counts once")
    if bool(study.arms) == bool(study.space):
        raise ValueError("arms: give either arms or a search space, in [arms.NAME] or [space]")
    if len(study.arms) == 1 and not study.noise_trials:
        raise ValueError(
            "arms: there is only one, so nothing is compared; add an arm, or noise_trials for an A/A study"
        )
    for path, parameter in study.space.items():
        _check_parameter(path, parameter, design)
    _check_design(study)
    for name, cap, most in (
        ("gpu_seconds", study.budget.gpu_seconds, (trial.max_seconds + KILL_S) * trial.gpus),
        ("calls", study.budget.calls, trial.max_calls),
        ("money", study.budget.money, trial.max_money),
        ("wall_clock_s", study.budget.wall_clock_s, trial.max_seconds + KILL_S),
    ):
        if cap is not None and cap < most:
            raise ValueError(
                f"budget.{name}: {cap:g} is less than the {most:g} that one trial may need; raise it, or lower the trial's limit"
            )
    if all(cap is None for cap in msgspec.structs.astuple(study.budget)):
        raise ValueError("budget: no cap is set; set at least one of gpu_seconds, calls, money, wall_clock_s, trials")


def check_name(name: str) -> None:
    """Raise ValueError unless a study may have this name."""
    if not NAME.fullmatch(name):
        raise ValueError(
            f"name: {name!r} must be at most 32 lower-case letters, digits and hyphens, and not begin with a hyphen"
        )


def _check_parameter(path: str, parameter: Parameter, design: Design) -> None:
    if bool(parameter.values) == (parameter.low is not None):
        raise ValueError(f"space.{path}: give either values, or low and high")
    if len({hash_json(value) for value in parameter.values}) < len(parameter.values):
        raise ValueError(
            f"space.{path}: a value is given twice, so arms could not be told apart: {[*parameter.values]}"
        )
    if design.kind == "fractional" and len(parameter.values) != 2:
        raise ValueError(f"space.{path}: design.kind = 'fractional' needs two values (got {len(parameter.values)})")
    if parameter.values:
        return
    if parameter.high is None or parameter.low is None or parameter.high <= parameter.low:
        raise ValueError(f"space.{path}: high must be above low (got {parameter.low} and {parameter.high})")
    if parameter.log and parameter.low <= 0:
        raise ValueError(f"space.{path}: low must be above 0 on a logarithmic scale (got {parameter.low:g})")
    if design.kind in ("grid", "sequential"):
        raise ValueError(
            f"space.{path}: design.kind = {design.kind!r} needs values, not a range; list them, or use 'random'"
        )


def _check_design(study: Study) -> None:
    design = study.design
    if (design.kind in ("halving", "asha")) != bool(design.rungs):
        raise ValueError(
            f"design.rungs: design.kind = {design.kind!r} "
            + ("has none; leave them out" if design.rungs else "needs them, e.g. [5, 10, 20]")
        )
    if list(design.rungs) != sorted(set(design.rungs)):
        raise ValueError(f"design.rungs: {list(design.rungs)} must ascend")
    if design.kind in ("fractional", "random", "optuna") and not study.space:
        raise ValueError(f"space: missing, but design.kind = {design.kind!r} draws arms from it")
    if design.kind == "fractional":
        try:
            fractional(len(study.space), design.num_arms)
        except ValueError as error:
            raise ValueError(f"design.num_arms: {error}") from None
    planner = study.planner
    if planner.kind == "endpoint" and not (planner.model and planner.max_arms):
        raise ValueError("planner: kind = 'endpoint' needs model and max_arms")
    if planner.kind == "endpoint" and design.kind not in ("grid", "sequential"):
        raise ValueError(
            f"planner.kind: 'endpoint' adds arms, so design.kind must be 'grid' or 'sequential' (got {design.kind!r})"
        )
    if planner.kind == "endpoint" and study.stopping.kind == "anytime":
        raise ValueError(
            "stopping.kind: 'anytime' ends before a planner has seen results; use 'fixed' with planner.kind = 'endpoint'"
        )
    for arm in study.arms.values():
        for name in arm.files:
            if not _is_below(name):
                raise ValueError(f"arms.files: {name!r} must be a path below the study's folder")
    if bad := [name for name in (*planner.files, *planner.tests) if not _is_below(name)]:
        raise ValueError(f"planner.files: {bad[0]!r} must be a path below the study's folder")
    if study.stopping.kind == "anytime" and design.kind != "sequential":
        raise ValueError("stopping.kind: 'anytime' looks after whole seeds, so design.kind must be 'sequential'")


def _is_below(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and path.parts[0] != "studies"
