"""What a learner takes of its host's memory is compared with what the kernel will give it: by the cgroup, by the machine."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from swarmq.config import Lora, Loss, Train
from swarmq.errors import LearnerError
from swarmq.learner.memory import host
from swarmq.learner.memory.estimate import GIB, ModelShape, host_bytes
from swarmq.learner.memory.host import HostRoom, measure_rooms
from swarmq.learner.memory.plan import check_host, load_shape
from swarmq.learner.memory.ranks import get_local_ranks
from swarmq.learner.train import trainer

SHARED = Train(sharding="full", mixed_precision="bf16")
SHAPE = ModelShape(parameters=1000, hidden=8, layers=2, fans=100)
NODE = range(8)


def make_host(
    root: Path, *, cgroup: str = "0::/\n", flags: str = "fpu", memory: Mapping[str, int] | None = None, **files: str
) -> Path:
    """A file system whose host has 64 GiB, 48 of them free, and 2 of swap. `memory`: what else is said of it, in bytes."""
    gib = {"MemTotal": 64, "MemFree": 1, "MemAvailable": 48, "SwapTotal": 2, "SwapFree": 2}
    said = {name: number * GIB for name, number in gib.items()} | dict(memory or {})
    rows = "".join(f"{name}:  {size // 1024} kB\n" for name, size in said.items())
    files |= {"proc/meminfo": rows, "proc/cpuinfo": f"flags\t\t: {flags}\n", "proc/self/cgroup": cgroup}
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


def cgroup_files(folder: str, names: tuple[str, str, str], limit: str) -> dict[str, str]:
    """Of one that holds 20 GiB, 6 of them files that it would give up."""
    limit_file, used_file, prefix = names
    stat = f"anon {14 * GIB}\n{prefix}active_file {2 * GIB}\n{prefix}inactive_file {4 * GIB}\nshmem {GIB}\n"
    return {f"{folder}/{limit_file}": limit, f"{folder}/{used_file}": str(20 * GIB), f"{folder}/memory.stat": stat}


NEW = ("memory.max", "memory.current", "")
OLD = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def test_a_machine_of_metal_has_what_it_has_and_a_virtual_one_may_be_given_more(tmp_path: Path) -> None:
    (metal,) = measure_rooms(make_host(tmp_path / "metal"))
    assert metal == HostRoom(source="the host", total=66 * GIB, free=50 * GIB, bound=66 * GIB)
    (virtual,) = measure_rooms(make_host(tmp_path / "virtual", flags="fpu hypervisor sse"))
    assert virtual == msgspec.structs.replace(metal, bound=None)
    assert measure_rooms(tmp_path / "another system") == []


@pytest.mark.parametrize(
    ("cgroup", "mount", "names"),
    [
        ("0::/\n", "sys/fs/cgroup", NEW),
        ("0::/pods/mine\n", "sys/fs/cgroup/pods/mine", NEW),
        ("0::/pods/mine\n", "sys/fs/cgroup/pods", NEW),
        ("4:cpu,cpuacct:/\n9:memory:/\n0::/\n", "sys/fs/cgroup/memory", OLD),
        ("9:memory:/docker/abc\n", "sys/fs/cgroup/memory", OLD),
    ],
    ids=["container", "own", "of one above", "first version", "first version, seen from inside"],
)
def test_a_limit_of_a_cgroup_bounds_what_is_not_held_but_for_files(
    cgroup: str, mount: str, names: tuple[str, str, str], tmp_path: Path
) -> None:
    files = cgroup_files(mount, names, str(32 * GIB))
    limited, host = measure_rooms(make_host(tmp_path, cgroup=cgroup, **files))
    assert names[0] in limited.source
    assert limited.free == limited.bound == (32 - (20 - 6) + 2) * GIB
    assert limited.total == 34 * GIB
    assert host.source == "the host"


def test_a_cgroup_without_a_limit_says_nothing(tmp_path: Path) -> None:
    files = cgroup_files("sys/fs/cgroup/mine", NEW, "max\n")
    assert [room.source for room in measure_rooms(make_host(tmp_path, cgroup="0::/mine\n", **files))] == ["the host"]


def test_a_process_has_no_more_addresses_than_its_limit(tmp_path: Path) -> None:
    """What it has mapped counts, used or not."""
    rows = "Limit                     Soft Limit           Hard Limit           Units\nMax address space         {} unlimited bytes\n"
    files = {
        "proc/self/limits": rows.format(32 * GIB),
        "proc/self/status": f"Name:\tpython\nVmSize:\t{20 * GIB // 1024} kB\n",
    }
    limited, host = measure_rooms(make_host(tmp_path, **files))
    assert limited == HostRoom(source="this process (ulimit -v)", total=32 * GIB, free=12 * GIB, bound=None)
    assert host.source == "the host"
    assert measure_rooms(make_host(tmp_path, **files | {"proc/self/limits": rows.format("unlimited")})) == [host]


@pytest.mark.parametrize(("flags", "bound"), [("fpu", 40 * GIB), ("fpu hypervisor", None)])
def test_a_strict_kernel_promises_no_more_than_it_can_keep(flags: str, bound: int | None, tmp_path: Path) -> None:
    files = {"proc/sys/vm/overcommit_memory": "2\n"}
    promised = {"CommitLimit": 40 * GIB, "Committed_AS": 15 * GIB}
    strict, _ = measure_rooms(make_host(tmp_path, flags=flags, memory=promised, **files))
    assert "vm.overcommit_memory = 2" in strict.source
    assert (strict.total, strict.free, strict.bound) == (40 * GIB, 25 * GIB, bound)
    files = {"proc/sys/vm/overcommit_memory": "0\n"}
    assert len(measure_rooms(make_host(tmp_path, flags=flags, memory=promised, **files))) == 1


def test_the_limits_of_this_very_process_are_read() -> None:
    """As its kernel writes them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = 1 << 45 if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        (own,) = [room for room in measure_rooms() if "ulimit" in room.source]
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert own.total == limit
    assert 0 < own.free < limit


