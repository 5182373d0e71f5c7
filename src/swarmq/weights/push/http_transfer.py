"""Transfer of weight files to weight receivers on other hosts, over HTTP, while the engines there still serve.

    manifest --> missing chunks --> ... --> manifest --> path on the engine's host

The answer to a manifest lists the missing chunks, so a push continues after a broken connection, and sends a damaged chunk again.
Several receivers get the weights at the same time. The newest file that a receiver has is kept in the learner's shared memory as
the base file of the next push. It is as large as all weights that are pushed.
"""

from __future__ import annotations

import asyncio
import io
import socket
import sys
import time
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

import aiohttp
import msgspec
import numpy as np
import structlog
import torch
from aiohappyeyeballs import AddrInfoType

from swarmq.engine.auth import make_auth_headers
from swarmq.errors import EngineError
from swarmq.weights.format.chunks import (
    CHUNK_BYTES,
    Bytes,
    Progress,
    WeightFileManifest,
    describe_file,
    encode_chunk,
)
from swarmq.weights.format.packing import Tensors
from swarmq.weights.push.engine_control import EngineControl, EngineSilentError, Payload
from swarmq.weights.push.transfers import FileTransfer, Route

log = structlog.get_logger()

T = TypeVar("T")

NUM_CONNECTIONS = 8
"""Number of connections to one receiver; several, because a connection is idle while it waits for the answer to a chunk."""
MAX_ENCODED = 2 * NUM_CONNECTIONS
"""Maximum number of encoded chunks to keep for other receivers of the same file."""
MAX_STALLED_ATTEMPTS = 4
"""Number of successive attempts without any progress after which a push to an engine fails."""
RETRY_S = 0.5
"""Seconds before the second attempt; the wait doubles before each further attempt."""
RETRIED_STATUSES = (409, 410, 422)
"""HTTP statuses after which an attempt is repeated from the manifest on: the base file or the new file was replaced, or a chunk is damaged."""
UNREACHABLE_ERRORS = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
CONNECT_S = 5.0
ANSWER_S = 120.0
"""Maximum seconds from the last byte of a chunk to the receiver's answer. Sending a chunk has no limit, because links may be slow."""
DEAD_S = 30.0
"""Seconds after which a connection ends whose other end acknowledges nothing: its host was lost, or a firewall drops its packets."""


