"""The clients invited to a run: a JSON file in the run folder, written by `swarmq client` and read by the proxies.

A removed name stays removed: keys are derived from the name, and trained episodes stay attributed to it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from swarmq.errors import ConfigError
from swarmq.messages import NAME
from swarmq.runtime.files import CachedFile, locked_for_change, write_atomically

REUSE_S = 0.5
"""Seconds for which a proxy reuses the revoked names that it read last; it may accept a removed client for this long."""


class InvitedClient(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A client that was invited. Times are Unix seconds."""

    name: str
    added_at: float
    removed_at: float | None = None
    broker_user: str = ""
    """The client's user in RabbitMQ; empty if it may only use HTTP."""


class ClientRegistry:
    """The registry file of a run, opened for changes under a lock and written atomically."""

    def __init__(self, path: Path, known: dict[str, InvitedClient]) -> None:
        self._path = path
        self.entries = known

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator[ClientRegistry]:
        with locked_for_change(path):
            yield cls(path, read_clients(path))

    def check_new(self, name: str) -> None:
        """Raise ConfigError if the name is invalid or was ever in use."""
        if not NAME.fullmatch(name):
            raise ConfigError(f"{name!r}: a client's name is 1 to 40 lower-case letters, digits or dashes")
        if member := self.entries.get(name):
            state = "is a client already" if member.removed_at is None else "was removed, and its keys stay refused"
            raise ConfigError(f"{name!r} {state}: choose another name, e.g. {name[:36]}-2")

    def remove(self, name: str, *, now: float) -> InvitedClient:
        """Revoke a name, also one that was never invited. Removing a name again changes nothing."""
        member = self.entries.get(name) or InvitedClient(name=name, added_at=now)
        if member.removed_at is None:
            member = msgspec.structs.replace(member, removed_at=now)
            self.put(member)
        return member

    def put(self, member: InvitedClient) -> None:
        self.entries[member.name] = member
        write_atomically(self._path, msgspec.json.format(msgspec.json.encode(list(self.entries.values()))))


class RevokedNames:
    """The set of revoked names, kept up to date with the registry file: `name in revoked`."""

    def __init__(self, path: Path) -> None:
        self._file = CachedFile(path, lambda: read_revoked(path), frozenset[str]())
        self._names: frozenset[str] = frozenset()
        self._read_at = -REUSE_S

    def __contains__(self, name: object) -> bool:
        now = time.monotonic()
        if now - self._read_at >= REUSE_S:
            self._read_at = now
            self._names = self._file.value()
        return name in self._names


def read_revoked(path: Path) -> frozenset[str]:
    return frozenset(one.name for one in read_clients(path).values() if one.removed_at is not None)


def read_clients(path: Path) -> dict[str, InvitedClient]:
    """Return name -> client, the oldest first. Raises ConfigError if the file is damaged."""
    try:
        members = msgspec.json.decode(path.read_bytes(), type=list[InvitedClient])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"{path}: the registry of clients cannot be read ({error}) and cannot be recreated, because it lists the revoked keys. "
            "Restore it from a copy; or remove it and the file `secret` beside it, which ends every key, and invite clients again"
        ) from error
    return {member.name: member for member in members}
