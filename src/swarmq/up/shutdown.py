"""Stopping the processes of a run: how long each may take, and what the user is told about continuing."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Mapping

from swarmq import live_settings
from swarmq.collector import ledger
from swarmq.config import SwarmJob
from swarmq.engine.server.model_check import fetch_num_parameters
from swarmq.errors import SwarmqError
from swarmq.learner.memory.estimate import MOMENTS_BYTES, WHOLE_BYTES
from swarmq.learner.store.batch_log import scan_log
from swarmq.up.supervision import Daemon

DRAIN_S = {"learner": 60.0, "collector": 30.0, "proxy": 15.0}
"""Role -> maximum seconds that a process may take to stop; a learner gets time for its checkpoints in addition."""
SLOW_DISK_BYTES_PER_S = 100e6
"""Write speed of the slowest disk for which the time to stop allows a checkpoint."""
MAX_DRAIN_S = 1800.0


async def stop_daemon(daemon: Daemon, grace_s: float, report: Callable[[str], None]) -> None:
    """Ask a daemon to stop, and kill it after `grace_s` seconds. `report` gets lines about a learner, which takes longest."""
    if daemon.process is None or daemon.process.returncode is not None or not daemon.is_learner:
        await daemon.stop(grace_s)
        return
    report(
        f"{daemon.name}: stopping, with {grace_s:.0f} s to write its checkpoint; Ctrl-C again stops without a checkpoint"
    )
    if await daemon.stop(grace_s) == -signal.SIGKILL:
        report(
            f"{daemon.name}: killed after its time to stop; steps since its newest checkpoint will be repeated from the batch log"
        )


def drain_s(job: SwarmJob, name: str) -> float:
    """Return the seconds that the process `name` may take to stop. A learner gets time for two checkpoints on a slow disk: the one
    being written and the last one."""
    role, _, policy = name.partition(".")
    if role != "learner":
        return DRAIN_S[role]
    parameters = 0
    with contextlib.suppress(SwarmqError):  # the learner reports it as well
        parameters = fetch_num_parameters(job.policies[policy].model)
    two_bytes = 2 * (WHOLE_BYTES + MOMENTS_BYTES) * parameters
    return min(DRAIN_S[role] + two_bytes / SLOW_DISK_BYTES_PER_S, MAX_DRAIN_S)


def describe_stopped_run(job: SwarmJob) -> str:
    """Return the message for a stopped run: how to continue it, and after which step."""
    if not job.run_folder.job.exists():
        return "stopped"
    steps = {policy: read_last_step(job, policy) for policy in job.trained}
    ended = describe_ended_policies(job, steps)
    unfinished = {policy: step for policy, step in steps.items() if policy not in ended}
    if not unfinished:
        then = "serves its weights again"
    elif not any(steps.values()):
        then = "continues"
    elif len(steps) == 1:
        then = f"continues after step {next(iter(unfinished.values()))}"
    else:
        then = f"continues after step{'s' if len(unfinished) > 1 else ''} " + ", ".join(
            f"{step} ({policy})" for policy, step in unfinished.items()
        )
    return ". ".join([f"stopped. `swarmq up {job.run_folder.job}` {then}", *ended.values()])


def describe_ended_policies(job: SwarmJob, steps: Mapping[str, int]) -> dict[str, str]:
    """Return for each policy that has made its last step how to train it further. `steps` maps trained policies to the steps
    they have made."""
    folder = job.run_folder
    changes = ledger.read_changes(folder.inbox)
    now, lifted = (
        live_settings.apply_changes(job, changes),
        {one.path for one in live_settings.find_reached_limits(job, changes, steps)},
    )
    messages = {}
    for policy, step in steps.items():
        path = f"policies.{policy}.train.max_steps"
        command = f"swarmq resume {folder.path}" if path in lifted else f"swarmq set {folder.path} {path}=0"
        if live_settings.has_ended(now, policy, step):
            messages[policy] = (
                f"{policy} has made its last step, {step}; to train further while the run is up: `{command}`"
            )
    return messages


def read_last_step(job: SwarmJob, policy: str) -> int:
    """Return a policy's last trained step; 0 if there is none or its batch log cannot be read."""
    with contextlib.suppress(SwarmqError):  # the next start reports it
        indices = (place.index for place in reversed(scan_log(job.run_folder.batch_log(policy))))
        return next((index.version for index in indices if index.trained), 0)
    return 0
