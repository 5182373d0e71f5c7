"""Find a RabbitMQ server on this machine, or get one: `python -m swarmq.broker.install`.

In this order: `$SWARMQ_RABBITMQ_HOME`, the system's package, Homebrew, a copy under the user's folder. Getting one means
the system's package when we are root, else Debian's packages unpacked under the user's folder: 33 MB, no root, no
docker, and nothing of the system is touched.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from swarmq.errors import BrokerError, SwarmqError

HOME_VARIABLE = "SWARMQ_RABBITMQ_HOME"
SYSTEM_ROOT = Path("/")
BREW_PREFIXES = (Path("/opt/homebrew"), Path("/usr/local"), Path("/home/linuxbrew/.linuxbrew"))

ERLANG_PARTS = [
    "base",
    "asn1",
    "crypto",
    "eldap",
    "ftp",
    "inets",
    "mnesia",
    "os-mon",
    "parsetools",
    "public-key",
    "runtime-tools",
    "snmp",
    "ssl",
    "syntax-tools",
    "tftp",
    "tools",
    "xmerl",
]
PACKAGES = ("rabbitmq-server", *(f"erlang-{part}" for part in ERLANG_PARTS))

POLICY = Path("/usr/sbin/policy-rc.d")
"""Debian asks this script whether a package may start its service; 101 means no."""

OTHER_WAYS = (
    "get RabbitMQ 3.10 or newer in one of these ways: `sudo apt-get install --no-install-recommends rabbitmq-server`; "
    "`brew install rabbitmq`; `docker compose up -d rabbitmq` with this project's docker-compose.yml and "
    "SWARMQ_AMQP_URL set to it; or set SWARMQ_AMQP_URL to one that runs elsewhere"
)


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """Where the server's scripts and its Erlang are."""

    home: Path
    """Holds `sbin/rabbitmq-server`, the plain script and not the system's wrapper."""
    erlang_bin: Path
    """Holds `erl`; goes first in PATH."""
    epmd: Path


def find_server() -> Server | None:
    """The first usable server in the order above. Raises BrokerError when $SWARMQ_RABBITMQ_HOME holds none."""
    chosen = os.environ.get(HOME_VARIABLE)
    if chosen:
        server = _server_at(Path(chosen))
        if server is None:
            raise BrokerError(f"{HOME_VARIABLE}={chosen} has no sbin/rabbitmq-server, or `erl` is missing: correct it")
        return server
    return next((server for home in _homes() if (server := _server_at(home)) is not None), None)


def install(report: Callable[[str], None]) -> Server:
    """The server found, or a freshly installed one. Raises BrokerError that names the other ways."""
    server = find_server()
    if server is not None:
        report(f"RabbitMQ is at {server.home}")
        return server
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise BrokerError(f"no RabbitMQ here, and no apt-get to fetch it: {OTHER_WAYS}")
    if os.geteuid() == 0:
        _install_as_root(report)
    else:
        _install_for_user(user_folder(), report)
    server = find_server()
    if server is None:
        raise BrokerError(f"the packages are in place but hold no usable server: {OTHER_WAYS}")
    report(f"RabbitMQ is at {server.home}")
    return server


def user_folder() -> Path:
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data) / "swarmq" / "rabbitmq"


def _homes() -> Iterator[Path]:
    yield from _package_homes(SYSTEM_ROOT)
    for prefix in BREW_PREFIXES:
        yield prefix / "opt" / "rabbitmq"
    yield from _package_homes(user_folder())


def _package_homes(root: Path) -> list[Path]:
    """Where Debian's package puts the server under `root`, newest first."""
    homes = (root / "usr/lib/rabbitmq/lib").glob("rabbitmq_server-*")
    return sorted(homes, key=lambda home: [int(part) for part in re.findall(r"\d+", home.name)], reverse=True)


def _server_at(home: Path) -> Server | None:
    if not (home / "sbin" / "rabbitmq-server").is_file():
        return None
    erlang_bin = _packed_erlang(home)
    if erlang_bin is None and (found := shutil.which("erl")):
        erlang_bin = Path(found).parent
    if erlang_bin is None:
        return None
    epmd = _epmd(erlang_bin)
    return None if epmd is None else Server(home=home, erlang_bin=erlang_bin, epmd=epmd)


