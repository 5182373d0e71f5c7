"""Transfer methods of a weight push, and the choice among them:

same GPU       ipc       a buffer of the learner that the engine opens: no copy leaves the GPU
other GPUs     nccl      the same buffer, broadcast to all workers of the engine, on this host or another
anything else  adapters  a file of the adapters; the engine has the base weights in its served folder
               file      all weights, without adapters or if the engine serves another folder

Files are in shared memory if the engine runs on this host, else on a shared disk. If a weight receiver runs beside the engine, they
are sent to it instead: methods `http_adapters` and `http` (http_transfer.py). `file` or `http` is also the fallback if another
method fails.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import shutil
import socket
import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from swarmq.errors import EngineError
from swarmq.hosts.addresses import is_loopback, replace_port
from swarmq.runtime.processes import find_free_port
from swarmq.weights.format import adapter_file, cuda_ipc, nccl_group
from swarmq.weights.format.packing import (
    CPU,
    NamedTensors,
    PackedLayout,
    Tensors,
    Weight,
    cast,
    checksum_buffer,
    checksum_file,
    get_stored_tensor,
    materialize,
)
from swarmq.weights.format.scratch import SHARED_MEMORY, has_room, make_scratch_folder, remove_leftovers
from swarmq.weights.push.engine_control import EngineControl, Payload, WorkerFacts

T = TypeVar("T")


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """Transfer methods for one engine; the first that works is used."""

    methods: tuple[str, ...]
    reason: str
    dtype: str | None = None
    """Dtype in which floating-point weights are sent; None: unchanged."""
    workers: tuple[int, ...] = ()
    """Process ids of the engine's workers."""
    nccl: tuple[str, ...] = ()
    """Distinct NCCL versions of the workers."""
    receiver: str = ""
    """URL of the weight receiver on the engine's host; "" if there is none."""


class Transfer(Protocol):
    """A method by which tensors reach engines."""

    async def prepare(self, engine: EngineControl, route: Route) -> None:
        """Do what the method needs from an engine before it is paused, such as a rendezvous. Raises EngineError."""

    def publish(self, tensors: Tensors, version: int, dtype: str | None) -> Payload:
        """Publish the tensors for engines. Raises EngineError if there is no room."""

    def withdraw(self) -> None:
        """Free the memory or files that `publish` holds. Called after all engines are done."""


def choose_route(url: str, facts: Sequence[WorkerFacts], own_gpu: str, *, has_adapters: bool = False) -> Route:
    """Choose the route for an engine with these workers. `own_gpu`: the learner's GPU, or ""; `has_adapters`: whether adapters
    are trained."""
    dtypes = {worker.dtype for worker in facts}
    gpus = [worker.gpu for worker in facts]
    port = max((worker.receiver_port for worker in facts), default=0)
    adapters, whole = ("http_adapters", "http") if port else ("adapters", "file")
    methods, reason = _choose_methods(url, gpus, own_gpu)
    return Route(
        methods=(*methods, adapters, whole) if has_adapters else (*methods, whole),
        reason=reason,
        dtype=dtypes.pop() if len(dtypes) == 1 else None,
        workers=tuple(worker.pid for worker in facts),
        nccl=tuple(sorted({worker.nccl for worker in facts})),
        receiver=replace_port(url, port) if port else "",
    )


def _choose_methods(url: str, gpus: Sequence[str], own_gpu: str) -> tuple[tuple[str, ...], str]:
    if not gpus:
        return (), "the engine does not say where it runs"
    if not own_gpu:
        return (), "the learner has no GPU"
    if set(gpus) == {own_gpu}:
        return ("ipc",), "engine and learner share a GPU"
    if own_gpu in gpus:
        return (), "the engine spans the learner's GPU and others"
    if not all(gpus):
        return (), "the engine has no GPU"
    return ("nccl",), f"the engine has GPUs of its own on {'this' if is_loopback(url) else 'another'} host"


def deduplicate(named_tensors: NamedTensors) -> Tensors:
    """Return the tensors by name; of several names for one tensor (a tied head) only the first."""
    tensors: dict[str, Weight] = {}
    seen: set[tuple[int, torch.Size, tuple[int, ...]]] = set()
    for name, weight in named_tensors:
        tensor = get_stored_tensor(weight)
        if isinstance(tensor, torch.Tensor):
            place = (tensor.data_ptr(), tensor.shape, tensor.stride())
            if place in seen:
                continue
            seen.add(place)
        tensors[name] = weight.detach() if isinstance(weight, torch.Tensor) else weight
    return tensors


