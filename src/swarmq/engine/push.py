"""The learner's side of a weight push: write the weights once, then have every engine of the policy load them at once.

    named tensors --Transfer.publish--> update info --EngineControl.update--> engine 0, engine 1, ...

How the tensors travel is a `Transfer`; how an engine is led through the update is control.py's business. A trainer is
not asynchronous, so neither is this.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import msgspec
import structlog
import torch
from safetensors.torch import save_file

from swarmq.engine.control import EngineControl, Timeouts
from swarmq.errors import EngineError, EngineRefusedError

log = structlog.get_logger()

Outcome = dict[str, float | EngineError]
"""Engine url -> its pause in seconds, or why it did not take the push."""

NamedTensors = Iterable[tuple[str, torch.Tensor]]

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - a folder of our own, mode 0700, is made in it
FOLDER_PREFIX = "swarmq-weights-"
RETRY_S = 1.0


class PushReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a push took. `pause_s` is the longest that any engine's agents waited."""

    version: int
    write_s: float = 0.0
    pause_s: float = 0.0
    pauses: dict[str, float] = {}
    """Engine url -> its own."""
    total_s: float = 0.0
    failed: dict[str, str] = {}
    """Engine url -> why it does not serve this version. `ensure` brings them up to date when they are back."""


class Transfer(Protocol):
    """A way for tensors to reach engines."""

    def publish(self, named_tensors: NamedTensors, version: int) -> Mapping[str, Any]:
        """Make the tensors ready and say, in the engine backend's words, where they are."""

    def withdraw(self) -> None:
        """Every engine has been asked: free what `publish` holds."""


class FileTransfer:
    """A safetensors file, in shared memory when every engine is on this host, else in `folder`, which all must see.

    It need not survive anything and is not synced: who comes back after a crash pushes again.
    """

    def __init__(self, engine_urls: Sequence[str], folder: Path) -> None:
        local = all(_is_loopback(url) for url in engine_urls)
        self._parent = SHARED_MEMORY if local and os.access(SHARED_MEMORY, os.W_OK) else folder
        self._fallback = folder
        self._scratch: Path | None = None

    def publish(self, named_tensors: NamedTensors, version: int) -> Mapping[str, Any]:
        tensors = _distinct(named_tensors)
        size_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self.withdraw()
        self._scratch = _scratch_folder(self._roomy(size_bytes))
        path = self._scratch / f"{version}.safetensors"
        save_file(tensors, path)
        return {"path": str(path)}

    def withdraw(self) -> None:
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None

    def _roomy(self, size_bytes: int) -> Path:
        for parent in (self._parent, self._fallback):
            parent.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(parent)
            if shutil.disk_usage(parent).free > size_bytes + (64 << 20):
                return parent
        raise EngineError(
            f"no room for {size_bytes >> 20} MiB of weights in {self._parent} or {self._fallback}: free some"
        )


class WeightPusher:
    """Keeps the engines of one policy at the learner's version."""

    def __init__(
        self,
        engine_urls: Sequence[str],
        folder: Path,
        *,
        transfer: Transfer | None = None,
        timeouts: Timeouts | None = None,
        patience_s: float = 180.0,
        current: Callable[[], Sequence[str]] | None = None,
    ) -> None:
        """`patience_s`: how long to wait for an engine to come back when none takes the push (one that died is being
        started again, and there is nothing to learn from without any). `current` gives the engines of each moment,
        where they come and go; `engine_urls` are those of the beginning."""
        self._current = current or (lambda: engine_urls)
        self._transfer = transfer or FileTransfer(engine_urls, folder)
        self._timeouts = timeouts or Timeouts()
        self._patience_s = patience_s

    def push(self, named_tensors: NamedTensors, version: int) -> PushReport:
        """Serve these weights as `version` everywhere. Raises EngineError when not one engine took them."""
        return self._run(named_tensors, version, self._current())

    def ensure(self, named_tensors: NamedTensors, version: int) -> PushReport:
        """Push to the engines that do not serve `version` (started again, left paused, or in doubt); often to none."""
        behind = asyncio.run(self._behind(version))
        return self._run(named_tensors, version, behind) if behind else PushReport(version=version)

    def _run(self, named_tensors: NamedTensors, version: int, urls: Sequence[str]) -> PushReport:
        began = time.perf_counter()
        try:
            update_info = self._transfer.publish(named_tensors, version)
            write_s = time.perf_counter() - began
            outcome = asyncio.run(self._update(urls, update_info, version))
        finally:
            self._transfer.withdraw()
        pauses = {url: pause for url, pause in outcome.items() if isinstance(pause, float)}
        return PushReport(
            version=version,
            write_s=write_s,
            pause_s=max(pauses.values()),
            pauses=pauses,
            total_s=time.perf_counter() - began,
            failed={url: str(error) for url, error in outcome.items() if isinstance(error, EngineError)},
        )

    async def _update(self, urls: Sequence[str], update_info: Mapping[str, Any], version: int) -> Outcome:
        deadline = time.monotonic() + self._patience_s
        while True:
            async with asyncio.TaskGroup() as tasks:
                pushes = {url: tasks.create_task(self._update_one(url, update_info, version)) for url in urls}
            outcome = {url: push.result() for url, push in pushes.items()}
            failures = [result for result in outcome.values() if isinstance(result, EngineError)]
            if len(failures) < len(outcome):
                return outcome
            refused = any(isinstance(error, EngineRefusedError) for error in failures)
            if refused or time.monotonic() > deadline:
                raise EngineError(f"no engine took version {version}: {failures[0]}") from failures[0]
            await asyncio.sleep(RETRY_S)  # nothing tells when a server that is gone is back

    async def _update_one(self, url: str, update_info: Mapping[str, Any], version: int) -> float | EngineError:
        try:
            async with EngineControl(url, timeouts=self._timeouts) as engine:
                return await engine.update(update_info, version)
        except EngineError as error:
            log.warning("weights not taken", engine=url, version=version, reason=str(error))
            return error

    async def _behind(self, version: int) -> tuple[str, ...]:
        async with asyncio.TaskGroup() as tasks:
            asked = {url: tasks.create_task(self._is_at(url, version)) for url in self._current()}
        return tuple(url for url, at in asked.items() if not at.result())

    async def _is_at(self, url: str, version: int) -> bool:
        try:
            async with EngineControl(url, timeouts=self._timeouts) as engine:
                status = await engine.status()
        except EngineError:
            return False
        return status.version == version and not status.paused


def _distinct(named_tensors: NamedTensors) -> dict[str, torch.Tensor]:
    """Contiguous tensors on the CPU by name; of several names for one tensor (a tied head) the first."""
    tensors: dict[str, torch.Tensor] = {}
    seen: set[tuple[int, torch.Size]] = set()
    for name, tensor in named_tensors:
        place = (tensor.data_ptr(), tensor.shape)
        if place not in seen:
            seen.add(place)
            tensors[name] = tensor.detach().to("cpu").contiguous()
    return tensors


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _scratch_folder(parent: Path) -> Path:
    """A new folder that this user alone can read; its name says which process made it."""
    return Path(tempfile.mkdtemp(dir=parent, prefix=f"{FOLDER_PREFIX}{os.getpid()}-"))


def _remove_leftovers(parent: Path) -> None:
    """Delete what pushers left that were killed: shared memory is not freed by their end."""
    for folder in parent.glob(f"{FOLDER_PREFIX}*"):
        pid = folder.name.removeprefix(FOLDER_PREFIX).partition("-")[0]
        if pid.isdecimal() and not _is_running(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
