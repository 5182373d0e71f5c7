"""A small random Qwen2.5-VL with the tokenizer of `tiny_model`. Serving it takes torchvision."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from support import tiny_model as text
from support.tiny_model import made_once, tiny_tokenizer

IMAGE_TOKEN = "<|image_pad|>"
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", IMAGE_TOKEN, "<|video_pad|>")
PATCH, MERGED = 14, 2
PLACE = PATCH * MERGED
"""Pixels of an image, each way, that become one token."""
MOST_PLACES = 16

CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content or [] %}
            {{- part.text if part.type == 'text' else '<|vision_start|><|image_pad|><|vision_end|>' }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

PICTURES = {
    "patch_size": PATCH,
    "merge_size": MERGED,
    "size": {"shortest_edge": PLACE**2, "longest_edge": MOST_PLACES * PLACE**2},
    # vLLM does this in the model, by what this file says, and nothing where it says nothing
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.48, 0.46, 0.41],
    "image_std": [0.27, 0.26, 0.28],
}
PROCESSOR = {
    "processor_class": "Qwen2_5_VLProcessor",
    "image_processor": {"image_processor_type": "Qwen2VLImageProcessor", **PICTURES},
    "video_processor": {"video_processor_type": "Qwen2VLVideoProcessor", **PICTURES},
}
"""In words of our own, because transformers makes one only where torchvision is."""


def tiny_vision_model() -> Path:
    """Its folder, made on first use, then found again."""
    sources = Path(__file__).read_bytes() + Path(text.__file__).read_bytes()
    return made_once(f"tiny-qwen2.5-vl-{hashlib.sha256(sources).hexdigest()[:12]}", _make)


def _make(folder: Path) -> None:
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(VISION_TOKENS)})
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps(PROCESSOR))
    vision_start, vision_end, image, video = tokenizer.convert_tokens_to_ids(VISION_TOKENS)
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 2048,
            "initializer_range": 0.1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [8, 12, 12]},
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
            "initializer_range": 0.1,
        },
        vision_start_token_id=vision_start,
        vision_end_token_id=vision_end,
        image_token_id=image,
        video_token_id=video,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2_5_VLForConditionalGeneration(config)
    model.save_pretrained(folder)
