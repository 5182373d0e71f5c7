"""Users and permissions in RabbitMQ, set through its management API.

 user                      | configure | write            | read                            |
---|---|---|---|
 operator (the run's url)  | .*        | .*               | .*                              |
 client, `<run>.<client>`  | nothing   | `swarmq.clients` | tickets, tasks, eval of its run |
 host, `<run>.host:<name>` | own feeds | the same, events | the same, and its run's events  |
 host of a study           | own feeds | the same         | the same, and its study's events |
 viewer                    | nothing   | nothing          | nothing; sees depths in the UI  |

In the exchange `swarmq.clients`, a client or host may use only its own routing keys; in `swarmq.events`, a host may use only those
of its run.
Methods block, because only an operator's commands use them.
"""

from __future__ import annotations

import base64
import json
import random
import re
import ssl
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import msgspec

from swarmq.broker import topology
from swarmq.errors import BrokerError
from swarmq.runtime.amqp_urls import SEPARATOR, split_nodes

ANSWER_S = 20.0
MANAGEMENT_PORT = {"http": 15672, "https": 15671}
DISABLED_USER = {"password_hash": "", "tags": ""}
"""Body that creates a user without a password, so that no login works before all permissions and limits are set."""
OWN_QUEUES = r"^amq\.gen-.*$"
"""Pattern of the names that RabbitMQ gives to nameless queues; they are exclusive to the connection that declares them."""
MAX_CONNECTIONS = 256
MAX_CHANNELS = 512
"""Maximum number of channels of one user. A client opens a connection for publishing and one for each queue; many machines
may share an invite."""


class QueueFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a queue from the management API, which reports them some seconds late."""

    ready: int
    published: int
    """Number of messages published to the queue since the broker started."""
    in_per_s: float
    out_per_s: float


class _Rate(msgspec.Struct, frozen=True):
    rate: float = 0.0


class _QueueStats(msgspec.Struct, frozen=True):
    publish: int = 0
    publish_details: _Rate = _Rate()
    deliver_get_details: _Rate = _Rate()


class _ListedQueue(msgspec.Struct, frozen=True):
    name: str
    messages_ready: int = 0
    message_stats: _QueueStats = _QueueStats()

    def figures(self) -> QueueFigures:
        stats = self.message_stats
        rates = {"in_per_s": stats.publish_details.rate, "out_per_s": stats.deliver_get_details.rate}
        return QueueFigures(ready=self.messages_ready, published=stats.publish, **rates)


class ManagementApi(msgspec.Struct, frozen=True, kw_only=True):
    """The management API of a broker and one virtual host. Methods raise BrokerError with what to do."""

    urls: tuple[str, ...]
    """One URL for each node of a cluster; each node's API serves the whole cluster."""
    user: str
    password: str
    vhost: str = "/"
    ca: bytes = b""

    @classmethod
    def of(cls, amqp_url: str, management_url: str | None = None, *, ca: bytes = b"") -> ManagementApi:
        """Create the API's client. Each URL may list the nodes of a cluster, separated by commas. The credentials come from
        `management_url` if it has any, else from `amqp_url`; without `management_url` the hosts are the broker's and the port is
        the API's default."""
        nodes = [urlsplit(node) for node in split_nodes(amqp_url)]
        default = [f"http://{_bracket_host(node.hostname or '')}:{MANAGEMENT_PORT['http']}/" for node in nodes]
        apis = [urlsplit(url) for url in (SEPARATOR.split(management_url) if management_url else default)]
        if any(api.scheme not in MANAGEMENT_PORT or not api.hostname for api in apis):
            raise BrokerError(
                "the url of the management API needs http:// or https:// and a host: http://user:password@host:15672/"
            )
        if len({(api.username, api.password) for api in apis}) > 1:
            raise BrokerError(
                "the urls of the management API have different users or passwords: the nodes of a cluster share them"
            )
        return cls(
            urls=tuple(
                f"{api.scheme}://{_bracket_host(api.hostname or '')}:{api.port or MANAGEMENT_PORT[api.scheme]}{api.path.rstrip('/')}"
                for api in apis
            ),
            user=unquote(apis[0].username or nodes[0].username or "guest"),
            password=unquote(apis[0].password or nodes[0].password or "guest"),
            vhost=unquote(nodes[0].path[1:]) or "/",
            ca=ca,
        )

    def add_client(
        self,
        run: str,
        client: str,
        password: str,
        *,
        max_connections: int = MAX_CONNECTIONS,
        max_channels: int = MAX_CHANNELS,
    ) -> str:
        """Create a client's user with a client's permissions, and return the user's name."""
        user = topology.client_user(run, client)
        self._put(f"users/{quote(user)}", DISABLED_USER)
        self.grant(user)
        self._enable(user, password, max_connections=max_connections, max_channels=max_channels)
        return user

    def add_host(self, run: str, host: str, password: str, *, emits: bool) -> str:
        """Create the user of a host that runs engines or proxies of this run, or trials of a study, and return the user's name.
        `emits`: whether the host publishes events."""
        user = topology.host_user(run, host)
        self._put(f"users/{quote(user)}", DISABLED_USER)
        self.grant_host(user, emits=emits)
        self._enable(user, password, max_connections=MAX_CONNECTIONS, max_channels=MAX_CHANNELS)
        return user

    def _enable(self, user: str, password: str, *, max_connections: int, max_channels: int) -> None:
        self._put(f"user-limits/{quote(user)}/max-connections", {"value": max_connections})
        self._put(f"user-limits/{quote(user)}/max-channels", {"value": max_channels})
        self._put(f"users/{quote(user)}", {"password": password, "tags": ""})

    def grant(self, user: str) -> None:
        """Set a client's permissions on its user, and remove any others."""
        run = user.partition(".")[0]
        self._rights(
            user, write=_exact_pattern(topology.CLIENTS), read=rf"^swarmq\.{re.escape(run)}\.(tickets|tasks|eval)\..*$"
        )
        self._topic_rights(user, topology.CLIENTS, write=rf"^{re.escape(user)}\.(in|(tasks|eval)\..+)$")

    def grant_host(self, user: str, *, emits: bool = True) -> None:
        """Set a host's permissions on its user, and remove any others."""
        run, events = user.partition(".")[0], re.escape(topology.EVENTS)
        self._rights(
            user,
            configure=OWN_QUEUES,
            write=rf"{OWN_QUEUES}|^({re.escape(topology.CLIENTS)}|{events})$",
            read=rf"{OWN_QUEUES}|^{events}$|^swarmq\.{re.escape(run)}\.(tickets|tasks|eval)\..*$",
        )
        own_keys, of_run = rf"^{re.escape(user)}\.(in|control|turns\.\d+|(tasks|eval)\..+)$", rf"^{re.escape(run)}\."
        self._topic_rights(user, topology.CLIENTS, write=own_keys)
        self._topic_rights(user, topology.EVENTS, write=of_run if emits else "^$", read=of_run)

    def add_viewer(self, name: str, password: str) -> None:
        """Create a user who sees queue depths in the management UI, but no messages."""
        self._put(f"users/{quote(name)}", DISABLED_USER)
        self._rights(name, write="^$", read="^$")
        self._put(f"users/{quote(name)}", {"password": password, "tags": "management"})

    def remove(self, user: str) -> None:
        """Delete a user, if it exists, and close its connections."""
        self._ask("DELETE", f"users/{quote(user)}", missing_ok=True)
        for connection in self._ask("GET", "connections") or []:
            if connection.get("user") == user:
                self._ask("DELETE", f"connections/{quote(connection['name'], safe='')}", missing_ok=True)

    def users(self) -> set[str]:
        return {one["name"] for one in self._ask("GET", "users")}

    def connections(self, user: str) -> int:
        """Return the number of open connections of `user`; the API reports them some seconds late."""
        return sum(one.get("user") == user for one in self._ask("GET", "connections") or [])

    def queue_figures(self, prefix: str) -> dict[str, QueueFigures]:
        """Return the figures of all queues whose name begins with `prefix`, by name."""
        columns = "name,messages_ready,message_stats.publish,message_stats.publish_details.rate,message_stats.deliver_get_details.rate"
        listed = self._ask("GET", f"queues/{self._vhost}?columns={columns}") or []
        found = msgspec.convert(listed, list[_ListedQueue])
        return {queue.name: queue.figures() for queue in found if queue.name.startswith(prefix)}

    def _rights(self, user: str, *, write: str, read: str, configure: str = "^$") -> None:
        self._put(f"permissions/{self._vhost}/{quote(user)}", {"configure": configure, "write": write, "read": read})

    def _topic_rights(self, user: str, exchange: str, *, write: str, read: str = "^$") -> None:
        self._put(
            f"topic-permissions/{self._vhost}/{quote(user)}", {"exchange": exchange, "write": write, "read": read}
        )

    @property
    def _vhost(self) -> str:
        return quote(self.vhost, safe="")

    def _put(self, path: str, body: dict[str, Any]) -> None:
        self._ask("PUT", path, body)

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None, *, missing_ok: bool = False) -> Any:
        """Send a request to the first node that can be reached, in random order, and return its JSON. Raises BrokerError."""
        unreachable: list[str] = []
        for url in random.sample(self.urls, len(self.urls)):
            try:
                return self._ask_node(url, method, path, body, missing_ok=missing_ok)
            except (OSError, ValueError) as error:
                unreachable.append(f"{url} ({error})")
        raise BrokerError(
            f"the management API cannot be reached at {'; '.join(unreachable)}: give its address with --management URL; clients "
            "that are invited with --http need no RabbitMQ user"
        )

    def _ask_node(self, url: str, method: str, path: str, body: dict[str, Any] | None, *, missing_ok: bool) -> Any:
        login = base64.b64encode(f"{self.user}:{self.password}".encode()).decode()
        headers = {"Authorization": f"Basic {login}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{url}/api/{path}", data, headers, method=method)  # noqa: S310 - http(s), see `of`
        context = ssl.create_default_context(cadata=self.ca or None) if url.startswith("https") else None
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S, context=context) as answer:  # noqa: S310
                text = answer.read()
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 404 and missing_ok:
                    return None
                body_text = error.read(300).decode(errors="replace")
            hint = "give its user the tag administrator" if error.code in (401, 403) else body_text
            raise BrokerError(
                f"the management API at {url} answered {error.code} to {method} {path}: {hint}"
            ) from error
        return json.loads(text) if text else None


def _bracket_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _exact_pattern(name: str) -> str:
    return f"^{re.escape(name)}$"
