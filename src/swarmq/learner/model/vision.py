"""Images of a layout as a vision tower's inputs, and their places among the tokens. Supported: Qwen2.5-VL, Qwen3-VL.

The pixels are those that the engine's processor prepared. Rescaling and normalisation, which vLLM computes in the model, too, are
those of the processor's file beside the model. An image that several sequences of a pass share is computed once, and its
gradient is the sum over all of its places.

Several ranks gather and reduce the weights of the tower together, so each of them computes it in every pass; a rank whose layout shows
no image computes a blank one, which takes no place and adds nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swarmq.errors import SetUpError
from swarmq.learner.memory.model_copies import find_files
from swarmq.timeline import Layout
from swarmq.timeline.images import list_images
from swarmq.timeline.turns import IntArray

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
"""Files that describe how images are prepared; the first that is there counts, as in vLLM."""
NORM = "swarmq_input_norm"
"""Attribute of a model in which its `InputNorm` is kept."""


@dataclass(frozen=True)
class InputNorm:
    """Rescaling and normalisation of pixels by channel: values x scales + shifts."""

    scales: tuple[float, ...]
    shifts: tuple[float, ...]

    def __call__(self, patches: Tensor) -> Tensor:
        """Return FP32 inputs [P, values] of the vision tower from uint8 patches, whose values are ordered by channel first."""
        scales, shifts = (torch.tensor(each, device=patches.device)[:, None] for each in (self.scales, self.shifts))
        channels = patches.float().view(len(patches), len(self.scales), -1)
        return torch.addcmul(shifts, channels, scales).flatten(-2)


@dataclass(frozen=True)
class PlacedImages:
    """The images of a layout on the device, P patches that become F outputs of the vision tower, in M places."""

    patches: Tensor  # [P, values] uint8
    grids: Tensor  # [images, 3] patches in time, height and width
    places: Tensor  # [M] indices into the layout's tokens
    outputs: Tensor  # [M] index of the output that takes the place

    @classmethod
    def of(cls, layout: Layout, device: torch.device, *, tokens: IntArray | None = None) -> PlacedImages | None:
        """Return the images that a layout shows, or None if it shows none. `tokens` [L]: ascending indices into the layout; places are
        among these tokens alone."""
        first: dict[int, int] = {}
        places, outputs, shown = [], [], []
        size = 0
        for at, image in list_images(layout, 0, layout.num_tokens):
            if id(image) not in first:
                first[id(image)], size = size, size + image.num_tokens
                shown.append(image)
            steps = np.arange(image.num_tokens)
            places.append(at + steps)
            outputs.append(first[id(image)] + steps)
        if not shown:
            return None
        among, taken = np.concatenate(places), np.concatenate(outputs)
        if tokens is not None:
            mine = np.isin(among, tokens)
            among, taken = np.searchsorted(tokens, among[mine]), taken[mine]
        return cls(
            patches=torch.from_numpy(np.concatenate([image.values for image in shown])).to(device),
            grids=torch.tensor([image.grid for image in shown], device=device),
            places=torch.from_numpy(among).to(device),
            outputs=torch.from_numpy(taken).to(device),
        )

    @classmethod
    def blank(cls, config: Any, device: torch.device) -> PlacedImages:
        """Return the smallest image that a vision tower takes, in no place. `config`: the model's."""
        tower = config.vision_config
        side = tower.spatial_merge_size
        values = tower.in_channels * tower.temporal_patch_size * tower.patch_size**2
        nowhere = torch.zeros(0, dtype=torch.int64, device=device)
        return cls(
            patches=torch.zeros((side**2, values), dtype=torch.uint8, device=device),
            grids=torch.tensor([[1, side, side]], device=device),
            places=nowhere,
            outputs=nowhere,
        )


