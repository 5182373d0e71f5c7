"""The files of a study on their way to a worker that has nothing but an invite.

    worker --FileWanted--> reports    leader --event "piece"--> that worker

The listing comes first: the study and the files that its trials depend on, each with its hash. The worker asks for the pieces of files
that it lacks, several at once, and again for those that do not come. Nothing that no hash of a trial contains is sent. Files outside the
study's folder, data sets and models of a hub are not sent either; they must be on the worker's host, and the hash of a trial says whether they
are the leader's.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path, PurePosixPath

import msgspec

from swarmq.broker import Broker
from swarmq.errors import ConfigError, StudyError, SwarmqError
from swarmq.messages import Event, new_id
from swarmq.studies.identity import TrialMaker, hash_file
from swarmq.studies.ledger import StudyFolder
from swarmq.studies.records import Trial
from swarmq.studies.reports import PIECE_EVENT, READER_PREFIX, FileWanted, inbox, pack, run_of
from swarmq.studies.study import Study, hash_json
from swarmq.version import __version__

PIECE_BYTES = 256 * 1024
AT_ONCE = 8
"""Number of pieces that a worker awaits at the same time."""
ASK_S = 5.0
"""Seconds after which an unanswered request is repeated for the first time."""
MAX_ASK_S = 60.0
LISTING = ""
"""Path by which the listing is asked for."""


class SharedFile(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    """Path below the study's folder."""
    size_bytes: int
    sha256: str


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker needs."""

    study: Study
    files: tuple[SharedFile, ...]
    swarmq: str
    """Version of the leader."""


class FileServer:
    """The leader's side: answers requests for files. Only listed files can be read."""

    def __init__(self, maker: TrialMaker) -> None:
        self._maker = maker
        self._listed: dict[str, Path] = {}

    def answer(self, wanted: FileWanted, study: Study, trials: Iterable[Trial]) -> Event:
        """Return the event with what is wanted, or with the reason why it cannot be had."""
        fields: dict[str, object] = {"path": wanted.path, "offset": wanted.offset}
        try:
            # a file that is not listed may have been by the leader before
            listing = b"" if wanted.path in self._listed else self._list(study, trials)
            fields["data"] = self._read(wanted) if wanted.path else listing
        except (OSError, SwarmqError) as error:
            fields["refused"] = str(error)
        return Event(run=run_of(study.name), source=wanted.reader, name=PIECE_EVENT, at=time.time(), fields=fields)

    def _list(self, study: Study, trials: Iterable[Trial]) -> bytes:
        self._listed = self._maker.list_files(trials)
        files = [
            SharedFile(path=name, size_bytes=path.stat().st_size, sha256=hash_file(path))
            for name, path in self._listed.items()
        ]
        return msgspec.json.encode(Listing(study=study, files=tuple(files), swarmq=__version__))

    def _read(self, wanted: FileWanted) -> bytes:
        if wanted.path not in self._listed:
            raise ConfigError(f"{wanted.path!r} is no file that the study's trials depend on")
        with self._listed[wanted.path].open("rb") as file:
            file.seek(wanted.offset)
            return file.read(PIECE_BYTES)


async def fetch(
    broker: Broker, name: str, here: Path, *, ask_s: float = ASK_S, report_silence: Callable[[float], None]
) -> tuple[Study, StudyFolder]:
    """Fetch the study and its files into `here`, and return them. Files that are there already are not fetched again.
    `report_silence`: called with the seconds for which the leader has not answered.

    Raises StudyError if the versions differ, or a file cannot be had or written.
    """
    async with _open_reader(broker, name, ask_s, report_silence) as reader:
        listing = msgspec.json.decode(await reader.read(LISTING, 0), type=Listing)
        if listing.swarmq != __version__:
            raise StudyError(
                f"the leader of study {name} has swarmq {listing.swarmq}, this host {__version__}: install the same version"
            )
        for file in listing.files:
            if (path := PurePosixPath(file.path)).is_absolute() or ".." in path.parts:
                raise StudyError(f"{file.path!r} is no path below the study's folder, so no file was written")
        root = here / "files" / hash_json(listing.files)[:16]  # files of an amended study are others
        try:
            for file in listing.files:
                await _fetch_file(reader, file, root / file.path, here)
        except OSError as error:
            raise StudyError(
                f"{root}: the study's files cannot be written there ({error.strerror}); make room, then start this worker again"
            ) from error
    return listing.study, StudyFolder(root / "study.toml", name, path=here)


