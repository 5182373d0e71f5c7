"""What a trial is: all that its result depends on, hashed. Two trials with equal hashes are one trial.

Settings of a job are compared as they take effect, so an arm that sets a default is the same as an arm that leaves it out.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path, PurePath
from typing import Any, Literal, NamedTuple

import msgspec

from swarmq.config import SwarmJob, is_model_path
from swarmq.environments import Split, is_environment
from swarmq.errors import ConfigError, StudyError, SwarmqError, TaskError
from swarmq.learner.store.durable_files import sha256
from swarmq.studies.records import Trial
from swarmq.studies.study import Arm, Study, hash_json
from swarmq.version import __version__
from swarmq.whole_run.plan import read_data


class Inputs(NamedTuple):
    """Hashes of all that a result depends on, apart from the seed and the steps."""

    settings: str
    """Settings as they take effect, and the agent."""
    code: str
    data: str
    model: str


class TrialMaker:
    """Maker of a study's trials, from the files beside the study file as they are when it first needs them: a file that is
    edited while a leader runs must not make other trials of those that are planned."""

    def __init__(self, study: Study, root: Path) -> None:
        self._study, self._root = study, root
        self._arms = study.arms or {"": Arm()}
        self._inputs: dict[str, Inputs] = {}

    def make(
        self,
        arm: str,
        plan: Arm,
        seed: int,
        *,
        rung: int = 0,
        purpose: Literal["compare", "noise"] = "compare",
    ) -> Trial:
        """Return the trial of an arm and seed. Raises ConfigError for settings that a job refuses, and for missing files."""
        study = self._study
        settings, agent = study.settings | plan.settings, plan.agent or study.trial.agent
        tasks = plan.tasks or study.trial.tasks
        inputs = self._read_inputs(settings, agent, tasks, plan.files)
        lineage = hash_lineage(inputs, seed, purpose)
        steps = study.design.rungs[rung] if study.design.rungs else 0
        return Trial(
            id=hash_json([lineage, steps]),
            arm=arm,
            seed=seed,
            settings=settings,
            agent=agent,
            tasks=tasks,
            steps=steps,
            rung=rung,
            lineage=lineage,
            purpose=purpose,
            code=inputs.code,
            data=inputs.data,
            model=inputs.model,
            files=plan.files,
        )

    def find_lineage(self, trial: Trial) -> str:
        """Return the lineage of a trial with the files that are here, or "" if they make no such trial. It is the trial's own if the
        files are those that the trial was planned with."""
        if self.find_problem(trial):
            return ""
        inputs = self._read_inputs(trial.settings, trial.agent, trial.tasks, trial.files)
        return hash_lineage(inputs, trial.seed, trial.purpose)

    def find_problem(self, trial: Trial) -> str:
        """Return why the files that are here make no trial like this one, or "" if they make one, be it another."""
        try:
            self._read_inputs(trial.settings, trial.agent, trial.tasks, trial.files)
        except SwarmqError as error:
            return str(error)
        return ""

    def hash_inputs(self) -> str:
        """Return the hash of the settings, code, tasks and models of all arms."""
        return hash_json([(name, self.make(name, arm, 0).lineage) for name, arm in self._arms.items()])

    def list_files(self, trials: Iterable[Trial]) -> dict[str, Path]:
        """Return the files below the study's folder that these trials depend on, by their path there. Trials from before an amendment
        may depend on what is no longer there, and add no files."""
        files = sorted({file for path in self._find_inputs(trials) for file in _walk(path)})
        return {name: file for file in files if (name := self._name(file))}

    def list_outside(self) -> list[str]:
        """Return the files and folders outside the study's folder that trials depend on, relative to it where the study names them so."""
        return sorted(self._show(path) for path in self._find_inputs(self._make_first()) if not self._name(path))

    def find_unlisted(self, modules: Iterable[Path]) -> list[str]:
        """Return which of these modules lie in the study's folder, but in no hash of a trial: an edit of them makes no other trial."""
        root, listed = self._root.resolve(), {file.resolve() for file in self.list_files(self._make_first()).values()}
        found = {file.resolve() for file in modules} - listed
        below = [file.relative_to(root) for file in found if file.is_relative_to(root)]
        return sorted(str(name) for name in below if "site-packages" not in name.parts)

    def _make_first(self) -> list[Trial]:
        """Return the trial of each arm of the study file with the first seed."""
        return [self.make(name, arm, self._study.seeds[0]) for name, arm in self._arms.items()]

    def _name(self, path: Path) -> str:
        """Return the path below the study's folder, or "" for one that is elsewhere."""
        name = self._show(path)
        return "" if PurePath(name).is_absolute() or ".." in PurePath(name).parts else name

    def _show(self, path: Path) -> str:
        return str(path.relative_to(self._root) if path.is_relative_to(self._root) else path)

    def _find_inputs(self, trials: Iterable[Trial]) -> set[Path]:
        """Return the files and folders that these trials depend on."""
        plan = self._study.trial
        found = {self._root / name for name in (plan.job, plan.held_out, *self._study.planner.files) if name}
        seen = {hash_json([one.settings, one.agent, one.tasks]): one for one in trials}
        for trial in seen.values():
            with contextlib.suppress(SwarmqError):
                _, models, methods = self._resolve(trial.settings)
                code = self._list_code(trial.agent, methods)
                found.update([*code, *(self._root / name for name in (trial.tasks, *models.values()) if name)])
        return {path for path in found if path.exists()}

    def _read_inputs(self, settings: Mapping[str, Any], agent: str, tasks: str, files: Mapping[str, str]) -> Inputs:
        """Return the hashes of a trial's inputs. Raises ConfigError for settings that a job refuses, and for missing files."""
        key = hash_json([settings, agent, tasks, files])
        if key not in self._inputs:
            effective, models, methods = self._resolve(settings)
            code = hash_json([__version__, _hash_files(self._list_code(agent, methods)), files])
            model = (
                hash_json({name: _hash_model(self._root, name, one) for name, one in models.items()}) if models else ""
            )
            self._inputs[key] = Inputs(hash_json([effective, agent]), code, self._hash_data(tasks), model)
        return self._inputs[key]

    def check(self) -> None:
        """Raise StudyError for arms that cannot be told apart, and for held-out tasks that are trained on or shown to the planner."""
        if (held_out := self._study.trial.held_out) and (found := self._find_shown(self._root / held_out)):
            raise StudyError(
                f"planner.files: {found!r} holds the held-out tasks, which no planner may see; leave it out"
            )
        seen: dict[str, str] = {}
        arms = {f"arms.{name}": arm for name, arm in self._study.arms.items()} or {"space": Arm()}
        for where, arm in arms.items():
            trial = self.make(where, arm, self._study.seeds[0])
            if other := seen.get(trial.id):
                raise StudyError(
                    f"{where}: cannot be told apart from {other}: settings, code, tasks and model are the same"
                )
            seen[trial.id] = where
            self._check_end(where, trial)
            self._check_leaks(trial.tasks)

    def _find_shown(self, held_out: Path) -> str:
        """Return the file of `planner.files` that is the one of the held-out tasks, or has its content, or ""."""
        files = [name for name in self._study.planner.files if held_out.is_file() and (self._root / name).is_file()]
        return next((name for name in files if hash_file(self._root / name) == hash_file(held_out)), "")

    def _check_end(self, where: str, trial: Trial) -> None:
        """Raise StudyError if the training of a trial would never end."""
        if self._study.trial.function or trial.steps:
            return
        job = SwarmJob.load(self._root / self._study.trial.job, sets=to_sets(trial.settings))
        if endless := [name for name in job.trained if not job.policies[name].train.max_steps]:
            raise StudyError(f"{where}: its training never ends; set policies.{endless[0]}.train.max_steps")

    def _check_leaks(self, tasks: str) -> None:
        held_out = self._study.trial.held_out
        if not (held_out and tasks):
            return
        trained = _hash_tasks(self._root, tasks, "train")
        if leaked := [
            one for one, digest in _hash_tasks(self._root, held_out, "eval").items() if digest in trained.values()
        ]:
            raise StudyError(
                f"trial.held_out: {len(leaked)} of its tasks are also in {tasks}, e.g. {leaked[0]!r}; hold them out of training"
            )

    def _resolve(self, settings: Mapping[str, Any]) -> tuple[Any, dict[str, str], list[Path]]:
        """Return the settings as they take effect, the model of each policy, and the files of the user's own methods."""
        plan = self._study.trial
        if plan.function:
            return [plan.function, settings], {}, []
        if not (self._root / plan.job).exists():
            raise ConfigError(
                f"trial.job: {self._root / plan.job}: no such file; `swarmq init` writes one to start from"
            )
        job = SwarmJob.load(self._root / plan.job, sets=to_sets(settings))
        tree = msgspec.to_builtins(job)
        for name in ("run", "folder", "methods_folder"):  # they differ between hosts, and change no result
            del tree[name]
        models = {name: policy.model for name, policy in job.policies.items()}
        folder = self._root / (job.methods_folder or "")
        return tree, models, [_find_module(folder, name) for name in sorted(job.own_methods)]

    def _list_code(self, agent: str, methods: Sequence[Path]) -> list[Path]:
        """Return the files and folders with the code of a trial."""
        plan = self._study.trial
        targets = [plan.function] if plan.function else [] if is_environment(agent) else [agent]
        modules = [_find_module(self._root, target) for target in targets]
        return [*modules, *methods, *(self._root / name for name in plan.code)]

    def _hash_data(self, tasks: str) -> str:
        named: list[tuple[str, Split]] = [(tasks, "train"), (self._study.trial.held_out, "eval")]
        return hash_json([sorted(_hash_tasks(self._root, name, split).values()) for name, split in named if name])


