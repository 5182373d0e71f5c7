"""Find a RabbitMQ server on this machine or install one: `python -m swarmq.broker.node.install`.

Search order: `$SWARMQ_RABBITMQ_HOME`, the system's package, Homebrew, a copy in the user's folder. Install order: the system's
package if root, else Debian's packages unpacked into the user's folder (33 MB, without root or docker, the system stays
unchanged), else `brew install rabbitmq`, else a container (container.py). If one way fails, the failure is reported and the
next way is tried.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec

from swarmq.broker.node.commands import run_checked, run_command, user_folder
from swarmq.broker.node.container import BrokerContainer, find_container, start_container
from swarmq.errors import BrokerError, SwarmqError

HOME_VARIABLE = "SWARMQ_RABBITMQ_HOME"
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
WAIT_FOR_OTHERS = "-oDPkg::Lock::Timeout=300"
"""Option of apt-get: seconds to wait for another installation, such as the automatic upgrades of a machine that was just started."""
PACKAGES = ("rabbitmq-server", *(f"erlang-{part}" for part in ERLANG_PARTS))

INSTALL_HINT = (
    "get RabbitMQ 3.10 or newer in one of these ways: `sudo apt-get install --no-install-recommends rabbitmq-server`; "
    "`brew install rabbitmq`; `docker compose up -d rabbitmq` with this project's docker-compose.yml and "
    "SWARMQ_AMQP_URL set to it; or set SWARMQ_AMQP_URL to a RabbitMQ on another machine"
)


class HostPaths(msgspec.Struct, frozen=True, kw_only=True):
    """Paths to which package managers install."""

    root: Path = Path("/")
    brew_prefixes: tuple[Path, ...] = (Path("/opt/homebrew"), Path("/usr/local"), Path("/home/linuxbrew/.linuxbrew"))

    @property
    def policy(self) -> Path:
        """Script that Debian asks whether a package may start its service; exit status 101 means no."""
        return self.root / "usr/sbin/policy-rc.d"


HOST = HostPaths()


class RabbitmqInstall(msgspec.Struct, frozen=True, kw_only=True):
    """Paths of an installed RabbitMQ server and its Erlang."""

    home: Path
    """Folder with `sbin/rabbitmq-server`, the plain script and not the system's wrapper."""
    erlang_bin: Path
    """Folder with `erl`; put first in PATH."""
    epmd: Path

    @property
    def place(self) -> str:
        return str(self.home)


def find_server(host: HostPaths = HOST) -> RabbitmqInstall | None:
    """Return the first usable server in the search order, or None. Raises BrokerError if $SWARMQ_RABBITMQ_HOME contains none."""
    chosen = os.environ.get(HOME_VARIABLE)
    if chosen:
        server = _inspect_home(Path(chosen))
        if server is None:
            raise BrokerError(f"{HOME_VARIABLE}={chosen} has no sbin/rabbitmq-server, or `erl` is missing: correct it")
        return server
    return next((server for home in _candidate_homes(host) if (server := _inspect_home(home)) is not None), None)


def install(report: Callable[[str], None], host: HostPaths = HOST) -> RabbitmqInstall | BrokerContainer:
    """Return the RabbitMQ that is found or newly installed. Raises BrokerError with all failures and other ways to get one."""
    if (found := find_server(host) or find_container()) is not None:
        report(f"RabbitMQ is at {found.place}")
        return found
    failures: list[str] = []
    for get in _applicable_installers(host):
        try:
            get(report)
        except BrokerError as error:
            failures.append(str(error))
            report(f"failed: {error}")
            continue
        if (found := find_server(host) or find_container()) is not None:
            report(f"RabbitMQ is at {found.place}")
            return found
        failures.append("the installed packages contain no usable server")
    why = "; ".join(failures) or "no RabbitMQ on this machine, and neither apt-get nor brew nor docker to install it"
    raise BrokerError(f"{why}: {INSTALL_HINT}")


def _applicable_installers(host: HostPaths) -> Iterator[Callable[[Callable[[str], None]], None]]:
    """Yield the installers that can work on this machine, best first. A container comes last because it cannot run as a private
    node."""
    if shutil.which("apt-get") and shutil.which("dpkg"):
        yield partial(_install_as_root, host.policy) if os.geteuid() == 0 else _install_for_user
    if shutil.which("brew"):
        yield _install_with_brew
    if shutil.which("docker"):
        yield start_container


def _candidate_homes(host: HostPaths) -> Iterator[Path]:
    yield from _find_package_homes(host.root)
    for prefix in host.brew_prefixes:
        yield prefix / "opt" / "rabbitmq"
    yield from _find_package_homes(user_folder())


def _find_package_homes(root: Path) -> list[Path]:
    """Return the server folders of Debian's package under `root`, newest first."""
    homes = (root / "usr/lib/rabbitmq/lib").glob("rabbitmq_server-*")
    return sorted(homes, key=lambda home: [int(part) for part in re.findall(r"\d+", home.name)], reverse=True)