@dataclass(frozen=True)
class SeenTokens:
    """What a decoder takes in place of a layout's tokens."""

    embeddings: Tensor  # [1, T, H]
    shown: Tensor  # [1, T] bool, True in the places of images
    deepstack: list[Tensor]
    """[M, H] for each of the first layers: what is added to the layer's outputs in these places (2406.04334)."""

    def inputs(self, row: slice) -> dict[str, Any]:
        """Return the decoder's arguments for some tokens."""
        found: dict[str, Any] = {"inputs_embeds": self.embeddings[:, row]}
        if self.deepstack:
            first, end = int(self.shown[:, : row.start].sum()), int(self.shown[:, : row.stop].sum())
            found |= {
                "visual_pos_masks": self.shown[:, row],
                "deepstack_visual_embeds": [each[first:end] for each in self.deepstack],
            }
        return found


def takes_images(config: Any) -> bool:
    return hasattr(config, "vision_config")


def embed(lm: Any, input_ids: Tensor, images: PlacedImages) -> SeenTokens:
    """Return a layout's tokens with the vision tower's outputs in the places of images."""
    embeddings: Tensor = lm.get_input_embeddings()(input_ids)
    features = lm.get_image_features(getattr(lm, NORM)(images.patches), images.grids, return_dict=True)

    def place(outputs: Sequence[Tensor]) -> Tensor:
        # a shared image has several places; an embedding sums their gradients in a fixed order
        return torch.nn.functional.embedding(images.outputs, torch.cat(tuple(outputs)).to(embeddings.dtype))

    return SeenTokens(
        embeddings=embeddings.index_copy(1, images.places, place(features.pooler_output)[None]),
        shown=torch.zeros_like(input_ids, dtype=torch.bool).index_fill(1, images.places, True),
        deepstack=[place(each) for each in getattr(features, "deepstack_features", ())],
    )


def drop_gradient(lm: Any) -> None:
    """Drop the vision tower's gradient, which is zero if a batch shows no image: an optimizer changes weights with such a gradient, but not
    weights without one."""
    for parameter in lm.get_encoder(modality="image").parameters():
        parameter.grad = None


def set_input_norm(lm: Any, source: str) -> None:
    """Read how pixels are normalised, and keep it with the model. Raises SetUpError if the model's folder does not say."""
    setattr(lm, NORM, read_input_norm(source))


def read_input_norm(source: str) -> InputNorm:
    files = find_files(source)
    found = next((path for name in PROCESSOR_FILES if (path := _find_file(files, name))), None)
    if found is None:
        raise SetUpError(
            f"model {source} takes images, but has neither of {', '.join(PROCESSOR_FILES)}: fetch its files again, all of them"
        )
    try:
        settings = json.loads(found.read_text())
        settings = settings.get("image_processor", settings)
        scale = float(settings.get("rescale_factor", 1 / 255)) if settings.get("do_rescale", True) else 1.0
        normalised = settings.get("do_normalize", True)
        means, deviations = (
            [float(each) for each in settings[key]] if normalised else [neutral] * 3
            for key, neutral in (("image_mean", 0.0), ("image_std", 1.0))
        )
        scales = tuple(scale / each for each in deviations)
        shifts = tuple(-mean / each for mean, each in zip(means, deviations, strict=True))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise SetUpError(
            f"{found} does not say how images are normalised (image_mean, image_std): {error!r}"
        ) from error
    if not all(map(math.isfinite, (*scales, *shifts))):
        raise SetUpError(f"{found}: image_mean, image_std or rescale_factor is not finite")
    return InputNorm(scales=scales, shifts=shifts)


def _find_file(files: str, name: str) -> Path | None:
    """Return the file of a model folder, or of a model of the hub."""
    if Path(files).is_dir():
        path = Path(files) / name
        return path if path.is_file() else None
    from transformers.utils.hub import cached_file  # noqa: PLC0415 - seldom needed

    found = cached_file(files, name, _raise_exceptions_for_missing_entries=False)
    return Path(found) if found else None
