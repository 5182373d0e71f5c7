"""AMQP URLs of a RabbitMQ: one URL, or the URLs of several nodes of one cluster, separated by commas.

The nodes share scheme, user, password, virtual host and parameters, and differ in host and port. A comma separates two URLs
only if a scheme follows it, so a password may contain commas.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from urllib.parse import SplitResult, unquote, urlsplit

from swarmq.errors import BrokerError

URL_HINT = "write it as amqp://user:password@host:5672/vhost"
LIST_HINT = "write the whole URL of each node, separated by commas: amqp://user:password@host1:5672/,amqp://user:password@host2:5672/"
SECRET = ("password", "query string")
SEPARATOR = re.compile(r"\s*,\s*(?=[a-z][a-z0-9+.-]*://)")
DEFAULT_PORT = {"amqp": 5672, "amqps": 5671}


def split_nodes(urls: str) -> tuple[str, ...]:
    """Return the URL of each node. Raises BrokerError if a URL is malformed, listed twice, or differs from the others in
    more than host and port."""
    if urls.rstrip().endswith(","):
        raise BrokerError(f"the broker's url ends with a comma: {LIST_HINT}")
    nodes = tuple(SEPARATOR.split(urls.strip()))
    places = [redact_node(node) for node in nodes]
    first, *others = [_common_parts(node) for node in nodes]
    for place, other in zip(places[1:], others, strict=True):
        for what, value in other.items():
            if value != first[what]:
                shown = "" if what in SECRET else f" ({first[what]!r} and {value!r})"
                raise BrokerError(
                    f"the broker's url lists {places[0]} and {place} with another {what}{shown}: "
                    "the nodes of one cluster differ in host and port alone"
                )
    if twice := [place for place in places if places.count(place) > 1]:
        raise BrokerError(f"the broker's url lists {twice[0]} twice: list each node of the cluster once")
    return nodes


def map_nodes(urls: str, change: Callable[[str], str]) -> str:
    """Return `urls` with the URL of each node replaced by `change(url)`."""
    return ",".join(map(change, split_nodes(urls)))


def redact_url(urls: str) -> str:
    """Return `host:port/vhost` of every node, without user and password, for messages. Raises BrokerError for malformed URLs."""
    return ", ".join(map(redact_node, split_nodes(urls)))


def redact_node(url: str) -> str:
    """Return `host:port/vhost` of one node's URL, without user and password."""
    parts = _parse(url)
    vhost = _vhost(parts)
    return f"{parts.hostname}:{parts.port or DEFAULT_PORT[parts.scheme]}" + ("" if vhost == "/" else f"/{vhost}")


def _common_parts(url: str) -> dict[str, str]:
    """Return name -> value of the parts of a URL that all nodes of a cluster share. Raises BrokerError for a malformed URL."""
    parts = _parse(url)
    return {
        "scheme": parts.scheme,
        "virtual host": _vhost(parts),
        "user": unquote(parts.username or ""),
        "password": parts.password or "",
        "query string": parts.query,
    }


def _vhost(parts: SplitResult) -> str:
    return unquote(parts.path[1:]) or "/"


def _parse(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        if "," in parts.netloc.rpartition("@")[2]:
            raise BrokerError(f"the broker's url lists hosts inside of one URL: {LIST_HINT}")
        _ = parts.port
    except ValueError as error:
        raise BrokerError(f"the broker's url is malformed ({error}): {URL_HINT}") from error
    if parts.scheme not in DEFAULT_PORT or not parts.hostname:
        raise BrokerError(f"the broker's url needs amqp:// or amqps:// and a host: {URL_HINT}")
    return parts
