"""A Qwen2.5-VL of half a million parameters that answers with a colour, but has never learned to look.

Random weights and a short warm-up, in which the demonstrated colour of each image is drawn by lot: after it the model answers
every image with one of the colours, each equally often, so all that it can gain in a run it gains by seeing.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import AutoModelForImageTextToText

from benchmarks.vlm.agent import COLOURS, QUESTION, SIDE
from benchmarks.vlm.architecture import (
    IMAGE,
    QWEN2_5_VL,
    VISION_TOKENS,
    describe_pictures,
    describe_processor,
    make_config,
)
from swarmq.learner.model.vision import InputNorm
from swarmq.toy_model.tokenizer import build_tokenizer

PLACES = (SIDE // QWEN2_5_VL.place) ** 2
"""Tokens of an image."""
GRID = (1, SIDE // QWEN2_5_VL.patch, SIDE // QWEN2_5_VL.patch)
SHOWN = f"<|vision_start|>{IMAGE}<|vision_end|>"
TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string -%}{{ message.content }}{%- else -%}
{%- for part in message.content -%}{{ part.text if part.type == 'text' else SHOWN }}{%- endfor -%}
{%- endif -%}{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}""".replace("SHOWN", repr(SHOWN))
MEAN, DEVIATION = 0.5, 0.25
PICTURES = describe_pictures(QWEN2_5_VL, most_places=16, mean=[MEAN] * 3, deviation=[DEVIATION] * 3)
STEPS, BATCH = 50, 16


def make_model(folder: Path, *, seed: int) -> Path:
    """Make the model in `folder`, and return it."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    texts = [
        f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n{colour}<|im_end|>\n" for colour in COLOURS
    ]
    tokenizer = build_tokenizer(texts * 50, vocabulary=320)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *VISION_TOKENS]})
    tokenizer.chat_template = TEMPLATE
    config = make_config(QWEN2_5_VL, tokenizer, spread=0.08, rope_theta=100.0, max_length=512)
    lm = AutoModelForImageTextToText.from_config(config)
    _warm_up(lm, tokenizer, random.Random(seed))
    lm.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps(describe_processor(QWEN2_5_VL, PICTURES)))
    return folder


def _warm_up(lm: Any, tokenizer: Any, random_numbers: random.Random) -> None:
    optimizer = torch.optim.AdamW(lm.parameters(), lr=2e-3, weight_decay=0.0)
    question = f"<|im_start|>user\n{SHOWN.replace(IMAGE, IMAGE * PLACES)}{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    prompt = tokenizer.encode(question, add_special_tokens=False)
    answers = [tokenizer.encode(f"{colour}<|im_end|>", add_special_tokens=False) for colour in COLOURS]
    norm = InputNorm(scales=(1 / 255 / DEVIATION,) * 3, shifts=(-MEAN / DEVIATION,) * 3)
    lm.train()
    for _ in range(STEPS):
        ids = torch.tensor([prompt + random_numbers.choice(answers) for _ in range(BATCH)])
        colours = torch.tensor(
            [[random_numbers.randrange(256) for _ in range(3)] for _ in range(BATCH)], dtype=torch.uint8
        )
        patches = colours.repeat_interleave(QWEN2_5_VL.values // 3, 1).repeat_interleave(GRID[1] * GRID[2], 0)
        scores = lm(
            input_ids=ids,
            pixel_values=norm(patches),
            image_grid_thw=torch.tensor([GRID] * BATCH),
            mm_token_type_ids=(ids == lm.config.image_token_id).int(),
        ).logits[:, len(prompt) - 1 : -1]
        optimizer.zero_grad()
        functional.cross_entropy(scores.flatten(0, 1), ids[:, len(prompt) :].flatten()).backward()
        optimizer.step()
    lm.eval()
