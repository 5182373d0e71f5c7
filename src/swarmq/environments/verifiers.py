"""`verifiers:NAME`: a taskset of `verifiers` (0.4 or later) with its own environment, harness and rewards.

    swarmq feed    taskset ──> task data ──> queue
    swarmq worker  task data ──> Env.run_slot ──> harness ──> episode's endpoint
                                     └──> rewards and metrics of every trace ──> Outcome

An environment of one agent gives the episode its reward. In an environment of several agents every agent's calls are tagged
with its name, and `agent_rewards` credits each agent with its own reward. Rewards that compare members of a group belong to one
rollout in verifiers (`Env.finalize` over its traces), so they need no group of episodes; an agent that plays several times in one
rollout with different rewards cannot be credited and is refused.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import os
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from itertools import islice
from typing import Any

from swarmq.client.episodes.episode import AsyncEpisode
from swarmq.environments.protocol import Split, Target, describe_error, read_payload, require_package
from swarmq.errors import OutcomeError, RolloutError, TaskError
from swarmq.outcome import Outcome, to_finite_float, to_reward

MAX_TASKS = 1000
"""Default number of tasks to read from a taskset that has no end."""
HELD_OUT = 10
"""Default of the setting `held_out`: every tenth task of a taskset without splits is for evaluation."""
EVAL_SPLITS = ("eval", "test", "validation", "valid", "dev")
AGENT_HEADER = "x-swarmq-agent"
CONVERSIONS = ("could not convert string to float", "float() argument must be")
"""Parts of the error messages of verifiers for a reward or metric that is not a number."""
DEFAULTS = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
"""Settings of an agent for which neither environment nor user names a harness or runtime: verifiers' chat loop with tools, on
this machine."""


class VerifiersEnvironment:
    """One taskset of `verifiers`.

    Settings are those of the taskset (`task.NAME` of its tasks); `env.*` are those of the environment, as in verifiers' command
    line (`env.id`, `env.agent.harness.id`, `env.agent.runtime.type`, `env.agent.max_turns`). `tasks` bounds a taskset without an end, and
    `held_out` (10) is the share of tasks for evaluation, one in so many, of a taskset that has no setting `split`.
    """

    def __init__(self, target: Target) -> None:
        require_package(target, "verifiers", "verifiers uv, in a virtual environment of its own")
        if importlib.util.find_spec("verifiers.v1") is None:
            raise TaskError(f"{target}: the installed verifiers is older than 0.4: pip install 'verifiers>=0.4'")
        _pass_on_working_directory()
        self._target = target
        names_tasks = isinstance(target.settings.get("tasks"), list)  # a setting of Harbor's taskset
        self._max_tasks = MAX_TASKS if names_tasks else target.take_count("tasks", MAX_TASKS)
        self._held_out = target.take_count("held_out", HELD_OUT, least=2)
        self._nested: dict[str, Any] = {}
        self._taskset_settings: dict[str, Any] = {}
        for key, value in target.settings.items():
            settings = self._nested if key.startswith("env.") else self._taskset_settings
            _set_nested(settings, key.removeprefix("env.").split("."), value)
        self._env = self._load(self._taskset_settings)
        self._alone = len(self._env._agent_specs) == 1  # noqa: SLF001 - verifiers has no public list of an environment's agents

    def tasks(self, split: Split) -> Iterator[dict[str, Any]]:
        for task in self._read(split):
            yield {
                "id": f"{self._target.name}-{task.data.idx}"
                if split == "train"
                else f"{self._target.name}-{split}-{task.data.idx}",
                "environment": str(self._target),
                "task": task.data.model_dump(mode="json", exclude_none=True),
            }

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Start tool servers that attempts share, and prepare the harness of every agent that runs on this machine."""
        async with contextlib.AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(self._env.serving())
                await self._prepare_harnesses()
            except TaskError:
                raise
            except Exception as error:  # an environment is somebody's Python package
                raise TaskError(f"{self._target}: cannot be started: {describe_error(error)}") from error
            if self._env._runs_local():  # noqa: SLF001
                # A pool keeps a client for every key that it has seen; without it, each rollout closes its own.
                self._env._interception = None  # noqa: SLF001
            yield

    async def attempt(self, ep: AsyncEpisode) -> Outcome:
        (data,) = read_payload(self._target, ep.payload, {"task": dict})
        task_class = type(self._env.taskset).task_type()
        task = task_class(task_class.data_type().model_validate(data), self._env.config.taskset.task)
        key = f"SWARMQ_API_KEY_{ep.episode_id.replace('-', '_')}"  # programs of a rollout do not inherit names with API_KEY
        os.environ[key] = ep.api_key
        try:
            env = self._connect(ep, key)
            episode = await env.run_slot(env.slots(task)[0], _make_context(ep, key))
        finally:
            os.environ.pop(key, None)
        _check(self._target, episode)
        return self._score(ep, episode)

    def _load(self, settings: dict[str, Any]) -> Any:
        try:
            loaders = importlib.import_module("verifiers.v1.utils.loaders")
            config = {**copy.deepcopy(self._nested), "taskset": {**settings, "id": self._target.name}}
            kind = loaders.env_config_type(self._target.name, config.get("id", ""))
            roles = importlib.import_module("verifiers.v1.configs.agent").agent_config_fields(
                kind(taskset=config["taskset"])
            )
            own = loaders.default_harness_id(self._target.name) == self._target.name
            for role, spec in roles.items():
                given = config.setdefault(role, {})
                given.setdefault("runtime", DEFAULTS["runtime"])
                if spec.harness is None and not own:
                    given.setdefault("harness", DEFAULTS["harness"])
            return loaders.load_environment(loaders.resolve_env_config(config))
        except Exception as error:  # an environment is somebody's Python package
            raise TaskError(f"{self._target}: cannot be loaded: {describe_error(error)}") from error

    def _read(self, split: Split) -> Iterator[Any]:
        names = self._find_splits(split)
        if not names:
            held_out = self._held_out
            for task in self._read_taskset(self._env.taskset):
                if (task.data.idx % held_out == held_out - 1) == (split == "eval"):
                    yield task
            return
        errors = []
        for name in names:
            settings = {**self._taskset_settings, "split": name}
            tasks = self._read_taskset(self._load(settings).taskset)
            try:
                first = next(tasks, None)
            except TaskError as error:
                errors.append(error)
                continue
            if first is not None:
                yield first
                yield from tasks
                return
        raise errors[0] if errors else TaskError(f"{self._target}: there is no task in split {' or '.join(names)}")

    def _find_splits(self, split: Split) -> list[str]:
        """Return the names that the taskset may have for a split; none if it has no setting `split` or the user gave one."""
        field = type(self._env.config.taskset).model_fields.get("split")
        if field is None or "split" in self._taskset_settings:
            return []
        wanted = ["train"] if split == "train" else list(EVAL_SPLITS)
        offered = getattr(field.annotation, "__args__", ())
        return [name for name in wanted if name in offered] or wanted

    def _read_taskset(self, taskset: Any) -> Iterator[Any]:
        try:
            yield from taskset if taskset.bounded else islice(taskset, self._max_tasks)
        except Exception as error:  # an environment is somebody's Python package; its data may come from anywhere
            raise TaskError(f"{self._target}: its tasks cannot be read: {describe_error(error)}") from error

    async def _prepare_harnesses(self) -> None:
        runtimes = importlib.import_module("verifiers.v1.runtimes")
        for role, spec in self._env._agent_specs.items():  # noqa: SLF001
            if spec.runtime.type != "subprocess":
                continue
            harness = self._env._harnesses[role]  # noqa: SLF001
            if harness.NEEDS_CONTAINER:
                raise TaskError(
                    f"{self._target}: the harness {harness.config.id!r} of agent {role!r} needs a container: add "
                    f"env.{role}.runtime.type=docker, or env.{role}.harness.id=null for a plain chat with tools"
                )
            runtime = runtimes.make_runtime(spec.runtime)
            await runtime.start()
            try:
                await harness.setup(runtime)
            finally:
                await runtime.stop()

    def _connect(self, ep: AsyncEpisode, key: str) -> Any:
        """Return the environment for one episode: with several agents, each agent's calls are tagged with its name."""
        if self._alone:
            return self._env
        env = copy.copy(self._env)
        update = {
            role: spec.model_copy(update={"client": _make_client(ep, key, {AGENT_HEADER: role})})
            for role, spec in env._agent_specs.items()  # noqa: SLF001
            if spec.client is None
        }
        env.config = env.config.model_copy(update=update)
        return env

    def _score(self, ep: AsyncEpisode, episode: Any) -> Outcome:
        """Return the outcome of a whole rollout. Raises OutcomeError for a reward that is no finite number."""
        metrics: dict[str, float] = {}
        by_role: dict[str, list[float]] = {}
        for trace in episode.traces:
            role = trace.agent.name
            before = "" if self._alone else f"{role}."
            for name, part in trace.rewards.items():
                where = f"reward {name!r} of {self._target}"
                if part is None:
                    raise OutcomeError(f"{where} was not computed: it is None")
                metrics[before + name] = to_reward(where, part.score)
            for name, value in trace.metrics.items():
                if value is not None:
                    metrics[before + name] = to_finite_float(f"metric {name!r} of {self._target}", value)
            metrics |= {f"{before}turns": trace.num_turns, f"{before}truncated": float(trace.is_truncated)}
            by_role.setdefault(role, []).append(to_reward(f"the reward of {self._target}", trace.reward))
        stops = {"stop": ", ".join(str(trace.stop_condition) for trace in episode.traces)}
        for role, rewards in by_role.items():
            if max(rewards) != min(rewards):
                raise OutcomeError(
                    f"{self._target}: agent {role!r} played {len(rewards)} times in one rollout with different rewards "
                    f"({', '.join(f'{reward:g}' for reward in rewards)}), and an episode credits an agent once: let each "
                    "rollout play once, and the run's groups compare them (groups.group_size)"
                )
        if self._alone:
            return Outcome(reward=next(iter(by_role.values()))[0], metrics=metrics, metadata=stops)
        learning = {trace.agent.name for trace in episode.traces if trace.agent.trainable}
        self._refuse_fixed_agents(ep, by_role.keys() - learning)
        earned = {role: rewards[0] for role, rewards in by_role.items() if role in learning}
        if not earned:
            raise OutcomeError(f"{self._target}: none of the agents {', '.join(by_role)} is to be trained")
        mean = sum(earned.values()) / len(earned)
        by_policy: dict[str, dict[str, float]] = {}
        for role, reward in earned.items():
            spec = self._env._agent_specs[role]  # noqa: SLF001
            if spec.client is None:
                by_policy.setdefault(spec.model or ep.model, {})[role] = reward
        return Outcome(reward=mean, metrics=metrics, metadata=stops, agent_rewards=by_policy)

    def _refuse_fixed_agents(self, ep: AsyncEpisode, roles: Iterable[str]) -> None:
        """Raise OutcomeError if the calls of an agent that must not be trained went to the policy that is trained."""
        for role in roles:
            spec = self._env._agent_specs[role]  # noqa: SLF001
            if spec.client is None and (spec.model or ep.model) == ep.model and ep.mode == "train":
                raise OutcomeError(
                    f"{self._target}: agent {role!r} must not be trained, but its calls went to the trained policy "
                    f"{ep.model!r}: name a frozen policy of the run with env.{role}.model=NAME, or another endpoint with "
                    f"env.{role}.client.base_url=URL"
                )


