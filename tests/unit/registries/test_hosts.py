"""Which hosts were invited, and which of them may still bring engines and proxies into the run."""

import pytest

from swarmq.errors import ConfigError
from swarmq.registries.hosts import HostRegistry, InvitedHost, check_joinable, read_hosts


@pytest.fixture
def path(tmp_path):
    return tmp_path / "hosts.json"


def put(path, name, **fields):
    with HostRegistry.open(path) as hosts:
        hosts.put(InvitedHost(name=name, added_at=1.0, broker_user=f"r.host:{name}", **{"expires_at": 100.0, **fields}))


def test_names_are_given_once(path):
    put(path, "gpu2")
    put(path, "gpu3", removed_at=2.0)
    with HostRegistry.open(path) as hosts:
        with pytest.raises(ConfigError, match="was invited already: choose another name, e.g. gpu2-2"):
            hosts.check_new("gpu2")
        with pytest.raises(ConfigError, match="was removed"):
            hosts.check_new("gpu3")
        with pytest.raises(ConfigError, match="lower-case"):
            hosts.check_new("host:gpu2")


def test_a_host_may_join_until_its_invite_expires_or_it_is_removed(path):
    put(path, "gpu2")
    put(path, "gpu3", removed_at=2.0)
    hosts = read_hosts(path)
    check_joinable(hosts, "gpu2", 100.0)
    with pytest.raises(ConfigError, match="has expired"):
        check_joinable(hosts, "gpu2", 101.0)
    for name in ("gpu3", "unknown"):
        with pytest.raises(ConfigError, match="not among the invited hosts"):
            check_joinable(hosts, name, 1.0)


def test_a_part_is_forgotten_on_whichever_host_it_ran(path):
    put(path, "gpu2", engines={"http://gpu2:1": "main", "http://gpu2:2": "main"})
    put(path, "gpu3", proxies=("http://gpu3:1/v1",))
    with HostRegistry.open(path) as hosts:
        for url in ("http://gpu2:1", "http://gpu3:1/v1", "http://unknown"):
            hosts.drop_url(url)
    assert [(host.engines, host.proxies) for host in read_hosts(path).values()] == [
        ({"http://gpu2:2": "main"}, ()),
        ({}, ()),
    ]


def test_a_damaged_file_names_itself(path):
    path.write_text("rubbish")
    with pytest.raises(ConfigError, match="hosts.json"):
        read_hosts(path)
