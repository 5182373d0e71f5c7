"""Images of prompts as token sequences see them: equal placeholder tokens of different images must not count as equal tokens.

A table gives every image of a batch a mark, a negative number that stands for each of its placeholder tokens. Folding, tries and
trees compare marks like token ids, so sequences share an image only if its pixels are equal, and no node begins or ends inside of
one. In the forward pass, the outputs of the vision tower take the place of marks.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt, prod
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import zstandard
from numpy.typing import NDArray

from swarmq.errors import TimelineError
from swarmq.messages import Image, digest_image

if TYPE_CHECKING:
    from swarmq.timeline.layout import Layout

MAX_PATCH_BYTES = 512 * 1024 * 1024
"""Maximum size of an image's patches, so that a damaged record cannot fill the memory."""


class ImagePatches(msgspec.Struct, frozen=True, kw_only=True):
    """An image as a vision tower gets it, and how its outputs become tokens."""

    values: NDArray[np.uint8]  # [P, values of a patch]
    grid: tuple[int, int, int]
    """Number of patches in time, height and width."""
    merge: int
    """Number of patches in height, and in width, that one token stands for."""

    @property
    def token_grid(self) -> tuple[int, int, int]:
        time, height, width = self.grid
        return time, height // self.merge, width // self.merge

    @property
    def num_tokens(self) -> int:
        return prod(self.token_grid)


class ImageTable:
    """The distinct images of a batch."""

    def __init__(self) -> None:
        self.images: list[ImagePatches] = []
        """Image -1 - m for the mark m."""
        self._marks: dict[str, int] = {}

    def mark(self, image: Image) -> int:
        """Return the image's mark, and add the image if it is new. Raises TimelineError (`image_damaged`) if its patches do not
        match its digest, grid or number of tokens."""
        if image.digest not in self._marks:
            self.images.append(_unpack(image))
            self._marks[image.digest] = -len(self.images)
        return self._marks[image.digest]


def _unpack(image: Image) -> ImagePatches:
    try:
        if (
            size := zstandard.frame_content_size(image.patches)
        ) > MAX_PATCH_BYTES:  # zstandard would allocate what a frame says
            raise _make_error(image, f"its patches claim to have {size} bytes, more than {MAX_PATCH_BYTES}")
        patches = zstandard.ZstdDecompressor().decompress(image.patches, max_output_size=MAX_PATCH_BYTES)
    except zstandard.ZstdError as error:
        raise _make_error(image, f"its patches cannot be read: {error}") from error
    if digest_image(image.grid, patches) != image.digest:
        raise _make_error(image, "its patches are not those of its digest")
    num_patches, (time, height, width) = prod(image.grid), image.grid
    merge = isqrt(num_patches // image.length)
    if time != 1 or not patches or len(patches) % num_patches:
        raise _make_error(image, f"{len(patches)} bytes are no grid of {image.grid} patches of a still image")
    if merge**2 * image.length != num_patches or height % merge or width % merge:
        raise _make_error(image, f"{image.length} tokens cannot stand for a grid of {image.grid} patches")
    values = np.frombuffer(patches, np.uint8).reshape(num_patches, -1)
    return ImagePatches(values=values, grid=image.grid, merge=merge)


def _make_error(image: Image, what: str) -> TimelineError:
    return TimelineError("image_damaged", f"image {image.digest[:12]} at token {image.offset}: {what}")


def list_images(layout: Layout, start: int, end: int) -> Iterator[tuple[int, ImagePatches]]:
    """Yield the images among the tokens [start, end) of a layout, each with the index of its first token."""
    marks = np.flatnonzero(layout.token_ids[start:end] < 0) + start
    at = start
    for place in marks.tolist():
        if place >= at:
            image = layout.images[-1 - int(layout.token_ids[place])]
            at = place + image.num_tokens
            yield place, image


def compute_positions(layout: Layout) -> NDArray[np.int32]:
    """Return the positions [3, T] in time, height and width of multimodal rotary embeddings (M-RoPE).

    Text advances all three by 1. An image's tokens have the positions of their places in its grid, and what follows it goes on
    after the largest of these, so a token's position depends on the images on its own path from the root.
    """
    positions = np.empty((3, layout.num_tokens), np.int32)
    afters: list[int] = []
    edges = [*layout.node_starts.tolist(), layout.num_tokens]
    for node, parent in enumerate(layout.node_parents.tolist()):
        at, position = edges[node], afters[parent] if parent >= 0 else 0
        for place, image in list_images(layout, at, edges[node + 1]):
            positions[:, at:place] = np.arange(place - at) + position
            position += place - at
            at = place + image.num_tokens
            positions[:, place:at] = np.indices(image.token_grid).reshape(3, -1) + position
            position += max(image.token_grid)
        positions[:, at : edges[node + 1]] = np.arange(edges[node + 1] - at) + position
        afters.append(position + edges[node + 1] - at)
    return positions
