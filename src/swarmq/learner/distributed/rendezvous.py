"""How the ranks of a learner meet, on one host or several, whichever launcher started them (torchrun, accelerate, Slurm, swarmq).

  every rank ── RankFacts ──> store at MASTER_ADDR:MASTER_PORT ──> rank 0 compares ──> verdict ──> process group, monitor

RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT come from the environment. The store is rank 0's, or
that of torchrun's agent.
"""

from __future__ import annotations

import gc
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from importlib.metadata import version
from typing import Any

import msgspec
import psutil
import structlog
import torch

from swarmq.errors import LearnerError, SetUpError
from swarmq.learner.distributed.processes import STORE_SOCKET_ENV
from swarmq.learner.distributed.rank_monitor import RankFacts, RankMonitor, Store, wait_for_ranks
from swarmq.learner.memory.ranks import num_ranks

log = structlog.get_logger()
distributed: Any = torch.distributed
"""torch.distributed, typed as Any because it does not export all names that are used here to type checkers."""

MEET_S = 600.0
"""Maximum seconds that ranks wait for each other at the start."""
CONNECT_S = 120.0
"""Maximum seconds that ranks which have met take to connect to each other."""
GLOO_PATIENCE = 5
"""Number of its timeouts that Gloo waits for connections."""
COLLECTIVE_TIMEOUT = timedelta(hours=1)
"""Timeout of collectives within a step or a checkpoint: twice the time in which a terabyte is written. If a GPU hangs, the other
ranks end after this time, and the next start resumes the run."""
PACKAGES = ("swarmq", "torch", "transformers", "accelerate", "peft")
"""Packages that must have the same version on all hosts."""
START, VERDICT, READ = "start", "verdict", "read"
POLL_S = 0.1
GLOO_INTERFACE_ENV = "GLOO_SOCKET_IFNAME"


def join_group(
    settings: Mapping[str, Any] | None = None, *, meet_s: float = MEET_S, connect_s: float = CONNECT_S
) -> RankMonitor | None:
    """Meet the other ranks and create the process group, unless this process has done so before. Return the monitor of the ranks, or
    None for a single rank.

    `settings`: the policy's settings in this host's job file, which must equal those of rank 0; None without a job file. Raises
    LearnerError if ranks are missing or cannot be reached, SetUpError if their versions or settings differ.
    """
    if num_ranks() == 1 or RankMonitor.current:
        return RankMonitor.current
    store, rank = _open_store(meet_s), int(os.environ["RANK"])
    store, facts = exchange_facts(store, rank, settings, meet_s)
    choose_interface()
    try:
        distributed.init_process_group(
            # by default torch reduces GPU tensors only, but offloaded parameters lie in host memory
            backend="cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            store=distributed.PrefixStore("group", store),
            rank=rank,
            world_size=num_ranks(),
            timeout=timedelta(seconds=connect_s / GLOO_PATIENCE),
        )
        distributed.distributed_c10d._set_pg_timeout(COLLECTIVE_TIMEOUT)  # noqa: SLF001 - the only way to set it after connecting
    except RuntimeError as error:  # base class of all of torch's errors
        raise LearnerError(
            f"{facts[rank]} met the others at {_address()} but cannot connect to them: {_first_line(error)}; open all TCP ports between the "
            f"hosts, and set {GLOO_INTERFACE_ENV} to the interface that reaches them (now {os.environ.get(GLOO_INTERFACE_ENV)})"
        ) from error
    RankMonitor.current = RankMonitor(store.clone(), facts, rank, address=_address())
    return RankMonitor.current