def hash_lineage(inputs: Inputs, seed: int, purpose: Literal["compare", "noise"]) -> str:
    """Return the hash that trials of one arm and seed share on all rungs. An A/A trial is no part of a comparison, also if an
    amendment gives its seed to the arms, so its hash is another one."""
    return hash_json([*inputs, seed, purpose])


def to_sets(settings: Mapping[str, Any]) -> list[str]:
    """Return settings by path as arguments of `--set`. TOML reads JSON's numbers, texts, booleans and lists."""
    return [f"{path}={json.dumps(value)}" for path, value in settings.items()]


def _hash_tasks(root: Path, name: str, split: Split) -> dict[str, str]:
    """Return id -> hash of the payload, without its id, for each task."""
    path = root / name
    return _read_tasks(str(path), split, *_stamp(path)) if path.exists() else _read_tasks(name, split, 0, 0)


@cache
def _read_tasks(name: str, split: Split, _modified_ns: int, _size: int) -> dict[str, str]:
    try:
        data = read_data(name, split)
    except TaskError as error:
        raise TaskError(f"{'trial.held_out' if split == 'eval' else 'tasks'}: {error}") from error
    return {task.id: hash_json(_without_id(msgspec.to_builtins(task.payload))) for task in data.tasks}


def _without_id(payload: Any) -> Any:
    return {k: v for k, v in payload.items() if k not in ("id", "task_id")} if isinstance(payload, dict) else payload


