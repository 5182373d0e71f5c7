"""The proxies that serve a run: a JSON list of URLs in the run folder, for clients that outlive proxies.

swarmq up ────────────> its own        ┐
swarmq proxy --join ──> adds itself,   ├─> proxies.json ──> collector ──every ticket──> clients
                        removes itself ┘
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
import structlog

from swarmq.runtime.files import CachedFile, locked_for_change, write_atomically

log = structlog.get_logger()


class ProxyRegistry:
    """The proxies of a run as listed in its run folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = CachedFile(path, self._read, tuple[str, ...]())

    def urls(self) -> tuple[str, ...]:
        """Return the base URLs of the proxies, each ending in `/v1`; empty if none is listed."""
        return self._file.value()

    def write(self, urls: Iterable[str]) -> None:
        """Replace the list by `urls`."""
        with locked_for_change(self._path):
            write_atomically(self._path, msgspec.json.encode(tuple(urls)))

    def add(self, url: str) -> None:
        with locked_for_change(self._path):
            write_atomically(self._path, msgspec.json.encode(tuple(dict.fromkeys([*self.urls(), url]))))

    def remove(self, url: str) -> None:
        with locked_for_change(self._path):
            write_atomically(self._path, msgspec.json.encode([one for one in self.urls() if one != url]))

    def _read(self) -> tuple[str, ...]:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=tuple[str, ...])
        except (OSError, msgspec.MsgspecError) as error:
            log.warning(
                "proxies_unreadable",
                file=str(self._path),
                reason=str(error),
                action="clients use the proxies of their invite",
            )
            return ()