def leave_group() -> None:
    """Leave the process group, if there are several ranks. No model or trainer may be in use.

    After a collective, a Gloo thread takes the GIL to release its caller's objects. Until then, a process that simply ends is
    aborted, and a DDP model that outlives all other holders of the group waits for that thread while it holds the GIL, forever.
    So models are freed first, and then the group is destroyed, which waits without the GIL.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        gc.collect()
        torch.distributed.destroy_process_group()
    if RankMonitor.current:
        RankMonitor.current.close()
        RankMonitor.current = None


def _address() -> str:
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def _open_store(meet_s: float) -> Store:
    """Connect to the store at which ranks meet. Rank 0 serves it, unless the launcher does."""
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise SetUpError(
                f"WORLD_SIZE is {num_ranks()}, but {name} is not set: start the ranks by torchrun, or set it"
            )
    host, port, rank = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), int(os.environ["RANK"])
    try:
        socket.getaddrinfo(host, port)
    except OSError as error:
        raise SetUpError(
            f"MASTER_ADDR: {socket.gethostname()} cannot resolve {host!r} ({error.strerror}): give the launcher an address of "
            "rank 0's host that every host resolves"
        ) from error
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    listening = os.environ.get(STORE_SOCKET_ENV) if serves else None
    try:
        opened: Store = distributed.TCPStore(
            host,
            port,
            is_master=serves,
            wait_for_workers=False,
            timeout=timedelta(seconds=meet_s),
            master_listen_fd=None if listening is None else int(listening),
        )
    except RuntimeError as error:
        raise LearnerError(
            f"rank {rank} on {socket.gethostname()} "
            + (
                f"cannot serve the ranks' store at {_address()} ({_first_line(error)}): "
                if serves
                else f"does not reach rank 0 at {_address()} within {meet_s:g} s ({_first_line(error)}): "
            )
            + "MASTER_ADDR must be an address of rank 0's host, MASTER_PORT free there and open in firewalls"
        ) from error
    return opened


def exchange_facts(
    store: Store, rank: int, settings: Mapping[str, Any] | None, meet_s: float
) -> tuple[Store, list[RankFacts]]:
    """Exchange the facts of all ranks, which rank 0 compares. Return the facts, and a store whose keys
    belong to this start of the ranks alone, because a launcher's store keeps the keys of earlier starts.

    Raises SetUpError if ranks are missing or differ, LearnerError if rank 0 does not answer.
    """
    own = RankFacts(
        rank=rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        versions={name: version(name) for name in PACKAGES},
        nccl=".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "",  # type: ignore[no-untyped-call]
        settings=None if settings is None else dict(settings),
    )
    keys = [f"facts/{number}" for number in range(num_ranks())]
    if rank == 0:
        store.set(START, start := secrets.token_hex(8))
        ours = distributed.PrefixStore(start, store)
        ours.set(keys[0], msgspec.json.encode(own))
        flaw = _find_missing(ours, keys, meet_s) or find_difference(_read_facts(ours, keys))
        ours.set(VERDICT, flaw)
    else:
        ours = _answer(store, own, begin_s=meet_s / 2, wait_s=2 * meet_s)
        flaw = ours.get(VERDICT).decode()
        ours.set(f"{READ}/{rank}", "")
    if flaw:
        if rank == 0:  # it may serve the store
            wait_for_ranks(ours, READ, [each for each in range(1, num_ranks()) if ours.check([keys[each]])])
        raise SetUpError(flaw)
    facts = _read_facts(ours, keys)
    if rank == 0 and len({each.nccl for each in facts}) > 1:
        log.warning(
            "nccl_versions_differ",
            versions={str(each): each.nccl for each in facts},
            action="use one version on all hosts",
        )
    return ours, facts


def _answer(store: Store, own: RankFacts, *, begin_s: float, wait_s: float) -> Store:
    """Give rank 0 the facts of this rank, and return the store of this start, which has rank 0's verdict. A start that another
    process of this rank has answered is an earlier one, and is ignored.

    Raises LearnerError if no start comes within `begin_s` seconds, or no verdict within `wait_s`, or at once if this rank's launcher
    has joined a store that has ended.
    """
    facts, began, seen = msgspec.json.encode(own).decode(), time.monotonic(), b""
    ours: Store = None
    try:
        while time.monotonic() < began + (wait_s if ours else begin_s):
            if store.check([START]) and (start := store.get(START)) != seen:
                seen, ours = start, distributed.PrefixStore(start.decode(), store)
                if ours.compare_set(f"facts/{own.rank}", "", facts).decode() != facts:
                    ours = None
            if ours and ours.check([VERDICT]):
                return ours
            if not seen and has_lost_store(os.getppid(), int(os.environ["MASTER_PORT"])):
                raise LearnerError(
                    f"{own}: its torchrun joined one on rank 0's host that has ended since, and the new one at {_address()} waits for it: "
                    "start torchrun on this host again"
                )
            time.sleep(POLL_S)
    except RuntimeError as error:
        raise LearnerError(
            f"{own} lost the store at {_address()} ({_first_line(error)}): see the log of rank 0's host"
        ) from error
    waited_s = round(time.monotonic() - began)
    raise LearnerError(
        f"{own} reached the store at {_address()}, but rank 0 did not answer within {waited_s:g} s: start the launchers of both hosts "
        "again, or see its log"
    )


def has_lost_store(launcher: int, port: int) -> bool:
    """Return whether the process `launcher` was connected to a store at this port that has ended.

    When a host is lost and comes back at once, its torchrun can join one on rank 0's host that is about to end with its rank. The next
    torchrun there starts no rank until this host's joins it, which happens only when this host's rank ends.
    """
    try:
        connections = psutil.Process(launcher).net_connections("tcp")
    except psutil.Error:
        return False
    states = {each.status for each in connections if each.raddr and each.raddr.port == port}
    return psutil.CONN_CLOSE_WAIT in states and psutil.CONN_ESTABLISHED not in states


def _find_missing(store: Store, keys: Sequence[str], meet_s: float) -> str:
    """Wait for the facts of all ranks, and return a text that names the ranks without facts after `meet_s` seconds, or ""."""
    try:
        store.wait(list(keys), timedelta(seconds=meet_s))
    except RuntimeError:
        missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        return (
            f"rank {', '.join(missing)} of {len(keys)} did not come to {_address()} within {meet_s:g} s, all others did: start "
            "the launcher on every host with the same number of hosts and of ranks, and let them reach this address"
        )
    return ""


def _read_facts(store: Store, keys: Sequence[str]) -> list[RankFacts]:
    return [msgspec.json.decode(value, type=RankFacts) for value in store.multi_get(list(keys))]


def find_difference(facts: Sequence[RankFacts]) -> str:
    """Return a text that names the first rank whose packages or settings differ from rank 0's, or ""."""
    first, *others = facts
    for other in others:
        for name, ours in first.versions.items():
            if (theirs := other.versions.get(name)) != ours:
                return f"{other} has {name} {theirs}, {first} has {ours}: install the same version on all hosts"
        for name, ours in (first.settings or {}).items():
            if other.settings is not None and (theirs := other.settings.get(name)) != ours:
                return (
                    f"the job file of {other} has {name} = {theirs!r}, that of {first} has {ours!r}: copy rank 0's job file, or "
                    "remove the other, because ranks get the job from rank 0"
                )
    return ""


def choose_interface() -> None:
    """Let Gloo use the network interface that reaches rank 0, unless the user has chosen one. By default, Gloo uses the address of the
    host's name, which other hosts often cannot reach (127.0.1.1 on Debian)."""
    family, kind, _, _, address = socket.getaddrinfo(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing
        own = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == own for each in addresses):
            os.environ.setdefault(GLOO_INTERFACE_ENV, name)
            return


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
