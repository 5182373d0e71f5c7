"""After a power loss small files may be empty or cut, if an older version wrote them: what can be made anew is made anew, and
anything else is named with what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import structlog

from swarmq import keys
from swarmq.broker.admin.invitations import make_host_invite
from swarmq.broker.node.files import load_identity, write_node_files
from swarmq.cli.common import load_stored_run
from swarmq.client.data.feed import FeedProgress, _read_progress, _write_progress
from swarmq.client.episodes.invite_lookup import find_invite
from swarmq.config import SwarmJob
from swarmq.errors import SwarmqError
from swarmq.learner.feed.control_state import ControlState
from swarmq.learner.store.report_offsets import _number
from swarmq.messages import Control
from swarmq.registries.clients import ClientRegistry, read_clients
from swarmq.registries.engines import EngineRegistry
from swarmq.registries.proxies import ProxyRegistry
from swarmq.runtime.files import write_atomically
from swarmq.up.ports import assign_ports


class Kept(NamedTuple):
    """A small file: where it is, who writes it, who reads it."""

    name: str
    write: Callable[[SwarmJob, Path], object]
    read: Callable[[SwarmJob, Path], object]
    renewed: bool = True
    """Whether it can be made anew; else the reader says what to do."""


def job_in(folder: Path) -> SwarmJob:
    tree: dict[str, Any] = {"run": "r", "folder": str(folder), "policies": {"main": {"model": "m"}}}
    return SwarmJob.build(tree | {"broker": {"url": "amqp://u:p@localhost/"}})


def add_member(_: SwarmJob, path: Path) -> None:
    with ClientRegistry.open(path) as members:
        members.remove("bob", now=1.0)


FILES = [
    Kept(
        "ports.json", lambda job, _: assign_ports(job, ["proxy"]), lambda job, _: assign_ports(job, ["proxy"])["proxy"]
    ),
    Kept(
        "broker/node.json",
        lambda _, path: load_identity(path.parent, port=0, epmd_port=4),
        lambda _, path: load_identity(path.parent, port=0, epmd_port=4),
    ),
    Kept(
        "broker/home/.erlang.cookie",
        lambda _, path: write_node_files(
            path.parents[1], load_identity(path.parents[1], port=0, epmd_port=4), config="", advanced=""
        ),
        lambda _, path: write_node_files(
            path.parents[1], load_identity(path.parents[1], port=0, epmd_port=4), config="", advanced=""
        ),
    ),
    Kept(
        "engines.json",
        lambda job, _: EngineRegistry(job).add("main", "http://e"),
        lambda job, _: EngineRegistry(job).urls(),
    ),
    Kept(
        "proxies.json",
        lambda _, path: ProxyRegistry(path).write(["http://p"]),
        lambda _, path: ProxyRegistry(path).urls(),
    ),
    Kept(
        "main/batches/control",
        lambda job, path: ControlState(path, job, "main").take(Control(run="r", number=3, pace="paused")),
        lambda job, path: ControlState(path, job, "main").take(Control(run="r", number=1)),
    ),
    Kept("main/batches/reported", lambda _, path: write_atomically(path, b"1234"), lambda _, path: _number(path)),
    Kept("secret", lambda _, path: keys.load_root(path), lambda _, path: keys.load_root(path), renewed=False),
    Kept("clients.json", add_member, lambda _, path: read_clients(path), renewed=False),
    Kept(
        "invite",
        lambda job, path: write_atomically(path, make_host_invite(job, ("http://p/v1",)).encode().encode()),
        lambda _, path: find_invite(path.parent),
        renewed=False,
    ),
    Kept(
        "resolved.toml",
        lambda job, path: write_atomically(path, job.to_toml().encode()),
        lambda _, path: load_stored_run(path.parent),
        renewed=False,
    ),
    Kept(
        "feed-r-math-x.json",
        lambda _, path: _write_progress(path, FeedProgress(data="d", confirmed=7)),
        lambda _, path: _read_progress(path, "d"),
        renewed=False,
    ),
]


@pytest.mark.parametrize("share", [0.0, 0.5], ids=["emptied", "cut"])
@pytest.mark.parametrize("kept", FILES, ids=[kept.name for kept in FILES])
def test_a_damaged_small_file_is_made_anew_or_named(tmp_path: Path, kept: Kept, share: float) -> None:
    job = job_in(tmp_path)
    path = job.run_folder.path / kept.name
    path.parent.mkdir(parents=True, exist_ok=True)
    kept.write(job, path)
    sound = path.read_bytes()
    path.chmod(0o600)
    path.write_bytes(sound[: int(share * len(sound))])
    with structlog.testing.capture_logs() as said:
        if kept.renewed:
            kept.read(job, path)
            assert said or kept.name.endswith((".erlang.cookie", "reported"))
            kept.read(job, path)
        else:
            with pytest.raises(SwarmqError, match=str(path)) as refused:
                kept.read(job, path)
            assert "another run" not in str(refused.value)
            path.write_bytes(sound)
            kept.read(job, path)


def test_a_file_is_replaced_as_a_whole_and_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(b"old")
    path.chmod(0o644)
    (tmp_path / "file.part").write_bytes(b"left by a process that was killed")
    with path.open("rb") as reader:
        write_atomically(path, b"new")
        assert reader.read() == b"old", "who has it open reads it to its end"
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [one.name for one in tmp_path.iterdir()] == ["file.json"]
