"""Images in a rendering of vLLM: their places among the tokens, and the pixels that its processor prepared."""

from __future__ import annotations

import binascii
import struct
from collections.abc import Sequence
from math import prod
from typing import Any

import msgspec
import zstandard

from swarmq.errors import EngineAnswerError, EngineRefusedError
from swarmq.messages import Image, digest_image

Json = dict[str, Any]

COMPRESSION_LEVEL = 3
RAW_VIEW = 3
"""Code of a tensor's bytes in vLLM's msgpack (`vllm.v1.serial_utils`)."""
PIXELS, GRID = "pixel_values", "image_grid_thw"
GRID_FORM = struct.Struct("<3q")


class RenderedImage(msgspec.Struct, frozen=True, kw_only=True):
    """An image of a rendering."""

    key: str
    """vLLM's hash of the image and of how it is prepared."""
    offset: int
    """Index of its first placeholder token."""
    length: int
    """Number of its placeholder tokens."""
    data: str
    """What vLLM's processor made of it, in base64."""


class _Tensor(msgspec.Struct):
    data: tuple[str, list[int], msgspec.msgpack.Ext]
    """(dtype, shape, bytes)"""


_inputs = msgspec.msgpack.Decoder(dict[str, _Tensor])


def list_images(features: Json) -> list[RenderedImage]:
    """Return the images of a rendering, in the order of their places. Raises EngineRefusedError for other media, EngineAnswerError for
    features that are not vLLM's."""
    if others := sorted(set(features.get("mm_hashes") or ()) - {"image"}):
        raise EngineRefusedError(
            f"a model is trained on text and images, not on {', '.join(others)}: leave it out of training episodes",
            status=400, code="unsupported_parameter", param="messages",
        )  # fmt: skip
    try:
        found = zip(
            features["mm_hashes"]["image"],
            features["mm_placeholders"]["image"],
            features["kwargs_data"]["image"],
            strict=True,
        )
        images = [
            RenderedImage(key=key, offset=place["offset"], length=place["length"], data=data)
            for key, place, data in found
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise _make_error(repr(error)) from error
    return sorted(images, key=lambda image: image.offset)


def move_images(
    features: Json, shown: Sequence[RenderedImage], offsets: Sequence[int]
) -> tuple[Json, list[RenderedImage]]:
    """Return the features and images with the images at other offsets."""
    new = {image.offset: offset for image, offset in zip(shown, offsets, strict=True)}
    places = [{**place, "offset": new[place["offset"]]} for place in features["mm_placeholders"]["image"]]
    moved = [msgspec.structs.replace(image, offset=new[image.offset]) for image in shown]
    return {**features, "mm_placeholders": {"image": places}}, moved


def prepare_image(rendered: RenderedImage) -> Image:
    """Return the image as turns carry it. Takes some milliseconds per megapixel. Raises EngineAnswerError if the pixels are not
    those of a still image in uint8."""
    try:
        inputs = _inputs.decode(binascii.a2b_base64(rendered.data))
        (dtype, _, pixels), (_, _, packed) = inputs[PIXELS].data, inputs[GRID].data
        patches, grid = bytes(pixels.data), GRID_FORM.unpack(packed.data)
    except (ValueError, TypeError, KeyError, struct.error, msgspec.MsgspecError) as error:
        raise _make_error(repr(error)) from error
    if dtype != "uint8":
        raise _make_error(f"{PIXELS} are {dtype}, not uint8: start vLLM 0.32 or later with --mm-device-do-normalize")
    if pixels.code != RAW_VIEW or min(grid) < 1 or not patches or len(patches) % prod(grid):
        raise _make_error(f"{len(patches)} bytes of pixels for a grid of {grid}")
    return Image(
        digest=digest_image(grid, patches),
        offset=rendered.offset,
        length=rendered.length,
        grid=grid,
        patches=zstandard.ZstdCompressor(level=COMPRESSION_LEVEL).compress(patches),
    )


def _make_error(what: str) -> EngineAnswerError:
    return EngineAnswerError(
        "images", f"the engine's image features are not as in vLLM 0.32 with Qwen2.5-VL or Qwen3-VL: {what}"
    )
