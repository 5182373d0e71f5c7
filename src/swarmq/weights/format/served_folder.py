"""Access to the folder that an engine serves: its weights, and checksums to compare with the learner's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from swarmq.weights.format import packing
from swarmq.weights.format.safetensors_files import find_weight_files

CHUNK_ELEMENTS = 1 << 24
"""Number of elements converted at a time, because a converted copy of a whole embedding may not fit a GPU."""

Shape = tuple[int, ...]


class ServedFolder:
    """The folder from which vLLM loaded its model."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._checksums: dict[tuple[str, torch.dtype], int] = {}
        self._files: list[tuple[int, int, int]] = []
        """Inode, size and modification time of the files for which `_checksums` was computed."""

    def read_shapes(self) -> dict[str, Shape]:
        with self._open_files() as files:
            return {name: tuple(file.get_slice(name).get_shape()) for name, file in files.items()}

    @contextlib.contextmanager
    def weights(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the weights by name, as views of the files that read data on use."""
        facts = [path.stat() for path in find_weight_files(self.path)]
        files = [(each.st_ino, each.st_size, each.st_mtime_ns) for each in facts]
        if files != self._files:
            self._files, self._checksums = files, {}
        with self._open_files() as opened:
            yield {name: file.get_tensor(name) for name, file in opened.items()}

    def checksum(self, name: str, weight: torch.Tensor, dtype: torch.dtype) -> int:
        """Return a weight's checksum in `dtype`, cached until the files change."""
        if (name, dtype) not in self._checksums:
            self._checksums[name, dtype] = checksum_tensor(weight, dtype)
        return self._checksums[name, dtype]

    @contextlib.contextmanager
    def _open_files(self) -> Iterator[dict[str, Any]]:
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(safe_open(path, framework="pt")) for path in find_weight_files(self.path)]
            yield {name: file for file in files for name in file.keys()}  # noqa: SIM118 - it is no mapping


def checksum_tensor(tensor: torch.Tensor, dtype: torch.dtype, *, chunk_elements: int = CHUNK_ELEMENTS) -> int:
    """Return the checksum of a tensor's bytes after conversion to `dtype`; it is the same on every device. `chunk_elements`: number
    of elements that are converted at a time, a multiple of 8."""
    total = 0
    for piece in torch.split(tensor.reshape(-1), chunk_elements):
        raw = piece.to(dtype).view(torch.uint8)
        if raw.storage_offset() % 8:  # tensors in some files are not aligned
            raw = raw.clone()
        whole = raw.numel() // 8 * 8
        total += packing.checksum_buffer(raw[:whole]) + int.from_bytes(bytes(raw[whole:].tolist()), "little")
    return total % (1 << 63)