class ReceiverRefusedError(EngineError):
    """A receiver rejected a request; `status` is the HTTP status."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class PublishedFile:
    """A weight file of the learner, with its manifest and its encoded chunks."""

    def __init__(self, path: Path, *, word_bytes: int, chunk_bytes: int) -> None:
        self.path = path
        self.is_delivered = False
        """Whether a receiver has the whole file."""
        self.data: Bytes = np.memmap(path, np.uint8, "r")
        self.manifest = describe_file(self.data, word_bytes=word_bytes, chunk_bytes=chunk_bytes)
        self.name = self.manifest.name
        self._encoded: dict[tuple[str | None, int], asyncio.Task[bytes]] = {}

    async def encode(self, index: int, base: PublishedFile | None) -> bytes:
        """Return chunk `index`, encoded as its difference from `base` if that is given. Receivers that need a chunk at about the same
        time share one encoding."""
        key = (base.name if base else None, index)
        if key not in self._encoded:
            while len(self._encoded) >= MAX_ENCODED:
                del self._encoded[next(iter(self._encoded))]
            before = self.manifest.get_chunk(base.data, index) if base else None
            encoding = asyncio.to_thread(
                encode_chunk, self.manifest.get_chunk(self.data, index), before, self.manifest.word_bytes
            )
            self._encoded[key] = asyncio.create_task(encoding)
        return await asyncio.shield(self._encoded[key])

    def forget_encoded(self) -> None:
        self._encoded.clear()


class HttpTransfer:
    """Transfer that sends the files of a FileTransfer to weight receivers."""

    def __init__(
        self,
        files: FileTransfer,
        *,
        secret: str = "",
        retry_s: float = RETRY_S,
        connect_s: float = CONNECT_S,
        dead_s: float = DEAD_S,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """`secret`: secret that engines and receivers require. `connect_s`: maximum seconds for a connection. `retry_s` and `dead_s`: see
        RETRY_S and DEAD_S."""
        self._files, self._secret = files, secret
        self._retry_s, self._dead_s, self._chunk_bytes = retry_s, dead_s, chunk_bytes
        self._timeout = aiohttp.ClientTimeout(sock_connect=connect_s, sock_read=ANSWER_S)
        self._published: dict[str | None, PublishedFile] = {}
        """Dtype -> file of the present push."""
        self._bases: dict[str | None, PublishedFile] = {}
        """Dtype -> newest file that a receiver has, the base file of the next push."""
        weakref.finalize(self, files.withdraw)  # when the learner ends, if not before

    async def prepare(self, engine: EngineControl, route: Route) -> None:
        pass

    def publish(self, tensors: Tensors, version: int, dtype: str | None) -> Payload:
        payload = self._files.publish(tensors, version, dtype)
        (path,) = (value for key, value in payload.update_info.items() if key != "checksum")
        word_bytes = 4 if dtype and getattr(torch, dtype).itemsize == 4 else 2
        file = self._published[dtype] = PublishedFile(Path(path), word_bytes=word_bytes, chunk_bytes=self._chunk_bytes)
        return msgspec.structs.replace(payload, deliver=partial(self._deliver, payload, file, self._bases.get(dtype)))

    def withdraw(self) -> None:
        """Delete all files except the newest ones that receivers have."""
        for file in self._published.values():
            file.forget_encoded()
        self._bases |= {dtype: file for dtype, file in self._published.items() if file.is_delivered}
        self._published.clear()
        self._files.withdraw(keep=[file.path for file in self._bases.values()])

    async def _deliver(
        self, payload: Payload, file: PublishedFile, base: PublishedFile | None, receiver: str
    ) -> Payload:
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(socket_factory=partial(_open_socket, dead_s=self._dead_s)),
            headers=make_auth_headers(self._secret),
            timeout=self._timeout,
        ) as session:
            upload = Upload(session, receiver, file, base if base and len(base.data) == len(file.data) else None)
            path = await upload.run(self._retry_s)
        file.is_delivered = True
        info = {key: value if key == "checksum" else path for key, value in payload.update_info.items()}
        return msgspec.structs.replace(payload, update_info=info, deliver=None)


class Upload:
    """An upload of one file to one receiver."""

    def __init__(
        self, session: aiohttp.ClientSession, receiver: str, file: PublishedFile, base: PublishedFile | None
    ) -> None:
        self._session, self._receiver, self._file, self._base = session, receiver, file, base
        self._sent_bytes = 0

    async def run(self, retry_s: float) -> str:
        """Send the file, and return its path on the receiver's host. Raises EngineError if the receiver cannot be reached, refuses the
        file, or MAX_STALLED_ATTEMPTS attempts make no progress."""
        began, num_stalled, fewest_missing = time.perf_counter(), 0, None
        while True:
            try:
                progress = await self._begin()
                if progress.path is not None:
                    break
                if fewest_missing is None or len(progress.missing) < fewest_missing:
                    num_stalled, fewest_missing = 0, len(progress.missing)
                await self._send(progress.missing)
            except ReceiverRefusedError as error:
                if error.status not in RETRIED_STATUSES:
                    raise
                failed: EngineError = error
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                failed = _map_error(self._receiver, error)
                if fewest_missing is None and isinstance(error, UNREACHABLE_ERRORS):
                    # do not retry: other engines wait for this push, and a later push tries again
                    raise EngineSilentError(str(failed)) from error
            else:
                continue
            num_stalled += 1
            if num_stalled >= MAX_STALLED_ATTEMPTS:
                raise failed
            log.warning("upload_interrupted", receiver=self._receiver, reason=str(failed))
            await asyncio.sleep(retry_s * 2 ** (num_stalled - 1))
        log.info(
            "weights_sent",
            receiver=self._receiver,
            sent_mib=round(self._sent_bytes / 2**20, 2),
            of_mib=len(self._file.data) >> 20,
            is_delta=self._base is not None,
            seconds=round(time.perf_counter() - began, 3),
        )
        return progress.path

    async def _begin(self) -> Progress:
        """Send the manifest. If the receiver lacks the base file, or has no room for a second file, send the whole weights."""
        manifest = self._file.manifest
        try:
            if self._base is not None:
                return await self._post(msgspec.structs.replace(manifest, base=self._base.name))
        except ReceiverRefusedError as error:
            if error.status not in (409, 507):
                raise
            log.info("weights_sent_whole", receiver=self._receiver, reason=str(error))
            self._base = None
        return await self._post(manifest)

    async def _post(self, manifest: WeightFileManifest) -> Progress:
        answer = await self._request("POST", "/weights", msgspec.json.encode(manifest))
        try:
            return msgspec.json.decode(answer, type=Progress)
        except ValueError as error:
            raise EngineError(f"unexpected response from {self._receiver}; is it a weight receiver?") from error

    async def _send(self, missing: list[int]) -> None:
        indices = iter(missing)
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(NUM_CONNECTIONS):
                    tasks.create_task(self._send_each(indices))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _send_each(self, indices: Iterator[int]) -> None:
        query = f"?base={self._base.name}" if self._base else ""
        for index in indices:
            encoded = await self._file.encode(index, self._base)
            await self._request("PUT", f"/weights/{self._file.name}/{index}{query}", encoded)
            self._sent_bytes += len(encoded)

    async def _request(self, method: str, path: str, body: bytes) -> bytes:
        # As a stream, because aiohttp writes a stream in pieces, but bytes at once.
        async with self._session.request(method, self._receiver + path, data=io.BytesIO(body)) as answer:
            if answer.status < 400:
                return await answer.read()
            if answer.status == 401:
                raise EngineError(
                    f"the weight receiver at {self._receiver} requires another secret than this run's: start it again"
                )
            text = (await answer.text())[:500]
            raise ReceiverRefusedError(f"weight receiver {self._receiver}: {text}", status=answer.status)


def _open_socket(address: AddrInfoType, *, dead_s: float) -> socket.socket:
    """Return a socket that ends after `dead_s` seconds without an acknowledgement, also while nothing is sent."""
    family, kind, protocol, _, _ = address
    opened = socket.socket(family, kind, protocol)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * dead_s))
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
            opened.setsockopt(socket.IPPROTO_TCP, option, max(1, int(dead_s / 3)))
    return opened


def _map_error(receiver: str, error: Exception) -> EngineError:
    cause = str(error) or type(error).__name__
    return EngineError(
        f"weights cannot be sent to {receiver} ({cause}): does the weight receiver run there, and does a firewall block its port?"
    )
