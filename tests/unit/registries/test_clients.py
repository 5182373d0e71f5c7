"""Who was invited, who was removed, and how a proxy learns of it."""

import time

import pytest

from swarmq import keys
from swarmq.errors import ConfigError, KeyRefusedError
from swarmq.registries.clients import ClientRegistry, InvitedClient, RevokedNames, read_clients

ROOT = b"r" * 32


@pytest.fixture
def path(tmp_path):
    return tmp_path / "clients.json"


def put(path, name, removed_at=None):
    with ClientRegistry.open(path) as members:
        members.put(InvitedClient(name=name, added_at=1.0, removed_at=removed_at))


def test_names_are_given_once(path):
    put(path, "alice")
    put(path, "bob", removed_at=2.0)
    assert list(read_clients(path)) == ["alice", "bob"]
    with ClientRegistry.open(path) as members:
        with pytest.raises(ConfigError, match="is a client already: choose another name, e.g. alice-2"):
            members.check_new("alice")
        with pytest.raises(ConfigError, match="was removed"):
            members.check_new("bob")
        with pytest.raises(ConfigError, match="lower-case"):
            members.check_new("Alice Smith")


def test_a_damaged_file_names_itself(path):
    path.write_text("rubbish")
    with pytest.raises(ConfigError, match="clients.json"):
        read_clients(path)


def test_the_keys_of_a_removed_client_are_refused_and_nobody_elses(path, monkeypatch):
    removed = RevokedNames(path)
    clock = [time.monotonic()]
    monkeypatch.setattr("swarmq.registries.clients.time.monotonic", lambda: clock[0])
    put(path, "alice")
    put(path, "bob")

    def key(client):
        claims = keys.Claims(run="r", client=client, episode_id="e", policies=("main",), expires_at=1e12)
        return keys.mint(keys.derive_client_secret(ROOT, client), claims)

    def token(client):
        made = keys.Operator(run="r", name=client, roles=("rollout",), expires_at=1e12, by_client=True)
        return keys.mint_operator(keys.derive_client_secret(ROOT, client), made)

    for name in ("alice", "bob"):
        assert keys.verify(ROOT, key(name), run="r", now=0.0, removed=removed).client == name
    put(path, "alice", removed_at=3.0)
    clock[0] += 1
    with pytest.raises(KeyRefusedError, match="client 'alice' was removed"):
        keys.verify(ROOT, key("alice"), run="r", now=0.0, removed=removed)
    with pytest.raises(KeyRefusedError, match="client 'alice' was removed"):
        keys.verify_operator(ROOT, token("alice"), run="r", now=0.0, removed=removed)
    assert keys.verify(ROOT, key("bob"), run="r", now=0.0, removed=removed).client == "bob"
