"""Disks: how much of every file and folder was synced, which a crash of the whole machine would leave; and a full one."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarmq.collector.store import Store
from swarmq.errors import CollectorError


class Disk:
    """Notes every `os.fsync`; the real one still happens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: dict[int, int] = {}
        """Inode -> bytes when it was synced last."""
        self.folders: dict[int, set[str]] = {}
        """Inode -> names when it was synced last."""
        real = os.fsync

        def fsync(descriptor: int) -> None:
            real(descriptor)
            path = Path(f"/proc/self/fd/{descriptor}").readlink()
            inode = os.fstat(descriptor).st_ino
            if path.is_dir():
                self.folders[inode] = {inner.name for inner in path.iterdir()}
            else:
                self.sizes[inode] = os.fstat(descriptor).st_size

        monkeypatch.setattr(os, "fsync", fsync)

    def keeps(self, path: Path) -> bool:
        """All of a file, or of every file below a folder, and its name, outlive a crash now."""
        if path.name not in self.folders.get(path.parent.stat().st_ino, ()):
            return False
        if path.is_dir():
            return all(self.keeps(inner) for inner in path.iterdir())
        return self.sizes.get(path.stat().st_ino) == path.stat().st_size


class StoreOnFullDisk(Store):
    """A store on a disk that is full while `full` says so."""

    def __init__(self) -> None:
        self.full = False
        self.refused = asyncio.Event()
        super().__init__(None, run="r")

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        with super().transaction():
            yield
            if self.full:
                self.refused.set()
                raise CollectorError("disk full")
