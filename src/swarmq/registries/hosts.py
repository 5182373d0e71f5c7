"""The hosts invited to run engines and proxies: a JSON file in the run folder.

`swarmq host` adds and removes hosts. The collector records in it which engines and proxies each host has registered: `swarmq host
remove` removes them, too, and a restarted run uses them again. The name of a removed host cannot be used again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from swarmq.errors import ConfigError
from swarmq.messages import NAME
from swarmq.runtime.files import locked_for_change, write_atomically


class InvitedHost(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An invited host. Times are Unix seconds."""

    name: str
    added_at: float
    expires_at: float
    """Time until which its engines and proxies may join."""
    broker_user: str
    removed_at: float | None = None
    engines: dict[str, str] = {}
    """URL of an engine that has joined from this host -> its policy."""
    proxies: tuple[str, ...] = ()
    """URLs of the proxies that have joined from this host."""


class HostRegistry:
    """The registry file of a run, open for changes: locked, and written atomically."""

    def __init__(self, path: Path, known: dict[str, InvitedHost]) -> None:
        self._path = path
        self.entries = known

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator[HostRegistry]:
        with locked_for_change(path):
            yield cls(path, read_hosts(path))

    def check_new(self, name: str) -> None:
        """Raise ConfigError if the name is invalid, or belongs to an invited or removed host."""
        if not NAME.fullmatch(name):
            raise ConfigError(f"{name!r}: a host's name is 1 to 40 lower-case letters, digits or dashes")
        if host := self.entries.get(name):
            state = "was invited already" if host.removed_at is None else "was removed"
            raise ConfigError(f"host {name!r} {state}: choose another name, e.g. {name[:36]}-2")

    def get(self, name: str) -> InvitedHost:
        """Return a host. Raises ConfigError if it was never invited."""
        if (host := self.entries.get(name)) is None:
            raise ConfigError(f"no host {name!r}: invited are {', '.join(self.entries) or 'none'}")
        return host

    def remove(self, name: str, *, now: float) -> InvitedHost:
        """Mark a host as removed, and return it. Raises ConfigError if it was never invited."""
        host = self.get(name)
        self.put(msgspec.structs.replace(host, removed_at=host.removed_at or now, engines={}, proxies=()))
        return host

    def drop_url(self, url: str) -> None:
        """Remove the engine or proxy at `url` from its host's entry."""
        for host in list(self.entries.values()):
            if url in host.engines or url in host.proxies:
                engines = {other: policy for other, policy in host.engines.items() if other != url}
                proxies = tuple(other for other in host.proxies if other != url)
                self.put(msgspec.structs.replace(host, engines=engines, proxies=proxies))

    def put(self, host: InvitedHost) -> None:
        self.entries[host.name] = host
        write_atomically(self._path, msgspec.json.format(msgspec.json.encode(list(self.entries.values()))))


def check_joinable(hosts: Mapping[str, InvitedHost], name: str, now: float) -> None:
    """Raise ConfigError if engines and proxies of host `name` may not join, because it was removed or its invite has expired. `now`:
    Unix time."""
    host = hosts.get(name)
    if host is None or host.removed_at is not None:
        raise ConfigError(f"host {name!r} is not among the invited hosts: `swarmq host add` invites another")
    if now > host.expires_at:
        raise ConfigError(f"the invite of host {name!r} has expired: `swarmq host add` makes another one")


def read_hosts(path: Path) -> dict[str, InvitedHost]:
    """Return name -> host, oldest first; an empty map without a file. Raises ConfigError if the file is damaged."""
    try:
        hosts = msgspec.json.decode(path.read_bytes(), type=list[InvitedHost])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"{path}: the registry of hosts cannot be read ({error}): restore it from a copy, or remove it and invite the hosts again"
        ) from error
    return {host.name: host for host in hosts}
