"""Settings that can change while a run is up, and the application of stored changes to a job. Pure.

A change stays in effect across restarts of every process. Once the setting is edited in the job file, the file's value takes
effect again.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from swarmq.config import SwarmJob, present_path
from swarmq.errors import ConfigError
from swarmq.messages import Change
from swarmq.task_mix import Stretch

MIX = ("mix", "mix_schedule")

LIVE = (
    *MIX,
    "kinds.*.group_size",
    "kinds.*.advantage",
    "kinds.*.max_tokens",
    "kinds.*.episode_tokens",
    "kinds.*.episode_calls",
    "groups.group_size",
    "groups.min_group",
    "groups.deadline_s",
    "groups.max_staleness",
    "groups.idle_timeout_s",
    "groups.when_dry",
    "groups.dry_after_s",
    "groups.uninformative_groups",
    "eval.every",
    "eval.k",
    "eval.deadline_s",
    "policies.*.sampling.temperature",
    "policies.*.sampling.max_tokens",
    "policies.*.train.advantage",
    "policies.*.train.ema_decay",
    "policies.*.train.critic.discount",
    "policies.*.train.critic.gae_lambda",
    "policies.*.train.critic.learning_rate",
    "policies.*.train.critic.value_clip",
    "policies.*.train.critic.warmup_steps",
    "policies.*.train.call_discount",
    "policies.*.train.length_penalty",
    "policies.*.train.overlong",
    "policies.*.train.loss.name",
    "policies.*.train.loss.ratio_cap",
    "policies.*.train.loss.mask_delta",
    "policies.*.train.loss.logratio_penalty",
    "policies.*.train.loss.clip_low",
    "policies.*.train.loss.clip_high",
    "policies.*.train.loss.dual_clip",
    "policies.*.train.loss.entropy_bonus",
    "policies.*.train.sft.share",
    "policies.*.train.sft.weight",
    "policies.*.train.normalisation",
    "policies.*.train.constant_length",
    "policies.*.train.row_k3_max",
    "policies.*.train.ratio_band",
    "policies.*.train.learning_rate",
    "policies.*.train.warmup_steps",
    "policies.*.train.schedule",
    "policies.*.train.schedule_steps",
    "policies.*.train.schedule_end",
    "policies.*.train.decay_steps",
    "policies.*.train.betas",
    "policies.*.train.weight_decay",
    "policies.*.train.grad_clip",
    "policies.*.train.max_steps",
    "policies.*.train.checkpoint_every",
)
"""Paths of the settings that can change while a run is up; `*` stands for one name."""


def is_live(path: str) -> bool:
    path = present_path(path)
    return any(fnmatchcase(path, pattern) and path.count(".") == pattern.count(".") for pattern in LIVE)


def policy_of_path(path: str) -> str | None:
    """Return the policy to which the setting at `path` belongs, or None if it belongs to the whole run."""
    first, _, rest = path.partition(".")
    return rest.partition(".")[0] if first == "policies" else None


def validate_changes(
    job: SwarmJob, settings: Mapping[str, Any], versions: Mapping[str, int], *, file: SwarmJob | None = None
) -> SwarmJob:
    """Return `job` with all of `settings`. `versions`: policy -> its present weight version. `file`: the job as loaded from the job
    file, if changes are in effect. Raises ConfigError, naming the setting, if one of them cannot be changed."""
    if not settings:
        raise ConfigError("nothing to set: name at least one setting, e.g. policies.main.train.learning_rate=1e-6")
    if shares := [path for path in settings if path.startswith("mix.")]:
        raise ConfigError(f"{shares[0]}: shares sum to 1, so set all of them at once: mix={{math = 0.6, code = 0.4}}")
    changed, known, loaded = change_job(job, settings), set(job.task_kinds), file or job
    for path, value in settings.items():
        if isinstance(value, str) and value in changed.own_methods - loaded.own_methods:
            raise ConfigError(
                f"{path}: the code of {value!r} is loaded when the run starts; put it into the job file and start again"
            )
        if not is_live(path):
            raise ConfigError(f"{path}: cannot change while the run is up; put it into the job file and start again")
        parts = path.split(".")
        if parts[0] == "policies" and parts[2] == "train" and not job.policies[parts[1]].trained:
            raise ConfigError(f"{path}: policy {parts[1]!r} is frozen, it has no learner")
        if unknown := set(_named_kinds(parts, changed)) - known:
            raise ConfigError(
                f"{path}: kind {min(unknown)!r} is unknown; the run has {', '.join(sorted(known))} "
                "(a new one needs [kinds.NAME] in the job file and a restart)"
            )
        if parts[-1] == "max_steps" and value and value <= versions.get(parts[1], 0):
            raise ConfigError(f"{path}: {value} is not after the present step {versions.get(parts[1], 0)}")
    if lacking := sorted(_list_critics(changed) - _list_critics(loaded)):
        raise ConfigError(
            f"{', '.join(settings)}: the learner of {lacking[0]!r} plans memory for the critic of 'gae' when it starts; put it into the "
            "job file and start again"
        )
    return changed


def _list_critics(job: SwarmJob) -> set[str]:
    """Return the policies that are trained with a critic."""
    return {policy for policy in job.trained if job.train_of(policy).needs_critic}


def change_job(job: SwarmJob, settings: Mapping[str, Any]) -> SwarmJob:
    """Return the job with other values of the settings at these paths. Raises ConfigError that names the setting."""
    tree = copy.deepcopy(msgspec.to_builtins(job))
    for path, value in settings.items():
        *sections, key = present_path(path).split(".")
        node = tree
        for depth, section in enumerate(sections):
            if section not in node and sections[:depth] == ["policies"]:
                raise ConfigError(f"{path}: there is no policy {section!r}; the job has {', '.join(node)}")
            node = node.get(section) if node.get(section) is not None else node.setdefault(section, {})
            if not isinstance(node, dict):
                what = "a value, not a section" if node is not None else "not set: give all of it at once"
                raise ConfigError(f"{path}: {'.'.join(sections[: depth + 1])} is {what}")
        node[key] = msgspec.to_builtins(value)
    return SwarmJob.build(tree, origin="set")


def diff_settings(
    before: SwarmJob, after: SwarmJob, file: SwarmJob, paths: Iterable[str], *, number: int, **when: Any
) -> list[Change]:
    """Return the settings at `paths` that differ between two jobs, as changes.

    `file`: the job as loaded from the job file. `number`: serial number of the control state that introduces the changes.
    `when`: values of `from_step` and `from_grant`, for changes of the task mix.
    """
    found = []
    for path in paths:
        old, new = value_at(before, path), value_at(after, path)
        if old != new:
            timing = when if path in MIX else {}
            found.append(Change(number=number, path=path, before=old, value=new, base=value_at(file, path), **timing))
    return found


def apply_changes(job: SwarmJob, changes: Sequence[Change]) -> SwarmJob:
    """Return the job with the stored changes. Changes that the job file or this release no longer allows are skipped."""
    live = job
    for number in sorted({change.number for change in changes}):
        together = {one.path: one.value for one in changes if one.number == number and _holds(job, one)}
        with contextlib.suppress(ConfigError):
            live = change_job(live, together)
    return live


def find_reached_limits(job: SwarmJob, changes: Iterable[Change], steps: Mapping[str, int]) -> list[Change]:
    """Return the changes of `max_steps` that ended a policy although the job file would train it further.

    `steps`: trained policy -> number of steps done.
    """
    limits = {f"policies.{policy}.train.max_steps": (policy, done) for policy, done in steps.items()}
    return [
        change
        for change in changes
        if change.path in limits
        and _holds(job, change)
        and 0 < change.value <= limits[change.path][1]
        and not has_ended(job, *limits[change.path])
    ]


def has_ended(job: SwarmJob, policy: str, steps: int) -> bool:
    """Return whether a policy has made its last step after `steps` steps."""
    return 0 < job.policies[policy].train.max_steps <= steps


def mix_stretches(job: SwarmJob, changes: Sequence[Change], start: Callable[[Change], int]) -> tuple[Stretch, ...]:
    """Return the mix over the steps of the run; `start` gives the first step of a change."""
    mix, schedule = job.mix, job.mix_schedule
    found = [Stretch(from_step=0, mix=mix, schedule=schedule)]
    mix_changes = [change for change in changes if change.path in MIX and _holds(job, change)]
    for number in sorted({change.number for change in mix_changes}):
        together = {change.path: change for change in mix_changes if change.number == number}
        tree = {"mix": mix, "mix_schedule": schedule} | {path: change.value for path, change in together.items()}
        try:
            checked = change_job(job, tree)
        except ConfigError:
            continue
        mix, schedule = checked.mix, checked.mix_schedule
        found.append(Stretch(from_step=max(map(start, together.values())), mix=mix, schedule=schedule))
    return tuple(found)


def value_at(job: SwarmJob, path: str) -> Any:
    """Return the setting at `path` as plain data, or None if it does not exist."""
    node = msgspec.to_builtins(job)
    for part in present_path(path).split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return node


def format_value(value: Any) -> str:
    """Return a value from `value_at` as text for display."""
    return "not set" if value is None else str(value)


def _holds(file: SwarmJob, change: Change) -> bool:
    """Return whether the change is still in effect: the job file has the same value as when the change was made."""
    return bool(value_at(file, change.path) == change.base)


def _named_kinds(parts: Sequence[str], changed: SwarmJob) -> Iterable[str]:
    if parts[0] == "kinds":
        return [parts[1]]
    if parts[0] == "mix":
        return changed.mix
    if parts[0] == "mix_schedule" and changed.mix_schedule:
        return [kind for point in changed.mix_schedule.points for kind in point.mix]
    return []
