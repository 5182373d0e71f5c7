"""The receiver's weight files: the newest complete file, which is the base file of differences, and the file that is being received.

A file's memory is reserved before its first chunk arrives. The file is complete when every chunk has arrived with the right digest.
No file survives a restart of the receiver: the next push sends the whole weights.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import structlog

from swarmq.errors import SwarmqError
from swarmq.weights.format import scratch
from swarmq.weights.format.chunks import (
    CHUNK_BYTES,
    Bytes,
    Progress,
    WeightFileManifest,
    decode_chunk,
    digest_chunk,
)

log = structlog.get_logger()


class UploadRefusedError(SwarmqError):
    """The receiver cannot take a file or chunk; `status` is the HTTP status."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class WeightFile:
    """A weight file in shared memory, and the indices of its missing chunks."""

    def __init__(self, path: Path, manifest: WeightFileManifest) -> None:
        """Create the file and reserve its memory. Raises OSError if that fails, and then leaves no file behind."""
        self.path, self.name, self.manifest = path, manifest.name, manifest
        self.missing = set(range(len(manifest.digests)))
        try:
            with path.open("xb") as file:
                os.posix_fallocate(file.fileno(), 0, manifest.size_bytes)
        except OSError:
            self.remove()
            raise
        self.data: Bytes = np.memmap(path, np.uint8, "r+")

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


class WeightStore:
    """All weight files of a receiver. Its methods may be called from several threads."""

    def __init__(
        self, parent: Path = scratch.SHARED_MEMORY, has_room: Callable[[Path, int], bool] = scratch.has_room
    ) -> None:
        scratch.remove_leftovers(parent)
        self._has_room = has_room
        self._folder = scratch.make_scratch_folder(parent)
        self._complete: WeightFile | None = None
        self._upload: WeightFile | None = None
        self._lock = threading.Lock()

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def begin(self, manifest: WeightFileManifest) -> Progress:
        """Begin to receive a file, or continue, and return which chunks are missing. Another incomplete file is deleted. Raises
        UploadRefusedError if the manifest is invalid, the base file is missing, or memory is short."""
        if manifest.word_bytes not in (2, 4):
            raise UploadRefusedError(f"word_bytes: must be 2 or 4 (got {manifest.word_bytes})", status=400)
        if not 0 < manifest.chunk_bytes <= CHUNK_BYTES:
            raise UploadRefusedError(
                f"chunk_bytes: must be 1 to {CHUNK_BYTES} (got {manifest.chunk_bytes})", status=400
            )
        if manifest.size_bytes < 1 or len(manifest.digests) != -(-manifest.size_bytes // manifest.chunk_bytes):
            raise UploadRefusedError("the manifest does not have a digest for every chunk of its file", status=400)
        with self._lock:
            if self._complete and self._complete.name == manifest.name:
                return Progress(missing=[], path=str(self._complete.path))
            if manifest.base is not None:
                self._get_base(manifest.base, manifest.size_bytes)
            if self._upload is None or self._upload.name != manifest.name:
                self._upload = self._make_upload(manifest)
            return Progress(missing=sorted(self._upload.missing))

    def write(self, name: str, index: int, encoded: bytes, base: str | None) -> None:
        """Decode, check and store chunk `index` of the file `name`. `base`: name of the base file, to which it is a difference. Raises
        UploadRefusedError if the chunk is damaged, the base file is missing, or the file is not being received."""
        with self._lock:
            upload = self._upload
            if upload is None or upload.name != name or index not in range(len(upload.manifest.digests)):
                raise UploadRefusedError(
                    f"chunk {index} of {name} is not expected: is another learner sending other weights?", status=410
                )
            before = self._get_base(base, upload.manifest.size_bytes) if base is not None else None
        place = upload.manifest.get_chunk(upload.data, index)
        try:
            chunk = decode_chunk(
                encoded,
                len(place),
                upload.manifest.get_chunk(before, index) if before is not None else None,
                upload.manifest.word_bytes,
            )
        except ValueError as error:
            raise UploadRefusedError(f"chunk {index} is damaged: {error}", status=422) from error
        if digest_chunk(chunk) != upload.manifest.digests[index]:
            raise UploadRefusedError(f"chunk {index} is damaged: it is not what the learner has", status=422)
        place[:] = chunk
        with self._lock:
            upload.missing.discard(index)
            if not upload.missing and self._upload is upload:
                self._replace_complete(upload)

    def _get_base(self, name: str, size_bytes: int) -> Bytes:
        if self._complete is None or self._complete.name != name or len(self._complete.data) != size_bytes:
            raise UploadRefusedError(
                f"this receiver does not have the base file {name}: send the whole weights", status=409
            )
        return self._complete.data

    def _make_upload(self, manifest: WeightFileManifest) -> WeightFile:
        if self._upload is not None:
            log.warning("upload_given_up", missing=len(self._upload.missing), reason="another file is being sent")
            self._upload.remove()
            self._upload = None
        path = self._folder / f"{manifest.name[:16]}.safetensors"
        if (
            not self._has_room(self._folder, manifest.size_bytes)
            and manifest.base is None
            and self._complete is not None
        ):
            self._complete.remove()  # the engine has loaded this file; the next push sends whole weights
            self._complete = None
        if self._has_room(self._folder, manifest.size_bytes):
            with contextlib.suppress(OSError):  # another process has taken the room
                return WeightFile(path, manifest)
        raise UploadRefusedError(
            f"no room for {manifest.size_bytes >> 20} MiB of weights in {self._folder.parent}: free space there",
            status=507,
        )

    def _replace_complete(self, upload: WeightFile) -> None:
        if self._complete is not None:
            self._complete.remove()
        self._complete, self._upload = upload, None
        log.info("weights_received", path=str(upload.path), size_mib=upload.manifest.size_bytes >> 20)