class FileTransfer:
    """Transfer by a safetensors file. The file is not synced, because a learner pushes again after a crash."""

    def __init__(self, engine_urls: Sequence[str], folder: Path) -> None:
        """`folder`: folder that engines on other hosts also see."""
        local = all(is_loopback(url) for url in engine_urls)
        self._parent = SHARED_MEMORY if local and os.access(SHARED_MEMORY, os.W_OK) else folder
        self._fallback = folder
        self._scratch: list[Path] = []

    async def prepare(self, engine: EngineControl, route: Route) -> None:
        pass

    def publish(self, tensors: Tensors, version: int, dtype: str | None) -> Payload:
        placed = {name: cast(materialize(weight), CPU, dtype).contiguous() for name, weight in tensors.items()}
        return _make_payload("path", self._write_file(placed, version), _sum_size_bytes(placed))

    def withdraw(self, keep: Collection[Path] = ()) -> None:
        """Delete the files, except those in `keep`."""
        for folder in self._scratch:
            if not any(path.parent == folder for path in keep):
                shutil.rmtree(folder, ignore_errors=True)
        self._scratch = [folder for folder in self._scratch if folder.exists()]

    def _write_file(
        self, placed: dict[str, torch.Tensor], version: int, metadata: dict[str, str] | None = None
    ) -> Path:
        """Write a file and return its path. Raises EngineError, and then leaves no file behind."""
        folder = self._new_folder(_sum_size_bytes(placed))
        path = folder / f"{version}.safetensors"
        try:
            save_file(placed, path, metadata)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise EngineError(f"weights cannot be written to {path}: {error}; free space there") from error
        return path

    def _new_folder(self, size_bytes: int) -> Path:
        try:
            folder = make_scratch_folder(self._choose_parent(size_bytes))
        except OSError as error:
            raise EngineError(
                f"no folder for weights can be created in {self._parent} or {self._fallback}: {error}; give this user write permission there"
            ) from error
        self._scratch.append(folder)
        return folder

    def _choose_parent(self, size_bytes: int) -> Path:
        for parent in (self._parent, self._fallback):
            parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(parent)
            if has_room(parent, size_bytes):
                return parent
        raise EngineError(
            f"no room for {size_bytes >> 20} MiB of weights in {self._parent} or {self._fallback}: free space there"
        )


class AdapterTransfer(FileTransfer):
    """Transfer by a file of adapters alone. An engine that serves another folder refuses it before its model is touched."""

    def __init__(self, engine_urls: Sequence[str], folder: Path) -> None:
        super().__init__(engine_urls, folder)
        self._base = adapter_file.BaseChecksums()

    def publish(self, tensors: Tensors, version: int, dtype: str | None) -> Payload:
        parts, metadata = adapter_file.split_weights(tensors, dtype, self._base)
        path = self._write_file(parts, version, metadata)
        read = sum(tensor.shape.numel() * tensor.dtype.itemsize for tensor in tensors.values())
        return _make_payload("adapters", path, read)  # the engine reads about as much from its folder


def _make_payload(method: str, path: Path, size_bytes: int) -> Payload:
    checksum = checksum_file(path)
    return Payload(update_info={method: str(path), "checksum": checksum}, checksum=checksum, size_bytes=size_bytes)


def _sum_size_bytes(placed: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in placed.values())


class StagingBuffer:
    """A reused buffer on the learner's GPU, which other processes may still have open when the next push begins.

    If ranks shard the policy, its weights are in host memory and the next step needs the whole GPU, so the buffer is freed after
    each push. torch keeps memory that another process still has open.
    """

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None
        self._frees_after_push = False
        """Whether the present push frees its buffer at its end."""

    def pack(self, tensors: Tensors, dtype: str | None) -> tuple[torch.Tensor, dict[str, Any]]:
        """Copy the weights into the buffer and return it with the facts that receivers need. Raises EngineError if the GPU has
        no room."""
        plan = PackedLayout.of(tensors, getattr(torch, dtype) if dtype else torch.float32)
        if self._buffer is None or self._buffer.numel() != plan.size_bytes:
            self._buffer = None
            try:
                self._buffer = torch.empty(plan.size_bytes, dtype=torch.uint8, device="cuda")
            except torch.OutOfMemoryError as error:
                raise EngineError(f"the GPU has no room for {plan.size_bytes >> 20} MiB of weights to send") from error
        self._frees_after_push = all(each.device.type == "cpu" for each in tensors.values())
        plan.pack(tensors, self._buffer)
        torch.cuda.synchronize()
        return self._buffer, {"tensors": plan.entries, "checksum": checksum_buffer(self._buffer)}

    def withdraw(self) -> None:
        if self._frees_after_push:
            self._buffer = None


