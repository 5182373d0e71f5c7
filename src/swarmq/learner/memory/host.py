"""How much memory the host has for this process: what will never be exceeded, and what is free now.

A cgroup's limit is exact: whoever needs more is killed, so it bounds what may be planned. What the kernel calls available is a
guess, which others' memory may join at any time; and a virtual machine may be given more as it uses what it has, so that
even its total bounds nothing. A limit of the process (`ulimit -v`), and of what a strict kernel promises to all
(`vm.overcommit_memory = 2`), counts memory that is promised, used or not: beyond them an allocation fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

PAGE_CACHE = ("active_file", "inactive_file")
"""In a cgroup's `memory.stat`: counted as used, and given up when asked for. In version 1 of all below it: `total_...`."""
ADDRESSES = "Max address space"
STRICT = "2"
"""In `vm.overcommit_memory`."""
TORCH_HAS_NO_MEMORY = "DefaultCPUAllocator"
"""What stands in a RuntimeError of torch that is one of host memory; it gives no other sign."""


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of memory; swap is memory, too."""

    whose: str
    total: int
    free: int
    bound: int | None
    """More than this cannot be taken, whatever others give up; None: nobody knows."""


def rooms(root: Path = Path("/")) -> list[Room]:
    """Of every cgroup that this process is in and that has a limit, of the process and the kernel's promises where these have one, and
    of the host; none on systems without /proc.

    `root`: of the file system.
    """
    proc = root / "proc"
    memory = {name: 1024 * value for name, value in _table(proc / "meminfo").items()}
    if "MemTotal" not in memory:
        return []
    swap = memory.get("SwapFree", 0)
    total, free = memory["MemTotal"] + memory.get("SwapTotal", 0), memory["MemAvailable"] + swap
    virtual = any("hypervisor" in line.split() for line in _lines(proc / "cpuinfo"))
    host = Room(whose="the host", total=total, free=free, bound=None if virtual else total)
    return [*_limits(root, swap=swap), *_process(proc), *_promises(proc, memory, virtual=virtual), host]


def refuses(error: Exception) -> bool:
    """Whether it says that this process gets no more memory."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and TORCH_HAS_NO_MEMORY in str(error))


def _process(proc: Path) -> Iterator[Room]:
    limits = (
        line.removeprefix(ADDRESSES).split() for line in _lines(proc / "self/limits") if line.startswith(ADDRESSES)
    )
    for limit, *_ in limits:
        if limit.isdecimal():  # else there is none: "unlimited"
            free = int(limit) - 1024 * _kib(proc / "self/status", "VmSize")
            # not bound by it: other ranks have as much
            yield Room(whose="this process (ulimit -v)", total=int(limit), free=free, bound=None)


def _promises(proc: Path, memory: Mapping[str, int], *, virtual: bool) -> Iterator[Room]:
    if _lines(proc / "sys/vm/overcommit_memory") == [STRICT]:
        total = memory["CommitLimit"]
        whose = "what the host promises (vm.overcommit_memory = 2)"
        yield Room(whose=whose, total=total, free=total - memory["Committed_AS"], bound=None if virtual else total)


def _limits(root: Path, *, swap: int) -> Iterator[Room]:
    mount = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _above(mount, path, ("memory.max", "memory.current", ""), swap=swap)
        elif "memory" in controllers.split(","):
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
            yield from _above(mount / "memory", path, files, swap=swap)


def _above(mount: Path, path: str, files: tuple[str, str, str], *, swap: int) -> Iterator[Room]:
    """The cgroup and all that it is in, as far as this process sees them: a container sees its own as the mount."""
    limit_file, used_file, prefix = files
    own = mount / path.lstrip("/")
    for folder in (own, *own.parents):
        limit = folder / limit_file
        said = "".join(_lines(limit)) if folder.is_relative_to(mount) else ""
        if said.isdecimal():  # else there is none: "max"
            stat = _table(folder / "memory.stat")
            used = int((folder / used_file).read_text()) - sum(stat.get(prefix + name, 0) for name in PAGE_CACHE)
            free = int(said) - used + swap
            yield Room(whose=str(limit), total=int(said) + swap, free=free, bound=free)


def _table(file: Path) -> dict[str, int]:
    rows = (line.replace(":", " ").split() for line in _lines(file))
    return {name: int(value) for name, value, *_ in rows}


def _kib(file: Path, name: str) -> int:
    return next(int(line.split()[1]) for line in _lines(file) if line.startswith(f"{name}:"))


def _lines(file: Path) -> list[str]:
    """Empty where there is no such file."""
    return file.read_text().splitlines() if file.is_file() else []
