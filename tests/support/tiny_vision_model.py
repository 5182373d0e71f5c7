"""A small random Qwen2.5-VL with the tokenizer of `tiny_model`. Serving it takes torchvision."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from benchmarks.vlm import architecture
from benchmarks.vlm.architecture import MERGED, PATCH, VISION_TOKENS, describe_pictures, describe_processor, make_config

from support import tiny_model as text
from support.tiny_model import made_once, tiny_tokenizer

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

PICTURES = describe_pictures(most_places=MOST_PLACES, mean=[0.48, 0.46, 0.41], deviation=[0.27, 0.26, 0.28])


def tiny_vision_model() -> Path:
    """Its folder, made on first use, then found again."""
    sources = b"".join(Path(each).read_bytes() for each in (__file__, text.__file__, architecture.__file__))
    return made_once(f"tiny-qwen2.5-vl-{hashlib.sha256(sources).hexdigest()[:12]}", _make)


def _make(folder: Path) -> None:
    import torch
    from transformers import Qwen2_5_VLForConditionalGeneration

    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(VISION_TOKENS)})
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps(describe_processor(PICTURES)))
    config = make_config(tokenizer, spread=0.1, rope_theta=10_000.0, max_length=2048)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2_5_VLForConditionalGeneration(config)
    model.save_pretrained(folder)
