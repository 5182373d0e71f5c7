"""Who was invited to a run: a small file in its folder, written by `swarmq client`, read by the proxies.

A name that was removed stays removed: its keys are derived from it, and what it trained stays attributed to it.
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

LOOK_EVERY_S = 0.5
"""How soon a proxy notices that a client was removed."""


class InvitedClient(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A client that was invited. Times are Unix seconds."""

    name: str
    added_at: float
    removed_at: float | None = None
    broker_user: str = ""
    """Its user in RabbitMQ; empty where it may only use HTTP."""


class ClientRegistry:
    """The file of a run, opened for changes: nobody else changes it meanwhile, and it is written whole."""

    def __init__(self, path: Path, known: dict[str, InvitedClient]) -> None:
        self._path = path
        self.entries = known

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator[ClientRegistry]:
        with locked_for_change(path):
            yield cls(path, read_clients(path))

    def check_new(self, name: str) -> None:
        """Raises ConfigError for a name that cannot be given."""
        if not NAME.fullmatch(name):
            raise ConfigError(f"{name!r}: a client's name is 1 to 40 lower-case letters, digits or dashes")
        if member := self.entries.get(name):
            state = "is a client already" if member.removed_at is None else "was removed, and its keys stay refused"
            raise ConfigError(f"{name!r} {state}: choose another name, e.g. {name[:36]}-2")

    def remove(self, name: str, *, now: float) -> InvitedClient:
        """Also one that was never here: from now on it is refused. Removing again changes nothing."""
        member = self.entries.get(name) or InvitedClient(name=name, added_at=now)
        if member.removed_at is None:
            member = msgspec.structs.replace(member, removed_at=now)
            self.put(member)
        return member

    def put(self, member: InvitedClient) -> None:
        self.entries[member.name] = member
        write_atomically(self._path, msgspec.json.format(msgspec.json.encode(list(self.entries.values()))))


class RevokedNames:
    """`name in removed`, true soon after the file says so."""

    def __init__(self, path: Path) -> None:
        self._sheet = CachedFile(path, lambda: _removed(path), frozenset[str]())
        self._names: frozenset[str] = frozenset()
        self._looked_at = -LOOK_EVERY_S

    def __contains__(self, name: object) -> bool:
        now = time.monotonic()
        if now - self._looked_at >= LOOK_EVERY_S:
            self._looked_at = now
            self._names = self._sheet.value()
        return name in self._names


def _removed(path: Path) -> frozenset[str]:
    return frozenset(one.name for one in read_clients(path).values() if one.removed_at is not None)


def read_clients(path: Path) -> dict[str, InvitedClient]:
    """By name, the oldest first. Raises ConfigError for a damaged file."""
    try:
        members = msgspec.json.decode(path.read_bytes(), type=list[InvitedClient])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"{path}: who was invited cannot be read ({error}), and it cannot be made anew: it says whose keys are refused. Bring it "
            "back from a copy; or remove it and `secret` beside it, which ends every key, and invite clients anew"
        ) from error
    return {member.name: member for member in members}