def _packed_erlang(home: Path) -> Path | None:
    """The Erlang of the same packages, where `home` is `<root>/usr/lib/rabbitmq/lib/rabbitmq_server-*`."""
    if home.parts[-5:-1] != ("usr", "lib", "rabbitmq", "lib"):
        return None
    erlang_bin = home.parents[4] / "usr/lib/erlang/bin"
    return erlang_bin if (erlang_bin / "erl").is_file() else None


def _epmd(erlang_bin: Path) -> Path | None:
    beside = erlang_bin / "epmd"
    if beside.is_file():
        return beside
    packed = sorted(erlang_bin.parent.glob("erts-*/bin/epmd"))
    found = shutil.which("epmd")
    return packed[-1] if packed else Path(found) if found else None


def _install_as_root(report: Callable[[str], None]) -> None:
    """The system's package, without the node on all interfaces that it would start."""
    report("installing rabbitmq-server with apt-get (its system service stays off)")
    ours = not POLICY.exists()
    if ours:
        POLICY.write_text("#!/bin/sh\nexit 101\n")
        POLICY.chmod(0o755)
    try:
        command = ["apt-get", "install", "-y", "--no-install-recommends", "rabbitmq-server"]
        if not _run(command, cwd=None).ok:
            report("refreshing the package lists")
            _must(["apt-get", "update"], cwd=None)
            _must(command, cwd=None)
        if shutil.which("systemctl"):
            _run(["systemctl", "disable", "rabbitmq-server"], cwd=None)
    finally:
        if ours:
            POLICY.unlink(missing_ok=True)


def _install_for_user(folder: Path, report: Callable[[str], None]) -> None:
    """Debian's packages, unpacked into `folder`, which appears only when it is complete."""
    building = folder.with_name(folder.name + ".building")
    shutil.rmtree(building, ignore_errors=True)
    downloads, root = building / "debs", building / "root"
    downloads.mkdir(parents=True)
    root.mkdir()
    report(f"fetching RabbitMQ and Erlang ({len(PACKAGES)} packages, 33 MB) with apt-get, without root")
    _download(downloads, report)
    report(f"unpacking into {folder}")
    for package in sorted(downloads.glob("*.deb")):
        _must(["dpkg", "-x", str(package), str(root)], cwd=None)
    starter = root / "usr/lib/erlang/bin/erl"
    starter.write_text(starter.read_text().replace("/usr/lib/erlang", str(folder / "usr/lib/erlang")))
    shutil.rmtree(folder, ignore_errors=True)
    root.rename(folder)
    shutil.rmtree(building)
    answer = _run([str(folder / "usr/lib/erlang/bin/erl"), "-noshell", "-eval", "crypto:start(), halt(0)."], cwd=None)
    if not answer.ok:
        shutil.rmtree(folder)
        raise BrokerError(f"Erlang does not start here ({answer.tail}): {OTHER_WAYS}")


def _download(folder: Path, report: Callable[[str], None]) -> None:
    download = ["apt-get", "download", *PACKAGES]
    if _run(download, cwd=folder).ok:
        return
    report("the system's package lists are missing or old: fetching our own")
    lists = folder.parent / "apt"
    (lists / "lists" / "partial").mkdir(parents=True)
    (lists / "cache" / "archives" / "partial").mkdir(parents=True)
    ours = [f"-oDir::State::lists={lists / 'lists'}", f"-oDir::Cache={lists / 'cache'}"]
    _must(["apt-get", *ours, "update"], cwd=folder)
    _must(["apt-get", *ours, "download", *PACKAGES], cwd=folder)


class _Answer(msgspec.Struct, frozen=True):
    ok: bool
    tail: str


def _run(command: Sequence[str], *, cwd: Path | None) -> _Answer:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(
        command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    return _Answer(done.returncode == 0, " / ".join((done.stdout + done.stderr).strip().splitlines()[-3:]))


def _must(command: Sequence[str], *, cwd: Path | None) -> None:
    answer = _run(command, cwd=cwd)
    if not answer.ok:
        raise BrokerError(f"`{' '.join(command[:3])} ...` failed ({answer.tail}): {OTHER_WAYS}")


def main() -> int:
    try:
        install(lambda line: print(line, flush=True))  # noqa: T201
    except SwarmqError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
