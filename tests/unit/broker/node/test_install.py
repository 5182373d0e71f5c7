"""Where a server is looked for, and what is said when there is none."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from swarmq.broker.node import install
from swarmq.broker.node.container import BrokerContainer, find_container
from swarmq.broker.node.install import find_server
from swarmq.errors import BrokerError


def plant(root: Path, version: str, *, erlang: bool = True) -> Path:
    """A server laid out like Debian's package under `root`."""
    home = root / f"usr/lib/rabbitmq/lib/rabbitmq_server-{version}"
    executable(home / "sbin/rabbitmq-server")
    if erlang:
        executable(root / "usr/lib/erlang/bin/erl")
        executable(root / "usr/lib/erlang/erts-15.0/bin/epmd")
    return home


def executable(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)


APT_GET = """\
import pathlib, sys
if "download" in sys.argv:
    if not any("Dir::State::lists" in word for word in sys.argv):
        sys.exit("E: Unable to locate package")  # the system's lists were never fetched
    for package in sys.argv[sys.argv.index("download") + 1:]:
        pathlib.Path(package + ".deb").touch()
"""
DPKG = """\
import pathlib, sys
_, option, package, root = sys.argv
assert option == "-x"
if "rabbitmq-server" in package:
    for name in ("rabbitmq/lib/rabbitmq_server-4.0.5/sbin/rabbitmq-server", "erlang/bin/erl", "erlang/bin/epmd"):
        path = pathlib.Path(root, "usr/lib", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\\nROOTDIR=/usr/lib/erlang\\nexit %d\\n")
        path.chmod(0o755)
"""


def plant_apt(machine: Path, *, erlang_exits: int) -> None:
    """An apt-get without package lists, and a dpkg whose packages hold a server."""
    for name, code in (("apt-get", APT_GET), ("dpkg", DPKG.replace("%d", str(erlang_exits)))):
        executable(machine / "bin" / name)
        (machine / "bin" / name).write_text(f"#!{sys.executable} -IS\n{code}")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with nothing on it: system, Homebrew and user folder are empty folders."""
    monkeypatch.delenv(install.HOME_VARIABLE, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path


def host(machine: Path) -> install.HostPaths:
    return install.HostPaths(root=machine / "system", brew_prefixes=(machine / "brew",))


def test_nothing_is_found_where_nothing_is(machine: Path) -> None:
    assert find_server(host(machine)) is None


def test_the_systems_server_comes_before_the_users(machine: Path) -> None:
    mine = plant(machine / "data/swarmq/rabbitmq", "4.9.9")
    found = find_server(host(machine))
    assert found is not None
    assert found.home == mine
    system = plant(machine / "system", "3.10.8")
    found = find_server(host(machine))
    assert found is not None
    assert found.home == system
    assert found.erlang_bin == machine / "system/usr/lib/erlang/bin"
    assert found.epmd == machine / "system/usr/lib/erlang/erts-15.0/bin/epmd"


def test_the_newest_of_several_is_taken(machine: Path) -> None:
    plant(machine / "system", "3.9.20")
    newest = plant(machine / "system", "3.10.8")
    found = find_server(host(machine))
    assert found is not None
    assert found.home == newest


def test_homebrews_server_uses_the_erlang_in_path(machine: Path) -> None:
    executable(machine / "brew/opt/rabbitmq/sbin/rabbitmq-server")
    assert find_server(host(machine)) is None  # no Erlang yet
    executable(machine / "bin/erl")
    executable(machine / "bin/epmd")
    found = find_server(host(machine))
    assert found is not None
    assert found.home == machine / "brew/opt/rabbitmq"
    assert found.erlang_bin == machine / "bin"


def test_a_chosen_server_comes_first_and_must_be_one(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(machine / "system", "3.10.8")
    chosen = plant(machine / "elsewhere", "4.3.6")
    monkeypatch.setenv(install.HOME_VARIABLE, str(chosen))
    found = find_server(host(machine))
    assert found is not None
    assert found.home == chosen
    monkeypatch.setenv(install.HOME_VARIABLE, str(machine))
    with pytest.raises(BrokerError, match="has no sbin/rabbitmq-server"):
        find_server(host(machine))


def test_where_it_cannot_be_installed_the_other_ways_are_named(machine: Path) -> None:
    with pytest.raises(BrokerError) as refusal:
        install.install(lambda _: None, host(machine))
    assert "neither apt-get nor brew nor docker" in str(refusal.value)
    for way in ("apt-get install", "brew install rabbitmq", "docker compose up", "SWARMQ_AMQP_URL"):
        assert way in str(refusal.value)


def test_an_installed_server_is_reported_and_not_installed_again(machine: Path) -> None:
    home = plant(machine / "system", "3.10.8")
    said: list[str] = []
    assert install.install(said.append, host(machine)).place == str(home)
    assert said == [f"RabbitMQ is at {home}"]


def test_without_root_the_packages_are_unpacked_into_the_users_folder_once(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    plant_apt(machine, erlang_exits=0)
    said: list[str] = []
    server = install.install(said.append, host(machine))
    assert isinstance(server, install.RabbitmqInstall)
    folder = machine / "data/swarmq/rabbitmq"
    assert server.home == folder / "usr/lib/rabbitmq/lib/rabbitmq_server-4.0.5"
    assert f"ROOTDIR={folder}/usr/lib/erlang" in (server.erlang_bin / "erl").read_text()
    assert any("without root" in line for line in said)
    said.clear()
    assert install.install(said.append, host(machine)) == server
    assert said == [f"RabbitMQ is at {server.home}"]


def test_an_erlang_that_does_not_start_is_not_kept(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    plant_apt(machine, erlang_exits=1)
    with pytest.raises(BrokerError, match="Erlang does not start here"):
        install.install(lambda _: None, host(machine))
    assert find_server(host(machine)) is None
    assert not (machine / "data/swarmq/rabbitmq").exists()


ROOT_APT_GET = """\
import pathlib, sys
log, policy, machine = map(pathlib.Path, LOG_POLICY_MACHINE)
with log.open("a") as file:
    print(*sys.argv[1:], policy.read_text().split()[-1] if policy.exists() else "starts its service", file=file)
