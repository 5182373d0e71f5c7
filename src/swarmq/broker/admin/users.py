"""Who may do what in RabbitMQ, through its management API.

| user                      | configure | write            | read                            |
|---|---|---|---|
| operator (the run's url)  | .*        | .*               | .*                              |
| client, `<run>.<client>`  | nothing   | `swarmq.clients` | tickets, tasks, eval of its run |
| viewer                    | nothing   | nothing          | nothing; sees depths in the UI  |

and in `swarmq.clients` a client may use its own routing keys alone. Calls block: a person waits for them.
"""

from __future__ import annotations

import base64
import json
import re
import ssl
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import msgspec

from swarmq.broker import topology
from swarmq.errors import BrokerError

ANSWER_S = 20.0
MANAGEMENT_PORT = {"http": 15672, "https": 15671}
DISABLED_USER = {"password_hash": "", "tags": ""}
"""A new user: nobody can log in before all of its rights and limits stand."""
MAX_CONNECTIONS = 256
MAX_CHANNELS = 512
"""A client uses one connection to publish and one for each queue it takes from; an invite may be used on many machines."""


class ManagementApi(msgspec.Struct, frozen=True, kw_only=True):
    """The management API of a broker, and the virtual host that is meant. Raises BrokerError with what to do."""

    url: str
    user: str
    password: str
    vhost: str = "/"
    ca: bytes = b""

    @classmethod
    def of(cls, amqp_url: str, management_url: str | None = None, *, ca: bytes = b"") -> ManagementApi:
        """With the credentials of `management_url`, or else those of `amqp_url`; its usual port unless it is given."""
        amqp = urlsplit(amqp_url)
        api = urlsplit(management_url or f"http://{amqp.hostname}:{MANAGEMENT_PORT['http']}/")
        if api.scheme not in MANAGEMENT_PORT or not api.hostname:
            raise BrokerError(
                f"{management_url!r} is not the url of a management API: http://user:password@host:15672/"
            )
        host = f"[{api.hostname}]" if ":" in api.hostname else api.hostname
        return cls(
            url=f"{api.scheme}://{host}:{api.port or MANAGEMENT_PORT[api.scheme]}{api.path.rstrip('/')}",
            user=unquote(api.username or amqp.username or "guest"),
            password=unquote(api.password or amqp.password or "guest"),
            vhost=unquote(amqp.path[1:]) or "/",
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
        """Make the user of a client, with a client's rights and no more; returns its name."""
        user = topology.client_user(run, client)
        self._put(f"users/{quote(user)}", DISABLED_USER)
        self.grant(user)
        self._put(f"user-limits/{quote(user)}/max-connections", {"value": max_connections})
        self._put(f"user-limits/{quote(user)}/max-channels", {"value": max_channels})
        self._put(f"users/{quote(user)}", {"password": password, "tags": ""})
        return user

    def grant(self, user: str) -> None:
        """Give a client's user a client's rights, and take others that it had."""
        run = user.partition(".")[0]
        self._rights(
            user, write=_exact_pattern(topology.CLIENTS), read=rf"^swarmq\.{re.escape(run)}\.(tickets|tasks|eval)\..*$"
        )
        own = rf"^{re.escape(user)}\.(in|(tasks|eval)\..+)$"
        self._put(
            f"topic-permissions/{self._vhost}/{quote(user)}", {"exchange": topology.CLIENTS, "write": own, "read": "^$"}
        )

    def add_viewer(self, name: str, password: str) -> None:
        """Make a user for the management UI that sees how full queues are, and no message."""
        self._put(f"users/{quote(name)}", DISABLED_USER)
        self._rights(name, write="^$", read="^$")
        self._put(f"users/{quote(name)}", {"password": password, "tags": "management"})

    def remove(self, user: str) -> None:
        """Delete a user and close its connections; one that is gone already is no error."""
        self._ask("DELETE", f"users/{quote(user)}", missing_ok=True)
        for connection in self._ask("GET", "connections") or []:
            if connection.get("user") == user:
                self._ask("DELETE", f"connections/{quote(connection['name'], safe='')}", missing_ok=True)

    def users(self) -> set[str]:
        return {one["name"] for one in self._ask("GET", "users")}

    def connections(self, user: str) -> int:
        """How many it has open; the API learns of them some seconds late."""
        return sum(one.get("user") == user for one in self._ask("GET", "connections") or [])

    def _rights(self, user: str, *, write: str, read: str) -> None:
        self._put(f"permissions/{self._vhost}/{quote(user)}", {"configure": "^$", "write": write, "read": read})

    @property
    def _vhost(self) -> str:
        return quote(self.vhost, safe="")

    def _put(self, path: str, body: dict[str, Any]) -> None:
        self._ask("PUT", path, body)

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None, *, missing_ok: bool = False) -> Any:
        login = base64.b64encode(f"{self.user}:{self.password}".encode()).decode()
        headers = {"Authorization": f"Basic {login}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/api/{path}", data, headers, method=method)  # noqa: S310 - http(s), see `of`
        context = ssl.create_default_context(cadata=self.ca or None) if self.url.startswith("https") else None
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S, context=context) as answer:  # noqa: S310
                text = answer.read()
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 404 and missing_ok:
                    return None
                said = error.read(300).decode(errors="replace")
            hint = "its user needs the tag administrator" if error.code in (401, 403) else said
            raise BrokerError(
                f"the management API at {self.url} answered {error.code} to {method} {path}: {hint}"
            ) from error
        except (OSError, ValueError) as error:
            raise BrokerError(
                f"the management API at {self.url} cannot be reached ({error}): name it with --management URL, or invite "
                "the client with --http, which needs no RabbitMQ user"
            ) from error
        return json.loads(text) if text else None


def _exact_pattern(name: str) -> str:
    return f"^{re.escape(name)}$"
