"""Packing of many tensors into one buffer, so that one handle, broadcast or copy transfers all of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

CPU = torch.device("cpu")
ALIGNMENT = 256
"""Alignment of each tensor's start in bytes, for efficient kernels."""


class LazyTensor(NamedTuple):
    """A tensor computed on request, so that only one exists at a time."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    """Device of the source tensors."""
    make: Callable[[], torch.Tensor]
    sources: tuple[torch.Tensor, ...] = ()
    """All tensors on which the result depends; empty: unknown."""

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point


class LowRankUpdate(NamedTuple):
    """A low-rank update of a matrix [out, in]: scale * up @ down."""

    down: torch.Tensor
    """First matrix of the update: [r, in] float32."""
    up: torch.Tensor
    """Second matrix of the update: [out, r] float32."""
    scale: float

    def add_to(self, base: torch.Tensor) -> torch.Tensor:
        """Return base plus update [out, in] on the base's device, in the adapter's dtype. Learner and engine both call this, so
        their results are equal bit for bit."""
        down, up = self.down.to(base.device), self.up.to(base.device)
        with torch.no_grad():
            return torch.addmm(base.to(up.dtype), up, down, alpha=self.scale)


class FolderWeight(NamedTuple):
    """A weight of the model's folder, with or without an adapter. An engine that has the folder needs only the adapter."""

    base: torch.Tensor | LazyTensor
    """The weight as it is in the folder."""
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
"""One tensor in a buffer: name, dtype without `torch.`, and shape."""


class PackedLayout:
    """Positions of tensors in a buffer, the same on both ends."""

    def __init__(self, entries: Iterable[Sequence[Any]]) -> None:
        """`entries`: see `PackedEntry`; JSON lists are accepted."""
        self.entries: list[PackedEntry] = [(name, dtype, tuple(shape)) for name, dtype, shape in entries]
        sizes = [_compute_size_bytes(dtype, shape) for _, dtype, shape in self.entries]
        starts = [0, *itertools.accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]
        self._spans = list(zip(starts, sizes, strict=False))
        self.size_bytes = starts[-1]

    @classmethod
    def of(cls, tensors: Tensors, dtype: torch.dtype) -> PackedLayout:
        """Return the layout of `tensors`, floating-point ones in `dtype`."""
        return cls(
            (name, _get_dtype_name(dtype if tensor.is_floating_point() else tensor.dtype), tensor.shape)
            for name, tensor in tensors.items()
        )

    def pack(self, tensors: Tensors, buffer: torch.Tensor) -> None:
        """Write the tensors, from any device, into `buffer` [size_bytes] uint8."""
        for name, view in self.views(buffer).items():
            view.copy_(materialize(tensors[name], adding_on=buffer.device), non_blocking=True)

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return name -> tensor, as views of `buffer`."""
        return {
            name: buffer[start : start + size].view(getattr(torch, dtype)).view(shape)
            for (name, dtype, shape), (start, size) in zip(self.entries, self._spans, strict=True)
        }


def checksum_buffer(buffer: torch.Tensor) -> int:
    """Return the checksum of `buffer` [n] uint8, with n a multiple of 8. It is the same on every device and takes one read of the
    buffer."""
    return int(buffer.view(torch.int64).sum())


def checksum_file(path: str | Path) -> int:
    """Return the checksum of a file's bytes, padded with zeros to a multiple of 8."""
    raw = np.memmap(path, np.uint8, "r")
    whole = raw.size // 8 * 8
    rest = int.from_bytes(raw[whole:].tobytes(), "little")
    return (int(raw[:whole].view(np.int64).sum()) + rest) % (1 << 63)


def get_stored_tensor(weight: Weight) -> Weight:
    """Return the tensor in the model's folder if `weight` is just that, without an adapter; else return `weight` itself."""
    return weight.base if isinstance(weight, FolderWeight) and weight.adapter is None else weight


def materialize(weight: Weight, adding_on: torch.device | None = None) -> torch.Tensor:
    """Compute the tensor of a weight. `adding_on`: device on which the adapter is added, by default the weight's."""
    if isinstance(weight, FolderWeight):
        return weight.make(adding_on)
    return weight.make() if isinstance(weight, LazyTensor) else weight


def cast(tensor: torch.Tensor, device: torch.device, dtype: str | None) -> torch.Tensor:
    """Move a tensor to `device`, and convert floating-point values to `dtype` if given."""
    return tensor.to(device, getattr(torch, dtype) if dtype and tensor.is_floating_point() else None)


def _compute_size_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel() * getattr(torch, dtype).itemsize)


def _get_dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
