"""Many tensors as one stretch of bytes, so that they travel in one piece: one handle, one broadcast, one copy."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

CPU = torch.device("cpu")
ALIGNMENT = 256
"""Bytes: every tensor begins at a multiple, as kernels like it."""


class LazyTensor(NamedTuple):
    """A tensor that is made when it is packed, so that only one of its kind exists at a time."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    """Of what it is made from."""
    make: Callable[[], torch.Tensor]
    sources: tuple[torch.Tensor, ...] = ()
    """All that it is made from: while they stay what they are, so does it. Empty: not known."""

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point


class LowRankUpdate(NamedTuple):
    """What is added to a matrix [out, in]: scale * up @ down."""

    down: torch.Tensor
    """[r, in] float32"""
    up: torch.Tensor
    """[out, r] float32"""
    scale: float

    def add_to(self, base: torch.Tensor) -> torch.Tensor:
        """[out, in] in the adapter's type, whatever that of `base`, where that is. Learner and engine both add here, and so come to
        the same bits."""
        down, up = self.down.to(base.device), self.up.to(base.device)
        with torch.no_grad():
            return torch.addmm(base.to(up.dtype), up, down, alpha=self.scale)


class FolderWeight(NamedTuple):
    """A weight that the model's folder has, with or without an adapter: who has the folder can make it from there."""

    base: torch.Tensor | LazyTensor
    """What the folder has."""
    adapter: LowRankUpdate | None = None

    @property
    def shape(self) -> torch.Size:
        return self.base.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.adapter.up.dtype if self.adapter else self.base.dtype

    @property
    def device(self) -> torch.device:
        return self.base.device

    def is_floating_point(self) -> bool:
        return self.base.is_floating_point()

    def make(self, adding_on: torch.device | None = None) -> torch.Tensor:
        base = materialize(self.base)
        return self.adapter.add_to(base.to(adding_on or base.device)) if self.adapter else base


Weight = torch.Tensor | LazyTensor | FolderWeight
NamedTensors = Iterable[tuple[str, Weight]]
Tensors = Mapping[str, Weight]

PackedEntry = tuple[str, str, tuple[int, ...]]
"""Name, dtype without `torch.`, shape."""


class PackedLayout:
    """Where each tensor lies in the bytes; the same on both ends."""

    def __init__(self, entries: Iterable[Sequence[Any]]) -> None:
        """`entries` as in `Entry`, or as JSON brings them."""
        self.entries: list[PackedEntry] = [(name, dtype, tuple(shape)) for name, dtype, shape in entries]
        sizes = [_compute_size_bytes(dtype, shape) for _, dtype, shape in self.entries]
        starts = [0, *itertools.accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]
        self._spans = list(zip(starts, sizes, strict=False))
        self.size_bytes = starts[-1]

    @classmethod
    def of(cls, tensors: Tensors, dtype: torch.dtype) -> PackedLayout:
        """For these tensors, floating ones as `dtype`."""
        return cls(
            (name, _get_dtype_name(dtype if tensor.is_floating_point() else tensor.dtype), tensor.shape)
            for name, tensor in tensors.items()
        )

    def pack(self, tensors: Tensors, buffer: torch.Tensor) -> None:
        """Write the tensors into `buffer` [size_bytes] uint8, from whatever device they are on."""
        for name, view in self.views(buffer).items():
            view.copy_(materialize(tensors[name], adding_on=buffer.device), non_blocking=True)

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors in `buffer`, without copying."""
        return {
            name: buffer[start : start + size].view(getattr(torch, dtype)).view(shape)
            for (name, dtype, shape), (start, size) in zip(self.entries, self._spans, strict=True)
        }


def checksum_buffer(buffer: torch.Tensor) -> int:
    """Of the bytes [n] uint8, n a multiple of 8. The same on every device; reading them is all it costs."""
    return int(buffer.view(torch.int64).sum())


def checksum_file(path: str | Path) -> int:
    """Of a file's bytes, the last ones filled up with zeros. It lies in memory, or has just been written."""
    raw = np.memmap(path, np.uint8, "r")
    whole = raw.size // 8 * 8
    rest = int.from_bytes(raw[whole:].tobytes(), "little")
    return (int(raw[:whole].view(np.int64).sum()) + rest) % (1 << 63)


def get_stored_tensor(weight: Weight) -> Weight:
    """What there is of it already: where nothing is added to what the folder has, that."""
    return weight.base if isinstance(weight, FolderWeight) and weight.adapter is None else weight


def materialize(weight: Weight, adding_on: torch.device | None = None) -> torch.Tensor:
    """The tensor. What an adapter adds is added on this device, by default where the weight is."""
    if isinstance(weight, FolderWeight):
        return weight.make(adding_on)
    return weight.make() if isinstance(weight, LazyTensor) else weight


def cast(tensor: torch.Tensor, device: torch.device, dtype: str | None) -> torch.Tensor:
    """On `device`; floating ones as `dtype`, if one is named."""
    return tensor.to(device, getattr(torch, dtype) if dtype and tensor.is_floating_point() else None)


def _compute_size_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel() * getattr(torch, dtype).itemsize)


def _get_dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