class IpcTransfer:
    """Transfer by CUDA IPC: engines on the learner's GPU open its buffer and copy from it."""

    def __init__(self, staging: StagingBuffer) -> None:
        self._staging = staging

    async def prepare(self, engine: EngineControl, route: Route) -> None:
        pass

    def publish(self, tensors: Tensors, version: int, dtype: str | None) -> Payload:  # noqa: ARG002 - the engine's label names the version
        buffer, facts = self._staging.pack(tensors, dtype)
        info = {"handle": cuda_ipc.export_handle(buffer), **facts}
        return Payload(update_info=info, checksum=facts["checksum"], size_bytes=buffer.numel())

    def withdraw(self) -> None:
        self._staging.withdraw()


class NcclTransfer:
    """Transfer by NCCL, with one group per engine, created again after an engine's restart or a failed broadcast."""

    def __init__(self, staging: StagingBuffer) -> None:
        self._staging = staging
        self._groups: dict[str, tuple[tuple[int, ...], nccl_group.NcclGroup]] = {}

    async def prepare(self, engine: EngineControl, route: Route) -> None:
        own = nccl_group.get_nccl_version()
        if not own or route.nccl != (own,):  # a rendezvous without the peer would never end
            raise EngineError(
                f"learner and engine {engine.url} have different versions of NCCL ({own or 'none'}, {', '.join(route.nccl) or 'none'}): "
                "set VLLM_NCCL_SO_PATH to the same library for both, one that vLLM can use"
            )
        workers, group = self._groups.get(engine.url, ((), None))
        if group is not None and workers == route.workers:
            return
        if group is not None:
            self._forget(engine.url)
        address = find_own_address(engine.url)
        world_size, port = 1 + len(route.workers), find_free_port(address)
        device = torch.device("cuda", torch.cuda.current_device())
        joining = _run_in_daemon_thread(
            partial(
                nccl_group.join_group,
                address,
                port,
                rank=nccl_group.LEARNER_RANK,
                world_size=world_size,
                device=device,
            )
        )
        try:
            await engine.rendezvous(address=address, port=port, world_size=world_size)
            self._groups[engine.url] = (route.workers, await asyncio.wait_for(joining, nccl_group.RENDEZVOUS_TIMEOUT_S))
        except TimeoutError as error:
            raise EngineError(
                f"learner and engine {engine.url} did not meet at {address}:{port} within "
                f"{nccl_group.RENDEZVOUS_TIMEOUT_S} s: can the engine's host reach this one?"
            ) from error
        finally:
            joining.cancel()

    def publish(self, tensors: Tensors, version: int, dtype: str | None) -> Payload:  # noqa: ARG002 - the engine's label names the version
        buffer, facts = self._staging.pack(tensors, dtype)

        def send(url: str, timeout_s: float) -> None:
            try:
                self._groups[url][1].broadcast(buffer, timeout_s=timeout_s)
            except EngineError:
                self._forget(url)
                raise

        return Payload(update_info=facts, checksum=facts["checksum"], size_bytes=buffer.numel(), send=send)

    def withdraw(self) -> None:
        self._staging.withdraw()

    def _forget(self, url: str) -> None:
        self._groups.pop(url)[1].destroy()


def _run_in_daemon_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Run `work` in a daemon thread, which is not awaited at exit: NCCL waits forever for a peer killed during the rendezvous,
    and `asyncio.run` waits for threads of `asyncio.to_thread`."""
    done: concurrent.futures.Future[T] = concurrent.futures.Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done.set_result(work())
        except Exception as error:
            done.set_exception(error)

    threading.Thread(target=run, name="rendezvous", daemon=True).start()
    return asyncio.wrap_future(done)


def find_own_address(url: str) -> str:
    """Return the IP address of this host from which packets to the host of `url` leave. Raises EngineError if there is no route."""
    parts = urlsplit(url)
    try:
        family, kind, _, _, place = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise EngineError(
            f"engine {url}: no way leads to its host ({error}); check the name and the network"
        ) from error
