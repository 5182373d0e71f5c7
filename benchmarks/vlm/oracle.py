"""transformers' own forward and backward pass over turns with images, one turn at a time, in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from swarmq.learner.model.layout_model import LayoutModel, PlacedLayout
from swarmq.learner.model.vision import read_input_norm
from swarmq.messages import Turn
from swarmq.timeline import ImagePatches, ImageTable, Layout, PrefixTree, plan_rows, resolve

CPU = torch.device("cpu")
PARTS = ("visual", "language_model", "lm_head")


class Computed(NamedTuple):
    logprobs: dict[tuple[int, int], float]
    """(turn, number of the sampled token) -> log-probability."""
    gradients: dict[str, Tensor]
    """Parameter -> gradient of the sum of all log-probabilities."""


class Distance(NamedTuple):
    logprob: float
    """Largest difference in nats."""
    gradient: float
    """Norm of the difference relative to the norm, the larger one of vision tower and language model."""


def compute_alone(folder: Path, turns: Sequence[Turn]) -> Computed:
    """What transformers computes."""
    lm = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    norm, table, logprobs, total = read_input_norm(str(folder)), ImageTable(), {}, torch.zeros((), dtype=torch.float64)
    marked, plain = resolve(turns, images=table), resolve(turns)
    for number, (turn, real) in enumerate(zip(marked, plain, strict=True)):
        ids, places = torch.from_numpy(real.token_ids.astype(np.int64)), torch.from_numpy(turn.token_ids < 0)
        shown = _list_shown(turn.token_ids, table)
        pixels = None
        if shown:
            values = torch.from_numpy(np.concatenate([image.values for image in shown])).double()
            scales, shifts = (torch.tensor(each, dtype=torch.float64)[:, None] for each in (norm.scales, norm.shifts))
            pixels = (values.view(len(values), len(scales), -1) * scales + shifts).flatten(-2)
        scores = _forward(lm, ids, places, pixels, torch.tensor([image.grid for image in shown]))
        chosen = scores.log_softmax(-1)[turn.prompt_length - 1 : -1].gather(1, ids[turn.prompt_length :, None])[:, 0]
        logprobs |= {(number, at): value for at, value in enumerate(chosen.tolist())}
        total = total + chosen.sum()
    total.backward()
    return Computed(logprobs, {name: each.grad for name, each in lm.named_parameters() if each.grad is not None})


def _list_shown(token_ids: Any, table: ImageTable) -> list[ImagePatches]:
    shown: list[ImagePatches] = []
    at = 0
    while at < len(token_ids):
        if token_ids[at] < 0:
            shown.append(table.images[-1 - int(token_ids[at])])
        at += shown[-1].num_tokens if token_ids[at] < 0 else 1
    return shown


def _forward(lm: Any, ids: Tensor, places: Tensor, pixels: Tensor | None, grids: Tensor) -> Tensor:
    if pixels is None:
        scores: Tensor = lm(input_ids=ids[None]).logits[0]
    elif (ids == lm.config.image_token_id).equal(places):
        shown = {"pixel_values": pixels, "image_grid_thw": grids, "mm_token_type_ids": places[None].int()}
        scores = lm(input_ids=ids[None], **shown).logits[0]
    else:  # transformers would take a sampled placeholder token for a place of the image
        seen = lm.get_image_features(pixels, grids, return_dict=True)
        embeddings = lm.get_input_embeddings()(ids).masked_scatter(
            places[:, None], torch.cat(tuple(seen.pooler_output))
        )
        positions, _ = lm.model.get_rope_index(ids[None], places[None].int(), image_grid_thw=grids)
        deep = [torch.cat(tuple(each)) for each in getattr(seen, "deepstack_features", ())]
        more = {"visual_pos_masks": places[None], "deepstack_visual_embeds": deep} if deep else {}
        scores = lm.lm_head(lm.model.language_model(inputs_embeds=embeddings[None], position_ids=positions, **more)[0])[
            0
        ]
    return scores


def lay(turns: Sequence[Turn], way: str, budget: int) -> list[Layout]:
    """The turns as packed rows or as a tree."""
    table = ImageTable()
    resolved = resolve(turns, images=table)
    layouts = plan_rows([resolved], budget) if way == "rows" else PrefixTree([resolved]).layouts(budget)
    return [msgspec.structs.replace(layout, images=table.images) for layout in layouts]


def compute(model: LayoutModel, layouts: Sequence[Layout]) -> Computed:
    """What the learner computes."""
    model.zero_grad()
    logprobs: dict[tuple[int, int], float] = {}
    for layout in layouts:
        chosen = model(PlacedLayout.of(layout, CPU)).logprobs
        tokens = zip(layout.turns.tolist(), layout.offsets.tolist(), strict=True)
        logprobs |= dict(zip(tokens, chosen.tolist(), strict=True))
        chosen.sum().backward()
    named = model.model.named_parameters()
    return Computed(logprobs, {name: each.grad for name, each in named if each.grad is not None})


def compare(found: Computed, expected: Computed) -> Distance:
    """Raises ValueError if they are not about the same tokens and parameters."""
    if found.logprobs.keys() != expected.logprobs.keys() or found.gradients.keys() != expected.gradients.keys():
        raise ValueError("other tokens or parameters than transformers'")
    apart = max(abs(found.logprobs[token] - value) for token, value in expected.logprobs.items())
    return Distance(apart, max(_relative(found.gradients, expected.gradients, part) for part in PARTS))


def _relative(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], part: str) -> float:
    names = [name for name in expected if part in name]
    apart = sum(float(((found[name] - expected[name]) ** 2).sum()) for name in names)
    size = sum(float((expected[name] ** 2).sum()) for name in names)
    return float((apart / size) ** 0.5) if size else 0.0
