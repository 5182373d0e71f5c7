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
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from benchmarks.vlm.agent import COLOURS, QUESTION, SIDE
from swarmq.learner.model.vision import InputNorm
from swarmq.toy_model.tokenizer import build_tokenizer

PATCH, MERGED = 14, 2
PLACES = (SIDE // (PATCH * MERGED)) ** 2
"""Tokens of an image."""
GRID = (1, SIDE // PATCH, SIDE // PATCH)
VALUES = 3 * 2 * PATCH**2
"""Of a patch: three channels of two equal frames."""
IMAGE = "<|image_pad|>"
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", IMAGE, "<|video_pad|>")
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
PICTURES = {
    "patch_size": PATCH,
    "temporal_patch_size": 2,
    "merge_size": MERGED,
    "size": {"shortest_edge": (PATCH * MERGED) ** 2, "longest_edge": 16 * (PATCH * MERGED) ** 2},
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [MEAN] * 3,
    "image_std": [DEVIATION] * 3,
}
PROCESSOR = {
    "processor_class": "Qwen2_5_VLProcessor",
    "image_processor": {"image_processor_type": "Qwen2VLImageProcessor", **PICTURES},
    "video_processor": {"video_processor_type": "Qwen2VLVideoProcessor", **PICTURES},
}
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
    lm = Qwen2_5_VLForConditionalGeneration(_config(tokenizer))
    _warm_up(lm, tokenizer, random.Random(seed))
    lm.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps(PROCESSOR))
    return folder


def _config(tokenizer: Any) -> Qwen2_5_VLConfig:
    start, end, image, video = tokenizer.convert_tokens_to_ids(list(VISION_TOKENS))
    return Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 512,
            "initializer_range": 0.08,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [8, 12, 12]},
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": 128,
            "patch_size": PATCH,
            "spatial_merge_size": MERGED,
            "fullatt_block_indexes": [1],
            "initializer_range": 0.08,
        },
        vision_start_token_id=start,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
    )


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
        patches = colours.repeat_interleave(VALUES // 3, 1).repeat_interleave(GRID[1] * GRID[2], 0)
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