def _inspect_home(home: Path) -> RabbitmqInstall | None:
    if not (home / "sbin" / "rabbitmq-server").is_file():
        return None
    erlang_bin = _find_packaged_erlang(home) or _find_homebrew_erlang(home)
    if erlang_bin is None and (found := shutil.which("erl")):
        erlang_bin = Path(found).parent
    if erlang_bin is None:
        return None
    epmd = _find_epmd(erlang_bin)
    return None if epmd is None else RabbitmqInstall(home=home, erlang_bin=erlang_bin, epmd=epmd)


def _find_packaged_erlang(home: Path) -> Path | None:
    """Return the bin folder of the Erlang that was unpacked with `home`, if `home` is
    `<root>/usr/lib/rabbitmq/lib/rabbitmq_server-*`."""
    if home.parts[-5:-1] != ("usr", "lib", "rabbitmq", "lib"):
        return None
    erlang_bin = home.parents[4] / "usr/lib/erlang/bin"
    return erlang_bin if (erlang_bin / "erl").is_file() else None


def _find_homebrew_erlang(home: Path) -> Path | None:
    """Return the bin folder of Homebrew's Erlang, if `home` is `<prefix>/opt/rabbitmq`; it may be missing in PATH."""
    erlang_bin = home.parents[1] / "opt/erlang/bin"
    return erlang_bin if home.parent.name == "opt" and (erlang_bin / "erl").is_file() else None


def _find_epmd(erlang_bin: Path) -> Path | None:
    beside = erlang_bin / "epmd"
    if beside.is_file():
        return beside
    packed = sorted(erlang_bin.parent.glob("erts-*/bin/epmd"))
    found = shutil.which("epmd")
    return packed[-1] if packed else Path(found) if found else None


def _install_as_root(policy: Path, report: Callable[[str], None]) -> None:
    """Install the system's package, without starting the service, which would listen on all interfaces."""
    report("installing rabbitmq-server with apt-get (its system service stays off)")
    is_policy_new = not policy.exists()
    if is_policy_new:
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
    try:
        command = ["apt-get", WAIT_FOR_OTHERS, "install", "-y", "--no-install-recommends", "rabbitmq-server"]
        if not run_command(command).ok:
            report("refreshing the package lists")
            run_checked(["apt-get", "update"])
            run_checked(command)
        if shutil.which("systemctl"):
            run_command(["systemctl", "disable", "rabbitmq-server"])
    finally:
        if is_policy_new:
            policy.unlink(missing_ok=True)


def _install_for_user(report: Callable[[str], None]) -> None:
    """Unpack Debian's packages into the user's folder, which appears only when it is complete."""
    folder = user_folder()
    building = folder.with_name(folder.name + ".building")
    shutil.rmtree(building, ignore_errors=True)
    downloads, root = building / "debs", building / "root"
    downloads.mkdir(parents=True)
    root.mkdir()
    report(f"fetching RabbitMQ and Erlang ({len(PACKAGES)} packages, 33 MB) with apt-get, without root")
    _download(downloads, report)
    report(f"unpacking into {folder}")
    for package in sorted(downloads.glob("*.deb")):
        run_checked(["dpkg", "-x", str(package), str(root)])
    starter = root / "usr/lib/erlang/bin/erl"
    starter.write_text(starter.read_text().replace("/usr/lib/erlang", str(folder / "usr/lib/erlang")))
    shutil.rmtree(folder, ignore_errors=True)
    root.rename(folder)
    shutil.rmtree(building)
    answer = run_command([str(folder / "usr/lib/erlang/bin/erl"), "-noshell", "-eval", "crypto:start(), halt(0)."])
    if not answer.ok:
        shutil.rmtree(folder)
        raise BrokerError(f"Erlang does not start here ({answer.tail})")


def _install_with_brew(report: Callable[[str], None]) -> None:
    report("installing rabbitmq with brew (its service stays off)")
    run_checked(["brew", "install", "rabbitmq"])


def _download(folder: Path, report: Callable[[str], None]) -> None:
    download = ["apt-get", "download", *PACKAGES]
    if run_command(download, cwd=folder).ok:
        return
    report("the system's package lists are missing or outdated: fetching separate ones")
    lists = folder.parent / "apt"
    (lists / "lists" / "partial").mkdir(parents=True)
    (lists / "cache" / "archives" / "partial").mkdir(parents=True)
    options = [f"-oDir::State::lists={lists / 'lists'}", f"-oDir::Cache={lists / 'cache'}"]
    run_checked(["apt-get", *options, "update"], cwd=folder)
    run_checked(["apt-get", *options, "download", *PACKAGES], cwd=folder)


def main() -> int:
    try:
        install(lambda line: print(line, flush=True))  # noqa: T201
    except SwarmqError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
