"""What a private node's files say."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from swarmq.broker.node.files import (
    DISK_LIMIT_BYTES,
    build_environment,
    check_disk,
    extract_startup_error,
    is_password_new,
    load_identity,
    read_cookie,
    read_identities,
    take_lock,
    write_node_files,
)
from swarmq.errors import BrokerError

BAD_SETTING = """\
2026-01-01 10:00:00.378286+00:00 [error] <0.132.0> You've tried to set no_such_setting, but there is no such setting.
2026-01-01 10:00:00.578043+00:00 [error] <0.132.0>     collect_statistics

BOOT FAILED
2026-01-01 10:00:00.585336+00:00 [error] <0.132.0> ===========
2026-01-01 10:00:00.595239+00:00 [error] <0.132.0>     supervisor: {local,rabbit_prelaunch_sup}
Kernel pid terminated (application_controller)
"""


def test_last_words_are_the_first_errors_and_not_the_report() -> None:
    words = extract_startup_error(BAD_SETTING)
    assert words == "You've tried to set no_such_setting, but there is no such setting. / collect_statistics"


def test_last_words_without_errors_are_the_last_lines() -> None:
    assert extract_startup_error("one\n\nerl: not found\n") == "one / erl: not found"


def test_an_identity_is_kept_and_private(tmp_path: Path) -> None:
    first = load_identity(tmp_path, port=0, epmd_port=4)
    again = load_identity(tmp_path, port=0, epmd_port=4)
    assert (first.node, first.user, first.password) == (again.node, again.user, again.password)
    assert (first.amqp_port, first.management_port) == (again.amqp_port, again.management_port)
    assert (tmp_path / "node.json").stat().st_mode & 0o077 == 0


def test_two_folders_share_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one, other = (load_identity(tmp_path / name, port=0, epmd_port=4) for name in "ab")
    assert one.node != other.node
    assert one.password != other.password


def test_a_chosen_port_is_taken_or_refused_by_name(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(BrokerError, match=rf"port {port} is taken.*broker\.port"):
            load_identity(tmp_path, port=port, epmd_port=4)
    assert load_identity(tmp_path, port=port, epmd_port=4).amqp_port == port


@pytest.mark.parametrize("cut", [0, 20], ids=["emptied", "torn"])
def test_a_damaged_identity_is_recovered_from_the_nodes_other_files(tmp_path: Path, cut: int) -> None:
    first = load_identity(tmp_path, port=0, epmd_port=4)
    write_node_files(tmp_path, first, config="", advanced="[].")
    (tmp_path / "mnesia" / first.node).mkdir(parents=True)
    (tmp_path / "mnesia" / f"{first.node}-plugins-expand").mkdir()
    path = tmp_path / "node.json"
    path.write_bytes(path.read_bytes()[:cut])
    again = load_identity(tmp_path, port=0, epmd_port=4)
    kept = ("node", "user", "password", "amqp_port", "management_port")
    assert [getattr(again, name) for name in kept] == [getattr(first, name) for name in kept]
    assert not is_password_new(tmp_path, again)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
def test_where_its_settings_are_damaged_too_the_node_keeps_its_data_and_gets_a_new_password(
    tmp_path: Path, share: float
) -> None:
    first = load_identity(tmp_path, port=0, epmd_port=4)
    write_node_files(tmp_path, first, config="", advanced="[].")
    (tmp_path / "mnesia" / first.node).mkdir(parents=True)
    settings = (tmp_path / "rabbitmq.conf").read_text()
    cut = settings.index(first.password) + int(share * len(first.password))
    (tmp_path / "rabbitmq.conf").write_text(settings[:cut])
    (tmp_path / "node.json").write_bytes(b"")
    again = load_identity(tmp_path, port=0, epmd_port=4)
    assert (again.node, again.amqp_port) == (first.node, first.amqp_port)
    assert len(again.password) == len(first.password)
    assert again.password != first.password
    assert is_password_new(tmp_path, again)


def test_a_lock_is_held_once_and_free_when_closed(tmp_path: Path) -> None:
    lock = take_lock(tmp_path)
    with pytest.raises(BrokerError, match="in use by process"):
        take_lock(tmp_path)
    lock.close()
    take_lock(tmp_path).close()


def test_nothing_of_a_system_rabbitmq_reaches_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RABBITMQ_SERVER_ERL_ARGS", "-foreign")
    monkeypatch.setenv("ERL_LIBS", "/foreign")
    variables = build_environment(tmp_path, load_identity(tmp_path, port=0, epmd_port=4), Path("/opt/erlang/bin"))
    assert not {"RABBITMQ_SERVER_ERL_ARGS", "ERL_LIBS"} & set(variables)
    assert variables["PATH"].startswith("/opt/erlang/bin:")
    assert all("/etc/" not in value for name, value in variables.items() if name.startswith("RABBITMQ_"))


def test_the_node_listens_on_loopback_and_waits_a_week_for_an_acknowledgement(tmp_path: Path) -> None:
    identity = load_identity(tmp_path, port=0, epmd_port=4)
    write_node_files(tmp_path, identity, config="extra = 1\n", advanced="[].")
    settings = (tmp_path / "rabbitmq.conf").read_text()
    assert f"listeners.tcp.1 = 127.0.0.1:{identity.amqp_port}" in settings
    assert "management.tcp.ip = 127.0.0.1" in settings
    assert "consumer_timeout = 604800000" in settings
    assert settings.endswith("extra = 1\n")


def test_a_disk_on_which_rabbitmq_would_take_no_messages_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = DISK_LIMIT_BYTES
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free))
    check_disk(tmp_path)
    free = 10**9
    with pytest.raises(BrokerError, match=rf"{tmp_path} has 1.00 GB free, and RabbitMQ accepts no messages below 2 GB"):
        check_disk(tmp_path)


def test_a_node_that_joins_a_cluster_has_its_login_and_its_secret(tmp_path: Path) -> None:
    for name in ("node1", "node2"):
        (tmp_path / name).mkdir()
    first = load_identity(tmp_path / "node1", port=0, epmd_port=4)
    write_node_files(tmp_path / "node1", first, config="", advanced="[].")
    cookie = read_cookie(tmp_path / "node1")
    for _ in range(2):  # again after a damaged file
        second = load_identity(tmp_path / "node2", port=0, epmd_port=4, first=first)
        write_node_files(tmp_path / "node2", second, config="", advanced="[].", cookie=cookie)
        assert (second.user, second.password) == (first.user, first.password)
        assert second.node != first.node
        assert read_cookie(tmp_path / "node2") == cookie
        (tmp_path / "node2" / "home" / ".erlang.cookie").chmod(0o600)
        (tmp_path / "node2" / "home" / ".erlang.cookie").write_bytes(b"")
    assert read_identities(tmp_path) == [first, second]
