"""What `swarmq train` needs, loaded and checked before anything starts: agents and tasks of every kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from swarmq.client.data.curriculum import order_epochs
from swarmq.client.data.readers import read_tasks
from swarmq.client.data.tasks import SwarmTask
from swarmq.client.runners.attempts import AgentFunction
from swarmq.client.runners.worker import load_target
from swarmq.client.runners.worker_processes import split_kind
from swarmq.config import SwarmJob
from swarmq.environments import is_environment, load_agent, load_environment
from swarmq.environments.protocol import Split
from swarmq.errors import ConfigError


class DataSet(msgspec.Struct, frozen=True):
    """Tasks, with the name of the data set that they come from."""

    name: str
    tasks: list[SwarmTask]
    curriculum: str | None = None
    """Function `module:function` that orders the tasks of each epoch; None: each is shuffled."""


class TrainPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that `swarmq train` needs, loaded and checked before anything starts. Each mapping is by kind."""

    job: SwarmJob
    agents: dict[str | None, AgentFunction]
    tasks: dict[str, DataSet]
    held_out: dict[str, DataSet]
    concurrency: int
    """Number of concurrent episodes of each kind."""


def make_plan(
    job: SwarmJob,
    agents: Sequence[str],
    tasks: Sequence[str],
    held_out: Sequence[str],
    curricula: Sequence[str] = (),
    *,
    beside: Path,
    concurrency: int,
) -> TrainPlan:
    """Load agents, tasks and curricula, each given as TEXT or KIND=TEXT. `beside`: file with the tasks of kinds for which none are
    given; environments have tasks of their own.

    Raises ConfigError for a kind without agent, TaskError for an agent, data or curriculum that cannot be used.
    """
    targets = choose_agents(job, agents)
    data = choose_tasks(job, targets, tasks, beside=beside)
    for kind, target in assign_kinds(job, "--curriculum", curricula).items():
        order_epochs(target, data[kind].tasks, 1)  # a wrong one is refused here
        data[kind] = msgspec.structs.replace(data[kind], curriculum=target)
    return TrainPlan(
        job=job,
        agents=load_agents(targets),
        tasks=data,
        held_out={kind: read_data(name, "eval") for kind, name in assign_kinds(job, "--held-out", held_out).items()},
        concurrency=concurrency,
    )


def choose_agents(job: SwarmJob, texts: Sequence[str]) -> dict[str, str]:
    """Return the agent of each kind. Raises ConfigError for a kind without one."""
    targets = assign_kinds(job, "--agent", texts)
    if missing := [kind for kind in job.task_kinds if kind not in targets]:
        raise ConfigError(f"--agent: nothing attempts kind {missing[0]!r}; add --agent {missing[0]}=...")
    return targets


def choose_tasks(
    job: SwarmJob, targets: Mapping[str, str], texts: Sequence[str], *, beside: Path
) -> dict[str, DataSet]:
    """Read the tasks of each kind. `targets`: its agent. Raises ConfigError, TaskError."""
    own = {kind: target if is_environment(target) else str(beside) for kind, target in targets.items()}
    return {kind: read_data(name, "train") for kind, name in (own | assign_kinds(job, "--tasks", texts)).items()}


def assign_kinds(job: SwarmJob, option: str, texts: Sequence[str]) -> dict[str, str]:
    """Return kind -> text; a single text without a kind is for all kinds. Raises ConfigError for an unknown kind, or a text
    that does not say for which kind it is."""
    pairs = [split_kind(text) for text in texts]
    if [kind for kind, _ in pairs] == [None]:
        return dict.fromkeys(job.task_kinds, texts[0])
    found: dict[str, str] = {}
    for (kind, target), text in zip(pairs, texts, strict=True):
        if kind not in job.task_kinds or kind in found:
            flaw = "names no kind" if kind is None else "a second one for its kind" if kind in found else "no such kind"
            raise ConfigError(f"{option} {text}: {flaw}; write KIND=... with one of {', '.join(job.task_kinds)}")
        found[kind] = target
    return found


def load_agents(targets: Mapping[str, str]) -> dict[str | None, AgentFunction]:
    """Load the function or environment of each kind; kinds with equal targets share one. Raises TaskError."""
    loaded: dict[str, AgentFunction] = {
        target: load_agent(target) if is_environment(target) else load_target(target)
        for target in set(targets.values())
    }
    return {kind: loaded[target] for kind, target in targets.items()}


def read_data(name: str, split: Split) -> DataSet:
    """Read all tasks of a data set; of an environment those of the split. Raises TaskError."""
    rows = load_environment(name).tasks(split) if is_environment(name) else None
    return DataSet(name, [*read_tasks(name, rows=rows)])
