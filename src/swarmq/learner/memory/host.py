"""Host memory for this process: hard limits, and what is free at present.

A cgroup's limit is exact: a process beyond it is killed, so a plan must stay within it. The kernel's available memory is only an
estimate, and other processes may use it up at any time. Even the total memory of a virtual machine is no hard limit, because it
may be given more. Two limits count committed memory, whether it is used or not, and allocations beyond them fail: the limit of
the process (`ulimit -v`), and that of a kernel with strict commitments (`vm.overcommit_memory = 2`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

PAGE_CACHE = ("active_file", "inactive_file")
"""Fields of a cgroup's `memory.stat` that count as used and are released on demand. In version 1, `total_...` includes all
cgroups below."""
ADDRESS_SPACE_LIMIT = "Max address space"
STRICT_OVERCOMMIT = "2"
"""Value of `vm.overcommit_memory` that makes commitments strict."""
TORCH_HAS_NO_MEMORY = "DefaultCPUAllocator"
"""Text in torch's RuntimeError when host memory runs out; nothing else distinguishes that error."""


class HostRoom(msgspec.Struct, frozen=True, kw_only=True):
    """A limit on memory, in bytes including swap."""

    source: str
    total: int
    free: int
    bound: int | None
    """Hard limit, which holds even if other processes release memory; None if unknown."""


def measure_rooms(root: Path = Path("/")) -> list[HostRoom]:
    """Return the memory limits that apply to this process: those of its cgroups, of the process itself, of the kernel's
    commitments, and of the host. Empty on systems without /proc.

    `root`: root of the file system.
    """
    proc = root / "proc"
    memory = {name: 1024 * value for name, value in _read_table(proc / "meminfo").items()}
    if "MemTotal" not in memory:
        return []
    swap = memory.get("SwapFree", 0)
    total, free = memory["MemTotal"] + memory.get("SwapTotal", 0), memory["MemAvailable"] + swap
    virtual = any("hypervisor" in line.split() for line in _read_lines(proc / "cpuinfo"))
    host = HostRoom(source="the host", total=total, free=free, bound=None if virtual else total)
    return [
        *_read_cgroup_limits(root, swap=swap),
        *_read_process_limit(proc),
        *_read_commit_limit(proc, memory, virtual=virtual),
        host,
    ]


def is_out_of_memory(error: Exception) -> bool:
    """Return whether the error means that this process cannot allocate more memory."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and TORCH_HAS_NO_MEMORY in str(error))


def _read_process_limit(proc: Path) -> Iterator[HostRoom]:
    limits = (
        line.removeprefix(ADDRESS_SPACE_LIMIT).split()
        for line in _read_lines(proc / "self/limits")
        if line.startswith(ADDRESS_SPACE_LIMIT)
    )
    for limit, *_ in limits:
        if limit.isdecimal():  # otherwise "unlimited"
            free = int(limit) - 1024 * _read_kib(proc / "self/status", "VmSize")
            # no bound for all ranks together, because every rank has this limit
            yield HostRoom(source="this process (ulimit -v)", total=int(limit), free=free, bound=None)


def _read_commit_limit(proc: Path, memory: Mapping[str, int], *, virtual: bool) -> Iterator[HostRoom]:
    if _read_lines(proc / "sys/vm/overcommit_memory") == [STRICT_OVERCOMMIT]:
        total = memory["CommitLimit"]
        whose = "the host's commit limit (vm.overcommit_memory = 2)"
        yield HostRoom(source=whose, total=total, free=total - memory["Committed_AS"], bound=None if virtual else total)


def _read_cgroup_limits(root: Path, *, swap: int) -> Iterator[HostRoom]:
    mount = root / "sys/fs/cgroup"
    for line in _read_lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _walk_up_cgroups(mount, path, ("memory.max", "memory.current", ""), swap=swap)
        elif "memory" in controllers.split(","):
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
            yield from _walk_up_cgroups(mount / "memory", path, files, swap=swap)


def _walk_up_cgroups(mount: Path, path: str, files: tuple[str, str, str], *, swap: int) -> Iterator[HostRoom]:
    """Yield the limits of a cgroup and of each ancestor that this process sees; in a container, the root of the mount is the
    container's cgroup.

    `files`: names of the files with limit and use, and prefix of the fields in `memory.stat`. `swap`: free swap in bytes.
    """
    limit_file, used_file, prefix = files
    own = mount / path.lstrip("/")
    for folder in (own, *own.parents):
        limit = folder / limit_file
        text = "".join(_read_lines(limit)) if folder.is_relative_to(mount) else ""
        if text.isdecimal():  # otherwise "max": no limit
            stat = _read_table(folder / "memory.stat")
            used = int((folder / used_file).read_text()) - sum(stat.get(prefix + name, 0) for name in PAGE_CACHE)
            free = int(text) - used + swap
            yield HostRoom(source=str(limit), total=int(text) + swap, free=free, bound=free)


def _read_table(file: Path) -> dict[str, int]:
    rows = (line.replace(":", " ").split() for line in _read_lines(file))
    return {name: int(value) for name, value, *_ in rows}


def _read_kib(file: Path, name: str) -> int:
    return next(int(line.split()[1]) for line in _read_lines(file) if line.startswith(f"{name}:"))


def _read_lines(file: Path) -> list[str]:
    """Return the file's lines, or [] if it does not exist."""
    return file.read_text().splitlines() if file.is_file() else []
