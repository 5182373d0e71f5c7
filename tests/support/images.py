"""Images as an engine's processor prepares them, and turns about them."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from math import prod
from typing import Any

import msgspec
import numpy as np
import zstandard
from benchmarks.vlm.architecture import MERGED, QWEN2_5_VL, Architecture

from swarmq.engine.client.image_features import GRID, GRID_FORM, PIXELS, RAW_VIEW
from swarmq.messages import Image, Turn, digest_image, pack_floats, pack_ids


def make_image(
    seed: int, *, height: int = 2, width: int = 2, offset: int = 0, kind: Architecture = QWEN2_5_VL
) -> Image:
    """An image of random pixels that has height x width places."""
    grid = (1, height * MERGED, width * MERGED)
    pixels = np.random.default_rng(seed).integers(0, 256, (prod(grid), kind.values), np.uint8)
    patches = pixels.tobytes()
    return Image(
        digest=digest_image(grid, patches),
        offset=offset,
        length=height * width,
        grid=grid,
        patches=zstandard.compress(patches),
    )


def make_turn(
    call_id: str,
    parts: Sequence[int | Image],
    sampled: Sequence[int],
    *,
    placeholder: int,
    parent: Turn | None = None,
    shared: int | None = None,
) -> Turn:
    """A turn whose whole prompt is `parts`. It continues `parent`, or shares its first `shared` tokens."""
    ids: list[int] = []
    images: list[Image] = []
    for part in parts:
        if isinstance(part, Image):
            images.append(msgspec.structs.replace(part, offset=len(ids)))
            ids += [placeholder] * part.length
        else:
            ids.append(part)
    if shared is None:
        shared = parent.num_prompt + parent.num_sampled if parent else 0
    return Turn(
        run="run",
        episode_id="e1",
        policy="main",
        call_id=call_id,
        request_id=call_id,
        parent=parent.call_id if parent else None,
        shared=shared,
        prompt_ids=pack_ids(ids[shared:]),
        images=tuple(image for image in images if image.offset >= shared),
        sampled_ids=pack_ids(sampled),
        logprobs=pack_floats([-1.0] * len(sampled)),
    )


def make_features(images: Sequence[Image]) -> dict[str, Any]:
    """The images of a prompt as vLLM's rendering has them."""
    return {
        "mm_hashes": {"image": [image.digest[:32] for image in images]},
        "mm_placeholders": {"image": [{"offset": image.offset, "length": image.length} for image in images]},
        "kwargs_data": {"image": [_encode(image) for image in images]},
    }


def _encode(image: Image) -> str:
    patches = zstandard.decompress(image.patches)
    shape = [prod(image.grid), len(patches) // prod(image.grid)]
    pixels, grid = (msgspec.msgpack.Ext(RAW_VIEW, data) for data in (patches, GRID_FORM.pack(*image.grid)))
    inputs = {PIXELS: ("uint8", shape, pixels), GRID: ("int64", [3], grid)}
    fields = {name: {"data": data, "field": ["batched", {}]} for name, data in inputs.items()}
    return base64.b64encode(msgspec.msgpack.encode(fields)).decode()