def _make_client(ep: AsyncEpisode, key: str, headers: dict[str, str]) -> Any:
    configs = importlib.import_module("verifiers.v1.configs.client")
    return configs.EvalClientConfig(base_url=ep.base_url, api_key_var=key, headers=headers)


def _make_context(ep: AsyncEpisode, key: str) -> Any:
    clients, types = (importlib.import_module(f"verifiers.v1.{name}") for name in ("clients", "types"))
    return clients.ModelContext(client=_make_client(ep, key, {}), model=ep.model, sampling=types.SamplingConfig())


def _check(target: Target, episode: Any) -> None:
    """Raise unless the rollout and its scoring went through: OutcomeError for a broken reward, else RolloutError."""
    if episode.ok:
        return
    errors = [*episode.errors, *(error for trace in episode.traces if not trace.ok for error in trace.errors)]
    if not errors:
        raise RolloutError(f"{target}: the rollout did not end well, and verifiers gives no reason")
    last = errors[-1]
    what = f"{target}: {last.type}: {last.message}"
    if last.type == "TaskError" and any(words in last.message for words in CONVERSIONS):
        raise OutcomeError(f"{what} (a reward or metric must return a finite number)")
    raise RolloutError(what)


def _pass_on_working_directory() -> None:
    """Let tool servers, which are programs of their own, find the modules that this process finds here."""
    paths = [os.getcwd(), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]  # noqa: PTH109
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(os.path.abspath(path) for path in paths))  # noqa: PTH100


def _set_nested(settings: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        settings = settings.setdefault(name, {})
    settings[path[-1]] = value