def _find_module(root: Path, target: str) -> Path:
    """Return the source file of the module in `module:function`."""
    module = target.partition(":")[0]
    own = root.joinpath(*module.split("."))
    for path in (own.with_suffix(".py"), own / "__init__.py"):
        if path.exists():
            return path
    sys.path.insert(0, str(root))
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        found = None
    finally:
        sys.path.remove(str(root))
    if found is None or not found.origin:
        raise ConfigError(f"{target}: there is no module {module!r} in {root} or on PYTHONPATH")
    return Path(found.origin)


def _hash_model(root: Path, policy: str, model: str) -> str:
    path = root / model
    if path.is_dir():
        return _hash_files([path])
    if is_model_path(model):
        raise ConfigError(f"policies.{policy}.model: {path}: no such folder; make or copy the model there")
    return model


def _hash_files(paths: Sequence[Path]) -> str:
    files = [file for path in paths for file in _walk(path)]
    return hash_json([(file.name, hash_file(file)) for file in files]) if files else ""


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file, which is read again once it has changed."""
    return _hash_content(path, *_stamp(path))


def _walk(path: Path) -> Iterator[Path]:
    if not path.exists():
        raise ConfigError(f"trial.code: {path}: no such file or folder")
    if path.is_dir():
        yield from (one for one in sorted(path.rglob("*")) if one.is_file() and "__pycache__" not in one.parts)
    else:
        yield path


def _stamp(path: Path) -> tuple[int, int]:
    found = os.stat(path)  # noqa: PTH116 - as in runtime/files.py
    return found.st_mtime_ns, found.st_size


@cache
def _hash_content(path: Path, _modified_ns: int, _size: int) -> str:
    return sha256(path)
