"""Runs inside vLLM: loads weights from the learner into the served model, in one of four ways:

    {"path": ..., "checksum": ...}       a safetensors file, in shared memory or on a shared disk
    {"adapters": ..., "checksum": ...}   a file of adapters alone, for the weights in the served folder
    {"handle": ..., "tensors": ..., "checksum": ...}   the learner's memory on the same GPU (CUDA IPC)
    {"tensors": ..., "checksum": ...}   a broadcast from the learner's GPU (NCCL), after a rendezvous

Updates are checked before the model is touched, and the model is changed in one call, so between two calls of the learner all
weights are old or all are new. A learner that dies leaves nothing in the engine but a communicator, which the next rendezvous
replaces.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from swarmq.weights.format import adapter_file, cuda_ipc, nccl_group
from swarmq.weights.format.conventions import UNTOUCHED
from swarmq.weights.format.packing import PackedLayout, Tensors, checksum_buffer, checksum_file, materialize
from swarmq.weights.format.served_folder import ServedFolder, Shape
from swarmq.weights.vllm_plugin import reload

HEAD_NAME = "lm_head.weight"
EMBEDDING_SUFFIX = "embed_tokens.weight"
OPTIONAL_SUFFIXES = (HEAD_NAME, ".inv_freq")
"""Suffixes of names that may be sent though the folder lacks them: a tied head is loaded or skipped, `inv_freq` is computed by
vLLM."""


@dataclass
class RendezvousInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Address at which the learner creates a communicator with all workers of this engine."""

    address: str
    port: int
    world_size: int


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """An update: where the worker finds the weights of the whole model, with Hugging Face's names and shapes."""

    path: str | None = None
    adapters: str | None = None
    """Path of an adapter file."""
    handle: list[Any] | None = None
    tensors: list[Any] | None = None
    """Entries of a `PackedLayout`."""
    checksum: int | None = None
    """Checksum of the file or of the packed bytes."""


