"""Checks of a job before anything starts: whether it can run on this host. A refusal names the path of the setting."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from swarmq.broker.node.files import check_disk
from swarmq.config import SwarmJob, resolve_amqp_url
from swarmq.engine.server.gpus import GpuCapacity, find_visible_gpus
from swarmq.engine.server.launch import is_cuda_build
from swarmq.errors import ConfigError, MissingExtraError
from swarmq.proxy.http_errors import RefusedError
from swarmq.up.job_checks import plan_run

SETTING = re.compile(r"(?:(?:job|set): )?([a-z]\w*(?:\.[\w*-]+|\[\d+\])*)(?=[: ])")
"""Pattern of the path with which messages about settings begin."""
OWN_MACHINE = "127.0.0.1"


class CheckedJob(NamedTuple):
    """A job that this host can run."""

    job: SwarmJob
    """The job with the host's own folder and address."""
    num_gpus: int
    lines: tuple[str, ...]
    """Placement, context limits and warnings."""


class JobCheck:
    """Checks whether jobs can run on this host, and how."""

    def __init__(self, folder: Path, gpus: Sequence[GpuCapacity], *, address: str = OWN_MACHINE) -> None:
        """`folder`: parent of the run folders. `address`: host name or address by which clients reach this host."""
        self._folder, self._address = folder, address
        self.gpus = [msgspec.structs.replace(gpu, free=gpu.total) for gpu in gpus]
        """The GPUs as they are when no run uses them."""

    def check(self, tree: Mapping[str, Any], *, gpus: int | None, is_admin: bool) -> CheckedJob:
        """Return the job as this host runs it. Raises SwarmqError if it cannot run here; changes nothing.

        `gpus`: number of GPUs that it gets; None: all. `is_admin`: whether the job may run programs of its own.
        """
        job = self._adapt(SwarmJob.build(dict(tree), origin="job"))
        if not is_admin:
            _check_programs(job)
        for path, named in job.list_files():
            if not Path(named).expanduser().exists():
                raise ConfigError(
                    f"{path}: there is no {named} on host {socket.gethostname()}, where the run would be: copy it there first"
                )
        if resolve_amqp_url(job.broker) is None:
            check_disk(self._folder)
        num_gpus = self._count_gpus(gpus)
        lines: list[str] = []
        plan_run(job, lines.append, find_gpus=lambda: self.gpus[:num_gpus])
        return CheckedJob(job, num_gpus, tuple(lines))

    def _adapt(self, job: SwarmJob) -> SwarmJob:
        default = next(field.default for field in msgspec.structs.fields(SwarmJob) if field.name == "folder")
        if job.folder not in {default, str(self._folder)}:
            raise ConfigError(
                f"folder: this host keeps its runs in {self._folder}: remove the setting (got {job.folder!r})"
            )
        host = self._address if job.proxy.host == OWN_MACHINE else job.proxy.host
        return msgspec.structs.replace(
            job, folder=str(self._folder), proxy=msgspec.structs.replace(job.proxy, host=host)
        )

    def _count_gpus(self, wanted: int | None) -> int:
        if wanted is not None and wanted > len(self.gpus):
            raise RefusedError(f"gpus: this host has {len(self.gpus)}, {wanted} are wanted", param="gpus")
        return len(self.gpus) if wanted is None else wanted


def find_host_gpus() -> list[GpuCapacity]:
    """Return the GPUs on which this host's vLLM and torch can run."""
    with contextlib.suppress(MissingExtraError):
        return find_visible_gpus() if is_cuda_build() else []
    return []


def find_setting(message: str) -> str | None:
    """Return the path of the setting with which a message about settings begins; None if it begins otherwise."""
    found = SETTING.match(message)
    return found[1] if found and found[1].partition(".")[0] in SwarmJob.__struct_fields__ else None


def _check_programs(job: SwarmJob) -> None:
    """Raise RefusedError if the job names programs, arguments of programs, or a folder with code, that run on the host."""
    named: dict[str, object] = {"alerts.command": job.alerts.command}
    named["methods_folder"] = job.methods_folder
    for name, policy in job.policies.items():
        named[f"policies.{name}.engine.arguments"] = policy.engine.arguments
        named[f"policies.{name}.train.launcher"] = policy.train.launcher
    for path, value in named.items():
        if value:
            raise RefusedError(
                f"{path}: runs programs or code of your choice on the host, which needs a token with the role admin",
                status=403,
                code="role_missing",
                param=path,
            )