async def _fetch_file(reader: _FileReader, file: SharedFile, target: Path, here: Path) -> None:
    """Fetch a file by way of one in `here`, which no hash of a trial contains and no other worker of this host writes."""
    if await asyncio.to_thread(_is_copy, target, file):
        return
    part = here / f"part-{new_id()}"
    try:
        await asyncio.to_thread(_begin, part, target)
        offsets = range(0, file.size_bytes, PIECE_BYTES)
        for first in range(0, len(offsets), AT_ONCE):
            pieces = [reader.read(file.path, offset) for offset in offsets[first : first + AT_ONCE]]
            await asyncio.to_thread(_append, part, await asyncio.gather(*pieces))
        if not await asyncio.to_thread(_is_copy, part, file):
            raise StudyError(f"{file.path}: it changed on the leader's host while it was sent; start this worker again")
        await asyncio.to_thread(part.replace, target)
    finally:
        with contextlib.suppress(OSError):
            part.unlink()


def _is_copy(path: Path, file: SharedFile) -> bool:
    return path.exists() and path.stat().st_size == file.size_bytes and hash_file(path) == file.sha256


def _begin(part: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    part.write_bytes(b"")


def _append(part: Path, pieces: Iterable[bytes]) -> None:
    with part.open("ab") as written:
        for piece in pieces:
            written.write(piece)


class _FileReader:
    """The worker's side: requests, and the answers that are awaited."""

    def __init__(self, broker: Broker, name: str, ask_s: float, report_silence: Callable[[float], None]) -> None:
        self._broker, self._name, self._ask_s, self._report_silence = broker, name, ask_s, report_silence
        self.source = f"{READER_PREFIX}{new_id()}"
        self._awaited: dict[tuple[str, int], asyncio.Future[bytes]] = {}

    async def read(self, path: str, offset: int) -> bytes:
        """Return a piece of a file. Raises StudyError if the leader refuses it."""
        answer = self._awaited[path, offset] = asyncio.get_running_loop().create_future()
        wanted = FileWanted(reader=self.source, path=path, offset=offset)
        began, patience_s = time.monotonic(), self._ask_s
        try:
            while True:
                await self._broker.publish(inbox(self._name), pack(self._name, wanted))
                with contextlib.suppress(TimeoutError):
                    return await asyncio.wait_for(asyncio.shield(answer), patience_s)
                self._report_silence(time.monotonic() - began)
                patience_s = min(2 * patience_s, MAX_ASK_S)  # requests wait in the queue, too
        finally:
            del self._awaited[path, offset]

    async def follow(self, events: AsyncIterator[Event]) -> None:
        async for event in events:
            answer = self._awaited.get((event.fields["path"], event.fields["offset"]))
            if answer is None or answer.done():
                continue
            if refused := event.fields.get("refused"):
                answer.set_exception(StudyError(f"the leader of study {self._name} sends no file: {refused}"))
            else:
                answer.set_result(event.fields["data"])


@contextlib.asynccontextmanager
async def _open_reader(
    broker: Broker, name: str, ask_s: float, report_silence: Callable[[float], None]
) -> AsyncIterator[_FileReader]:
    reader = _FileReader(broker, name, ask_s, report_silence)
    async with broker.events(run_of(name), senders=[reader.source]) as events:
        following = asyncio.create_task(reader.follow(events))
        try:
            yield reader
        finally:
            following.cancel()
