"""A safetensors file of adapters, for engines that have the base weights in their served folder.

The file holds the two matrices of each adapter, and whole weights that changed without an adapter, but no unchanged weights. Its
metadata hold checksums of the learner's base weights: the engine compares its folder with them before it touches the model, then
merges one weight at a time, as the learner does.

    NAME:down [r, in], NAME:up [out, r]   float32
    NAME                                  in the engine's dtype
    metadata                              an `AdapterManifest`
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial

import msgspec
import torch
from safetensors import safe_open

from swarmq.weights.format.conventions import UNTOUCHED
from swarmq.weights.format.packing import CPU, FolderWeight, LazyTensor, LowRankUpdate, Tensors, cast, materialize
from swarmq.weights.format.served_folder import CHUNK_ELEMENTS, ServedFolder, checksum_tensor

MANIFEST_KEY = "swarmq.outline"
DOWN, UP = ":down", ":up"


class BaseWeight(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A base weight that the engine reads from its folder."""

    float32: int | None = None
    """Checksum of the values in FP32; None: the learner keeps the weight in BF16."""
    bfloat16: int | None = None
    """Checksum of the values in BF16; None: BF16 does not represent the learner's values exactly."""
    scale: float | None = None
    """Scale of the weight's adapter; None: the weight has no adapter."""


class AdapterManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Metadata of the file: where the engine finds each weight of the model."""

    weights: dict[str, BaseWeight | None]
    """Name of a weight, in the model's order -> its base weight; None: the whole weight is in the file."""
    dtype: str | None
    """Dtype to which floating-point weights are converted after merging; None: not converted."""


class BaseChecksums:
    """Checksums of the learner's frozen weights, computed again only if a tensor is written to."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[list[tuple[int, int]], BaseWeight]] = {}

    def of(self, name: str, base: torch.Tensor | LazyTensor) -> BaseWeight:
        sources = base.sources if isinstance(base, LazyTensor) else (base,)
        state = [(each.data_ptr(), each._version) for each in sources]  # noqa: SLF001 - it has no public name
        if not state or name not in self._known or self._known[name][0] != state:
            self._known[name] = (state, _describe_base(materialize(base)))
        return self._known[name][1]


def _describe_base(base: torch.Tensor) -> BaseWeight:
    if base.dtype == torch.bfloat16:
        return BaseWeight(bfloat16=checksum_tensor(base, torch.bfloat16))
    fits = all(torch.equal(piece.bfloat16().float(), piece) for piece in torch.split(base.reshape(-1), CHUNK_ELEMENTS))
    return BaseWeight(
        float32=checksum_tensor(base, torch.float32), bfloat16=checksum_tensor(base, torch.bfloat16) if fits else None
    )


def split_weights(
    tensors: Tensors, dtype: str | None, checksums: BaseChecksums
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return tensors and metadata of the file for an engine that computes in `dtype`."""
    placed: dict[str, torch.Tensor] = {}
    weights: dict[str, BaseWeight | None] = {}
    for name, weight in tensors.items():
        if not isinstance(weight, FolderWeight):
            weights[name], placed[name] = None, cast(materialize(weight), CPU, dtype).contiguous()
            continue
        base = checksums.of(name, weight.base)
        if weight.adapter:
            down, up, scale = weight.adapter
            placed[name + DOWN], placed[name + UP] = down.cpu().contiguous(), up.cpu().contiguous()
            base = msgspec.structs.replace(base, scale=scale)
        weights[name] = base
    return placed, {MANIFEST_KEY: msgspec.json.encode(AdapterManifest(weights=weights, dtype=dtype)).decode()}


@contextlib.contextmanager
def open_merged(path: str, folder: ServedFolder, device: torch.device) -> Iterator[Tensors]:
    """Yield all weights of the model, computed on `device` on request. Raises ValueError if the file is damaged, or belongs
    to other base weights than the folder's."""
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(safe_open(path, framework="pt"))
            outline = msgspec.json.decode((file.metadata() or {})[MANIFEST_KEY], type=AdapterManifest)
            served = stack.enter_context(folder.weights())
            sent = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
            _check_base(outline, served, folder)
            weights = {
                name: _make_lazy(_combine_parts(name, base, sent, served), device, outline.dtype)
                for name, base in outline.weights.items()
            }
        except Exception as error:
            raise ValueError(f"{path} cannot be merged, {UNTOUCHED}: {error}") from error
        yield weights


def _check_base(outline: AdapterManifest, served: Mapping[str, torch.Tensor], folder: ServedFolder) -> None:
    """Raise ValueError if the folder's weights are not the learner's base."""
    bases = {name: base for name, base in outline.weights.items() if base}
    others = [
        name
        for name, base in bases.items()
        if name not in served or not _is_same_base(name, base, served[name], folder)
    ]
    if others:
        raise ValueError(
            f"{folder.path} is not the base of the adapters: of {len(bases)} base weights, {len(others)} differ "
            f"from the learner's, such as {others[:2]}"
        )


def _is_same_base(name: str, base: BaseWeight, weight: torch.Tensor, folder: ServedFolder) -> bool:
    half = weight.dtype == torch.bfloat16 or base.float32 is None
    return folder.checksum(name, weight, torch.bfloat16 if half else torch.float32) == (
        base.bfloat16 if half else base.float32
    )


def _combine_parts(
    name: str, base: BaseWeight | None, sent: Mapping[str, torch.Tensor], served: Mapping[str, torch.Tensor]
) -> FolderWeight:
    """Return a weight from its parts. Raises KeyError if a part is missing, ValueError if the adapter has another shape."""
    if base is None:
        return FolderWeight(sent[name])
    kept = _cast_as_learner(served[name], base)
    if base.scale is None:
        return FolderWeight(kept)
    adapter = LowRankUpdate(sent[name + DOWN], sent[name + UP], base.scale)
    fits = (adapter.up.shape[0], adapter.down.shape[1]) == served[name].shape
    if not fits or adapter.up.shape[1] != adapter.down.shape[0]:
        raise ValueError(f"the adapter of {name} does not have the shape of this weight")
    return FolderWeight(kept, adapter)


def _cast_as_learner(weight: torch.Tensor, base: BaseWeight) -> torch.Tensor | LazyTensor:
    """Return a weight of the folder, converted to the dtype that the learner keeps."""
    if base.float32 is not None or weight.dtype == torch.bfloat16:
        return weight
    return LazyTensor(weight.shape, torch.bfloat16, weight.device, weight.bfloat16)


def _make_lazy(weight: FolderWeight, device: torch.device, dtype: str | None) -> LazyTensor:
    return LazyTensor(weight.shape, weight.dtype, device, partial(_merge_and_cast, weight, device, dtype))


def _merge_and_cast(weight: FolderWeight, device: torch.device, dtype: str | None) -> torch.Tensor:
    return cast(materialize(weight, adding_on=device), device, dtype)
