"""URLs of one node and of a cluster, shown without the password."""

from __future__ import annotations

import pytest

from swarmq.errors import BrokerError
from swarmq.runtime.amqp_urls import map_nodes, redact_url, split_nodes

CLUSTER = "amqp://u:secret@a:1/v,amqp://u:secret@b:2/v,amqp://u:secret@[::1]/v"


@pytest.mark.parametrize(
    ("url", "where"),
    [
        ("amqp://u:p@host:1234/", "host:1234"),
        ("amqp://u:p@host", "host:5672"),
        ("amqps://u:p@host/team", "host:5671/team"),
        ("amqp://u:p@host/%2F", "host:5672"),
        ("amqp://u:p@[::1]:5000/a%20b?heartbeat=3", "::1:5000/a b"),
    ],
)
def test_an_address_names_the_place_without_the_password(url: str, where: str) -> None:
    assert redact_url(url) == where


@pytest.mark.parametrize(
    "url", ["", "host:5672", "http://host/", "amqp://", "amqp://h:99999", "amqp://h:port", "amqp://[::1"]
)
def test_a_bad_url_is_refused_with_an_example(url: str) -> None:
    with pytest.raises(BrokerError, match="amqp://user:password@host:5672/vhost"):
        redact_url(url)


def test_a_comma_separates_the_nodes_of_a_cluster() -> None:
    assert split_nodes(CLUSTER) == ("amqp://u:secret@a:1/v", "amqp://u:secret@b:2/v", "amqp://u:secret@[::1]/v")
    assert split_nodes(" amqp://a/ ,\n amqp://b/ ") == ("amqp://a/", "amqp://b/")
    assert redact_url(CLUSTER) == "a:1/v, b:2/v, ::1:5672/v"


def test_a_password_with_a_comma_is_one_url() -> None:
    assert split_nodes("amqp://u:se,cret@a/") == ("amqp://u:se,cret@a/",)


def test_every_node_is_changed_alike() -> None:
    assert map_nodes(CLUSTER, lambda url: url + "?x=1").count("/v?x=1") == 3


@pytest.mark.parametrize(
    ("urls", "words"),
    [
        ("amqp://u:secret@a/,amqps://u:secret@b/", "a:5672 and b:5671 with another scheme ('amqp' and 'amqps')"),
        ("amqp://u:secret@a/,amqp://x:secret@b/", "a:5672 and b:5672 with another user ('u' and 'x')"),
        ("amqp://u:secret@a/,amqp://u:other-secret@b/", "a:5672 and b:5672 with another password:"),
        ("amqp://u:secret@a/,amqp://u:secret@b/v", "with another virtual host ('/' and 'v')"),
        ("amqp://u:secret@a/?heartbeat=5,amqp://u:secret@b/", "with another query string:"),
        ("amqp://u:secret@a/,amqp://u:secret@b/,amqp://u:secret@a:5672/", "lists a:5672 twice"),
        ("amqp://u:secret@a,b/", "write the whole URL of each node"),
        ("amqp://u:secret@a:1,b:2/", "write the whole URL of each node"),
        ("amqp://u:secret@a/,http://u:secret@b/", "needs amqp:// or amqps://"),
        ("amqp://u:secret@a/,", "ends with a comma"),
    ],
)
def test_a_list_that_is_no_cluster_is_refused_without_the_password(urls: str, words: str) -> None:
    with pytest.raises(BrokerError) as refused:
        split_nodes(urls)
    assert words in str(refused.value)
    assert "secret" not in str(refused.value)


def test_a_default_vhost_may_be_written_in_two_ways() -> None:
    assert len(split_nodes("amqp://a,amqp://b/,amqp://c/%2F")) == 3
