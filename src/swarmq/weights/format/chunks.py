"""A weight file in chunks, as learners send it to weight receivers: the manifest, and the encoding of a chunk.

A chunk is encoded as its difference from the same bytes of a base file that both ends have, or whole. After an optimizer
step most BF16 weights are unchanged, and nearly all others differ by one in the last place. So the positions of changed words and
the differences are stored separately, each in byte planes, which compress better than words:

    count   u32             number of changed words
    gaps    [count] u32     distance of each changed word from the one before; absent if all words are stored
    steps   [count] word    difference as an integer, zigzag-encoded; without a base file, the word with its sign bit last

Words have the size of the weights' dtype, in little-endian order. The encoded chunk is one zstd frame. Needs numpy, but no torch.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import zstandard

CHUNK_BYTES = 16 << 20
"""Default size of a chunk in bytes, and the largest size that a receiver accepts."""
LEVEL = 1
"""Compression level of zstd; higher levels are slower and save no bytes with these data."""
COUNT_BYTES = 4

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class WeightFileManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a weight file that a learner wants to send."""

    size_bytes: int
    chunk_bytes: int
    """Size in bytes of each chunk but the last, which may be shorter."""
    word_bytes: int
    """Size in bytes of the words whose differences are sent: 2 or 4."""
    digests: list[str]
    """SHA-256 of each chunk, in hexadecimal digits."""
    base: str | None = None
    """Name of the base file, to which chunks are sent as differences; None: chunks are sent whole."""

    @property
    def name(self) -> str:
        """Name of the file: SHA-256 of the chunks' digests, in hexadecimal digits."""
        return hashlib.sha256("".join(self.digests).encode()).hexdigest()

    def get_chunk(self, data: Bytes, index: int) -> Bytes:
        """Return the bytes of chunk `index` as a view. `data`: bytes of the file or of its base file, [size_bytes] uint8."""
        return data[index * self.chunk_bytes : (index + 1) * self.chunk_bytes]


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """A receiver's answer to a manifest: how much of the file it has."""

    missing: list[int]
    """Indices of the chunks that the receiver does not have, ascending."""
    path: str | None = None
    """Path of the whole file on the receiver's host, once it is complete."""


def describe_file(data: Bytes, *, word_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> WeightFileManifest:
    """Return the manifest of a file, for chunks that are sent whole. `data`: its bytes, [size_bytes] uint8."""
    chunks = (data[start : start + chunk_bytes] for start in range(0, len(data), chunk_bytes))
    with ThreadPoolExecutor() as threads:
        digests = list(threads.map(digest_chunk, chunks))
    return WeightFileManifest(size_bytes=len(data), chunk_bytes=chunk_bytes, word_bytes=word_bytes, digests=digests)


def digest_chunk(chunk: Bytes) -> str:
    return hashlib.sha256(chunk.data).hexdigest()


def encode_chunk(chunk: Bytes, base: Bytes | None, word_bytes: int) -> bytes:
    """Encode a chunk as its difference from `base`, the same chunk of the base file, or whole if `base` is None."""
    words = _to_words(chunk, word_bytes)
    before = _to_words(base, word_bytes) if base is not None else None
    changed = np.flatnonzero(words != (0 if before is None else before))
    gaps = b""
    if 2 * len(changed) < len(words):
        gaps = _to_planes(np.diff(changed, prepend=0).astype("<u4"))
        words, before = words[changed], before[changed] if before is not None else None
    steps = _zigzag(words - before) if before is not None else _rotate(words, 1)
    body = len(steps).to_bytes(COUNT_BYTES, "little") + gaps + _to_planes(steps)
    return zstandard.ZstdCompressor(level=LEVEL).compress(body)


def decode_chunk(encoded: bytes, size_bytes: int, base: Bytes | None, word_bytes: int) -> Bytes:
    """Return the chunk as [size_bytes] uint8. `base`: the same chunk of the base file, or None for a whole chunk.

    Raises ValueError if `encoded` is not the encoding of a chunk of `size_bytes`.
    """
    num_words = -(-size_bytes // word_bytes)
    try:
        if not 0 <= zstandard.frame_content_size(encoded) <= COUNT_BYTES + num_words * (4 + word_bytes):
            raise ValueError("the chunk is larger than any encoding of its size")
        body = np.frombuffer(zstandard.decompress(encoded), np.uint8)
    except zstandard.ZstdError as error:
        raise ValueError(f"the chunk is not in zstd's format: {error}") from error
    words = _to_words(base, word_bytes).copy() if base is not None else np.zeros(num_words, _word_type(word_bytes))
    count = int.from_bytes(body[:COUNT_BYTES].tobytes(), "little")
    are_all = count == num_words
    if count > num_words or len(body) != COUNT_BYTES + count * (word_bytes + (0 if are_all else 4)):
        raise ValueError("the chunk does not have the size that it states")
    steps = _from_planes(body[len(body) - count * word_bytes :], word_bytes)
    steps = _unzigzag(steps) if base is not None else _rotate(steps, -1)
    if are_all:
        words += steps
    else:
        changed = _from_planes(body[COUNT_BYTES : COUNT_BYTES + 4 * count], 4).cumsum(dtype=np.int64)
        if count and changed[-1] >= num_words:
            raise ValueError("the chunk changes words beyond its end")
        words[changed] += steps
    return words.view(np.uint8)[:size_bytes]


def _word_type(word_bytes: int) -> np.dtype[Any]:
    return np.dtype(f"<u{word_bytes}")


def _to_words(chunk: Bytes, word_bytes: int) -> np.ndarray[Any, Any]:
    """Return the bytes as words; zeros fill up an incomplete last word."""
    fill = -len(chunk) % word_bytes
    return (np.pad(chunk, (0, fill)) if fill else chunk).view(_word_type(word_bytes))


def _zigzag(steps: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Map differences 0, -1, 1, -2, ... to 0, 1, 2, 3, ..., as Protocol Buffers encode signed integers."""
    signed = steps.view(f"<i{steps.itemsize}")
    return ((signed << 1) ^ (signed >> (8 * steps.itemsize - 1))).view(steps.dtype)


def _unzigzag(steps: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return (steps >> 1) ^ (~(steps & 1) + 1)


def _rotate(words: np.ndarray[Any, Any], by: int) -> np.ndarray[Any, Any]:
    """Rotate each word to the left by `by` bits. By one bit, a weight's sign follows its mantissa, and BF16's exponent is the
    whole highest byte."""
    bits = 8 * words.itemsize
    return (words << by % bits) | (words >> -by % bits)


def _to_planes(words: np.ndarray[Any, Any]) -> bytes:
    """Return the lowest byte of each word, then the second byte of each, and so on."""
    return b"".join((words >> 8 * place).astype(np.uint8).tobytes() for place in range(words.itemsize))


def _from_planes(planes: Bytes, word_bytes: int) -> np.ndarray[Any, Any]:
    parts = np.empty((len(planes) // word_bytes, word_bytes), np.uint8)
    for place, plane in enumerate(planes.reshape(word_bytes, -1)):
        parts[:, place] = plane
    return parts.view(_word_type(word_bytes)).reshape(-1)