class WeightReceiver(WeightTransferEngine[RendezvousInfo, UpdateInfo]):  # type: ignore[misc]
    """vLLM's weight-transfer backend for swarmq: the worker's side of a weight push."""

    init_info_cls = RendezvousInfo
    update_info_cls = UpdateInfo
    loads = 0
    """Number of updates that have changed this worker's weights."""
    checksum: int | None = None
    """Checksum of the newest update, computed from what was received."""
    _expected: dict[str, Shape] | None = None
    _served: ServedFolder | None = None
    _group: nccl_group.NcclGroup | None = None
    _update_checksum: int | None = None
    """Checksum of the update in progress."""

    def init_transfer_engine(self, init_info: RendezvousInfo) -> None:
        """Join the learner's NCCL group."""
        self.shutdown()
        parallel = self.parallel_config
        rank = 1 + parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._group = nccl_group.join_group(
            init_info.address, init_info.port, rank=rank, world_size=init_info.world_size, device=self.device
        )

    def start_weight_update(self) -> None:
        pass

    def finish_weight_update(self) -> None:
        pass

    def shutdown(self) -> None:
        if self._group is not None:
            self._group.destroy()
            self._group = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive an update. Unlike the base class, does not require an accelerator to synchronize."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Read, check and load an update. Raises ValueError, before the model is touched, for a bad update, and RuntimeError,
        afterwards, if vLLM did not load all weights."""
        with self._open_update(update_info) as tensors:
            source = update_info.path or update_info.adapters or "push"
            self._check_shapes({name: tuple(tensor.shape) for name, tensor in tensors.items()}, source)
            reload.prepare_reload(self.model, self.device)
            named = self._with_head(tensors, own=reload.has_untied_head(self.model))
            self.loads, self.checksum = self.loads + 1, self._update_checksum
            initialize_layerwise_reload(self.model)
            with reload.DirectWrites(self.model) as writes:
                self.model.load_weights(named)
            writes.finish()
            left_out = reload.find_unloaded(self.model)
            finalize_layerwise_reload(self.model, self.model_config)
            reload.repack_tied_heads(self.model)
            if left_out:
                raise RuntimeError(
                    f"this vLLM does not reload {left_out[:3]} of a {type(self.model).__name__}, which cannot be trained with it"
                )
            if self.device.type != "cpu":
                torch.accelerator.synchronize()  # finish reading the learner's memory before it is used again

    @contextlib.contextmanager
    def _open_update(self, update: UpdateInfo) -> Iterator[Tensors]:
        if file := update.path or update.adapters:
            self._update_checksum = _verify_file(file, update.checksum)
            if update.path:
                yield self._read_file(file)
                return
            with adapter_file.open_merged(file, self._find_served_folder(), self.device) as merged:
                yield merged
            return
        packed = PackedLayout(update.tensors or ())
        try:
            if update.handle is not None:
                buffer = cuda_ipc.open_handle(update.handle, packed.size_bytes, self.device)
            elif self._group is not None:
                buffer = torch.empty(packed.size_bytes, dtype=torch.uint8, device=self.device)
                self._group.broadcast(buffer)
            else:
                raise RuntimeError("no rendezvous with the learner took place")
            self._update_checksum = checksum_buffer(buffer)
            if self._update_checksum != update.checksum:
                raise RuntimeError("received bytes differ from those sent")
        except Exception as error:
            raise ValueError(f"the learner's memory cannot be read, {UNTOUCHED}: {error}") from error
        yield packed.views(buffer)

    def _find_served_folder(self) -> ServedFolder:
        """Return the folder from which vLLM loaded the model; for a hub name, its snapshot in the cache."""
        if self._served is None:
            name = self.model_config.model
            try:
                self._served = ServedFolder(Path(name) if Path(name).is_dir() else self._find_snapshot(name))
            except Exception as error:
                raise ValueError(f"the weights of {name} cannot be found on this host, {UNTOUCHED}: {error}") from error
        return self._served

    def _find_snapshot(self, name: str) -> Path:
        cache, revision = self.vllm_config.load_config.download_dir, self.model_config.revision
        return Path(snapshot_download(name, cache_dir=cache, revision=revision, local_files_only=True))

    def _read_file(self, path: str) -> Tensors:
        try:
            with safe_open(path, framework="pt", device=str(self.device)) as file:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
        except Exception as error:
            raise ValueError(f"{path} is not readable as safetensors, {UNTOUCHED}: {error}") from error

    def _check_shapes(self, shapes: dict[str, Shape], source: str) -> None:
        """Raise ValueError if the shapes are not those of the served folder; a hub name is not checked."""
        if self._expected is None:
            self._expected = ServedFolder(Path(self.model_config.model)).read_shapes()
            if self._is_tied:
                self._expected.pop(HEAD_NAME, None)
        missing = sorted(self._expected.keys() - shapes.keys())
        changed = sorted(name for name, shape in self._expected.items() if shapes.get(name, shape) != shape)
        unknown = sorted(name for name in shapes.keys() - self._expected.keys() if not name.endswith(OPTIONAL_SUFFIXES))
        if missing or changed or (self._expected and unknown):
            others = f"has other shapes for {changed[:3]}" if changed else f"has {unknown[:3]} besides"
            what = f"lacks {missing[:3]}" if missing else others
            raise ValueError(f"{source} does not fit the served model, {UNTOUCHED}: it {what}")

    @property
    def _is_tied(self) -> bool:
        configs = (
            self.model_config.hf_config,
            self.model_config.hf_text_config,
        )  # a model with images says it in the former
        return any(getattr(each, "tie_word_embeddings", False) for each in configs)

    def _with_head(self, tensors: Tensors, *, own: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors, but leave out a head that is tied to the embedding, because several of vLLM's models (Gemma 2,
        BLOOM) reject its name. `own`: whether vLLM's model has a head with a weight of its own."""
        yield from (
            (name, materialize(tensor))
            for name, tensor in tensors.items()
            if name != HEAD_NAME or own or not self._is_tied
        )
        if HEAD_NAME not in tensors and self._is_tied and own:
            yield from (
                (HEAD_NAME, materialize(tensor)) for name, tensor in tensors.items() if name.endswith(EMBEDDING_SUFFIX)
            )


def _verify_file(path: str, expected: int | None) -> int | None:
    """Return the file's checksum, or None if the file cannot be read, which a later read reports. Raises ValueError if the
    checksum is not `expected`."""
    try:
        arrived = checksum_file(path)
    except (OSError, ValueError):
        return None
    if expected is not None and arrived != expected:
        raise ValueError(f"{path} differs from what was sent, {UNTOUCHED}")
    return arrived
