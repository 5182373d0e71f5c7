"""The clients of a run: how much each has done, with which versions of its code, and its last error."""

from __future__ import annotations

import msgspec

from swarmq.broker.client_rules import NAME_SEPARATOR
from swarmq.errors import SwarmqError
from swarmq.observe.index import RunIndex
from swarmq.registries.clients import read_clients as read_registry

RATE_S = 600.0
"""Length of the period over which rates are measured, in seconds; it ends with the run's newest begin of an episode."""


class CodeVersion(msgspec.Struct, frozen=True, kw_only=True):
    version: str
    first_at: float
    last_at: float
    episodes: int


class LastError(msgspec.Struct, frozen=True, kw_only=True):
    at: float
    text: str
    episode: str


class ClientView(msgspec.Struct, frozen=True, kw_only=True):
    client: str
    episodes: int
    trained: int
    dropped: int
    failed: int
    evaluated: int
    first_at: float
    last_at: float
    """Unix time at which its newest episode began."""
    per_min: float
    """Episodes begun per minute, over the last RATE_S seconds of the run."""
    code_versions: list[CodeVersion]
    """Versions of its code, oldest first."""
    last_error: LastError | None
    """Reason that the client gave for its newest failed episode."""
    is_revoked: bool


def read_clients(index: RunIndex) -> list[ClientView]:
    """Return the clients in the order of their first episodes."""
    versions: dict[str, list[CodeVersion]] = {}
    for client, version, first_at, last_at, episodes in index.query(
        "SELECT client, code_version, min(began_at), max(began_at), count(*) FROM episodes WHERE code_version != '' GROUP BY 1, 2 ORDER BY 3"
    ):
        of = CodeVersion(version=version, first_at=first_at, last_at=last_at, episodes=episodes)
        versions.setdefault(client, []).append(of)
    errors = {
        client: LastError(at=at, text=text, episode=episode)
        for client, text, episode, at in index.query(
            "SELECT client, detail, id, max(coalesce(ended, began_at)) FROM episodes WHERE fate = 'failed' AND detail != '' GROUP BY 1"
        )
    }
    newest = index.query("SELECT max(began_at) FROM episodes")[0][0] or 0.0
    revoked = _read_revoked(index)
    return [
        ClientView(
            client=client,
            episodes=episodes,
            trained=trained,
            dropped=dropped,
            failed=failed,
            evaluated=evaluated,
            first_at=first_at,
            last_at=last_at,
            per_min=60.0 * recent / min(RATE_S, max(newest - first_at, 60.0)),
            code_versions=versions.get(client, []),
            last_error=errors.get(client),
            is_revoked=client.partition(NAME_SEPARATOR)[0] in revoked,
        )
        for client, episodes, trained, dropped, failed, evaluated, first_at, last_at, recent in index.query(
            "SELECT client, count(*), sum(fate = 'trained'), sum(fate = 'dropped'), sum(fate = 'failed'), sum(fate = 'eval'), "
            "min(began_at), max(began_at), sum(began_at > ?) FROM episodes WHERE client != '' GROUP BY 1 ORDER BY min(began_at)",
            (newest - RATE_S,),
        )
    ]


def _read_revoked(index: RunIndex) -> frozenset[str]:
    """Return the names of revoked clients; none if the registry cannot be read, for instance in a copied folder."""
    try:
        return frozenset(
            name for name, one in read_registry(index.folder.clients).items() if one.removed_at is not None
        )
    except SwarmqError:
        return frozenset()