if "install" in sys.argv:
    if "update" not in log.read_text():
        sys.exit("E: Unable to locate package rabbitmq-server")
    for name in ("rabbitmq/lib/rabbitmq_server-4.0.5/sbin/rabbitmq-server", "erlang/bin/erl", "erlang/bin/epmd"):
        path = machine / "system/usr/lib" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
"""


def program(machine: Path, name: str, code: str) -> None:
    executable(machine / "bin" / name)
    (machine / "bin" / name).write_text(f"#!{sys.executable} -IS\n{code}")


def test_as_root_the_systems_package_is_installed_and_its_service_stays_off(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, policy = machine / "log", host(machine).policy
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    policy.parent.mkdir(parents=True)
    program(
        machine, "apt-get", ROOT_APT_GET.replace("LOG_POLICY_MACHINE", repr(tuple(map(str, (log, policy, machine)))))
    )
    program(machine, "dpkg", "")
    program(machine, "systemctl", f"import sys; open({str(log)!r}, 'a').write(' '.join(sys.argv[1:]))")
    said: list[str] = []
    assert install.install(said.append, host(machine)).place.startswith(str(machine / "system"))
    assert "refreshing the package lists" in said
    install_line = "-oDPkg::Lock::Timeout=300 install -y --no-install-recommends rabbitmq-server 101"
    assert log.read_text().splitlines() == [install_line, "update 101", install_line, "disable rabbitmq-server"]
    assert not policy.exists()


def test_where_apt_fails_brew_is_asked_and_its_erlang_need_not_be_in_path(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    plant_apt(machine, erlang_exits=1)
    program(
        machine,
        "brew",
        "import pathlib, sys\n"
        "assert sys.argv[1:] == ['install', 'rabbitmq']\n"
        f"for name in ('rabbitmq/sbin/rabbitmq-server', 'erlang/bin/erl', 'erlang/bin/epmd'):\n"
        f"    path = pathlib.Path({str(machine / 'brew/opt')!r}, name)\n"
        "    path.parent.mkdir(parents=True, exist_ok=True)\n"
        "    path.touch()\n",
    )
    said: list[str] = []
    server = install.install(said.append, host(machine))
    assert isinstance(server, install.RabbitmqInstall)
    assert (server.home, server.erlang_bin) == (machine / "brew/opt/rabbitmq", machine / "brew/opt/erlang/bin")
    assert any("failed: Erlang does not start here" in line for line in said)


DOCKER = """\
import os, pathlib, sys
machine = pathlib.Path(MACHINE)
state = machine / "container"
with (machine / "log").open("a") as log:
    print(*sys.argv[1:], file=log)
match sys.argv[1]:
    case "run":
        if (machine / "broken").exists():
            sys.exit("docker: Cannot connect to the Docker daemon")
        state.write_text(os.environ["RABBITMQ_DEFAULT_PASS"])
    case "start" | "exec":
        sys.exit(not state.exists())
    case "rm":
        state.unlink(missing_ok=True)
"""


def test_where_nothing_else_is_docker_runs_one_on_loopback_with_a_password_of_its_own(machine: Path) -> None:
    program(machine, "docker", DOCKER.replace("MACHINE", repr(str(machine))))
    made = install.install(lambda _: None, host(machine))
    assert isinstance(made, BrokerContainer)
    [line] = [line for line in (machine / "log").read_text().splitlines() if line.startswith("run ")]
    assert f"--publish 127.0.0.1:{made.amqp_port}:5672 --publish 127.0.0.1:{made.management_port}:15672" in line
    assert line.endswith("rabbitmq:4-management")
    assert made.password == (machine / "container").read_text()
    assert made.password not in line, "other users see command lines"
    assert (machine / "data/swarmq/container.json").stat().st_mode & 0o77 == 0
    said: list[str] = []
    assert install.install(said.append, host(machine)) == made, "it is found again, and started if it was not"
    assert said == [f"RabbitMQ is at {made.place}"]
    assert made.amqp_url == f"amqp://swarmq:{made.password}@127.0.0.1:{made.amqp_port}/"


def test_a_container_that_does_not_start_keeps_its_queues(machine: Path) -> None:
    program(machine, "docker", DOCKER.replace("MACHINE", repr(str(machine))))
    install.install(lambda _: None, host(machine))
    (machine / "container").unlink()
    (machine / "log").unlink()
    with pytest.raises(BrokerError, match="`docker start swarmq-rabbitmq` says why"):
        install.install(lambda _: None, host(machine))
    assert {line.split()[0] for line in (machine / "log").read_text().splitlines()} == {"start"}


def test_a_docker_that_does_not_work_leaves_the_other_ways(machine: Path) -> None:
    program(machine, "docker", DOCKER.replace("MACHINE", repr(str(machine))))
    (machine / "broken").touch()
    with pytest.raises(BrokerError, match=r"Cannot connect to the Docker daemon.*: get RabbitMQ 3\.10 or newer"):
        install.install(lambda _: None, host(machine))
    assert find_container() is None