def needed(here: range = NODE, *, full: bool = True, cuda: bool = True, **changed: object) -> float:
    """Bytes for each parameter of the policy."""
    train = msgspec.structs.replace(SHARED, **changed)
    return host_bytes(SHAPE, train, here=here, ranks=16, full=full, cuda=cuda, judge_sizes=[]) / SHAPE.parameters


def test_one_rank_loads_for_all() -> None:
    assert needed() == 2 + 8, "weights for engines, and the moments of a checkpoint, which take more than loading"
    assert needed(range(8, 16)) == 0, "the other host"
    assert needed(full=False, sharding="none") == 4
    assert needed(range(8, 16), full=False, sharding="none") == 0
    judge = host_bytes(SHAPE, SHARED, here=NODE, ranks=16, full=True, cuda=True, judge_sizes=[5000])
    assert judge == 2 * 1000 + 4 * 5000, "a larger teacher is loaded by rank 0, too"


def test_adapters_are_merged_for_a_checkpoint_by_one_rank_whoever_holds_the_model() -> None:
    alone = {"lora": Lora(), "full": False, "sharding": "none"}
    assert needed(range(1), **alone) == 4, "of half of that it is made"
    assert needed(range(8, 9), **alone) == 0, "the other host"
    assert needed(**alone) == 4
    assert needed(lora=Lora()) == 2 + 4
    adapters = 16 * Lora().rank * SHAPE.fans / SHAPE.parameters
    assert needed(range(1), cuda=False, mixed_precision="no", **alone) == 4 + 4 + adapters


def test_what_is_kept_in_host_memory_between_uses_counts_there() -> None:
    assert needed(cpu_offload=True) == needed() + 16 / 2
    assert needed(range(8, 16), cpu_offload=True) == 16 / 2
    assert needed(range(1), full=False, cuda=False) == 16


def here(free: int, *, bound: int | None) -> list[HostRoom]:
    return [HostRoom(source="the host", total=1 << 20, free=free, bound=bound)]


def test_a_host_that_cannot_have_the_memory_is_refused_and_says_what_is_missing(
    tiny_qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, source = load_shape(str(tiny_qwen)), str(tiny_qwen)
    monkeypatch.setenv("WORLD_SIZE", "4")
    room = 4 * (4 + 4 + 8) * shape.parameters
    with capture_logs() as logs:
        check_host(source, Train(), full=False, cuda=False, rooms=here(room, bound=room))
    assert logs == []
    with pytest.raises(
        LearnerError, match=r"4 ranks on this host take about .* are missing; raise .*sharding = 'full'"
    ):
        check_host(source, Train(), full=False, cuda=False, rooms=here(room, bound=room - 1))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        LearnerError, match="with more memory$"
    ):  # a checkpoint of shared weights takes more than loading twice
        check_host(source, Train(), full=False, cuda=True, rooms=here(0, bound=0))
    offloaded = msgspec.structs.replace(SHARED, cpu_offload=True, loss=Loss(kl=0.1), reference=source)
    with pytest.raises(LearnerError, match="leave train.cpu_offload out.*a reference .*, teacher .* or critic"):
        check_host(source, offloaded, full=True, cuda=True, rooms=here(0, bound=0))
    monkeypatch.setenv("LOCAL_RANK", "1")
    check_host(source, Train(), full=False, cuda=True, rooms=here(0, bound=0))  # the first of a host's ranks looks


def test_memory_that_others_may_give_up_is_a_warning(tiny_qwen: Path) -> None:
    for bound in (None, 1 << 40):
        with capture_logs() as logs:
            check_host(str(tiny_qwen), Train(), full=False, cuda=True, rooms=here(0, bound=bound))
        assert [line["event"] for line in logs] == ["host_memory_short"]
        assert "are missing" in logs[0]["reason"]


def test_a_learner_looks_before_it_loads(tiny_qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "measure_rooms", lambda: here(0, bound=0))
    monkeypatch.setattr(trainer, "load_lm", lambda *_, **__: pytest.fail("it loads"))
    with pytest.raises(LearnerError, match="does not fit the host"):
        trainer.Trainer(str(tiny_qwen), Train(token_log=False, trackers=()))


def test_ranks_of_a_host_are_counted_as_their_launcher_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert get_local_ranks() == range(1)
    monkeypatch.setattr(os, "environ", {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "4"})
    assert get_local_ranks() == range(4)
    monkeypatch.setattr(os, "environ", {"RANK": "11", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "16"})
    assert get_local_ranks() == range(8, 16)
