"""A small random model that takes images, with the tokenizer of `tiny_model`. Serving it takes torchvision."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from benchmarks.vlm import architecture
from benchmarks.vlm.architecture import (
    QWEN2_5_VL,
    VISION_TOKENS,
    Architecture,
    describe_pictures,
    describe_processor,
    make_config,
)

from support import tiny_model as text
from support.tiny_model import made_once, tiny_tokenizer

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

MEAN, DEVIATION = [0.48, 0.46, 0.41], [0.27, 0.26, 0.28]


def tiny_vision_model(kind: Architecture = QWEN2_5_VL) -> Path:
    """Its folder, made on first use, then found again."""
    sources = b"".join(Path(each).read_bytes() for each in (__file__, text.__file__, architecture.__file__))
    name = f"tiny-{kind.family}-{hashlib.sha256(sources).hexdigest()[:12]}"
    return made_once(name, lambda folder: _make(kind, folder))


def _make(kind: Architecture, folder: Path) -> None:
    import torch
    from transformers import AutoModelForImageTextToText

    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(VISION_TOKENS)})
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    pictures = describe_pictures(kind, most_places=MOST_PLACES, mean=MEAN, deviation=DEVIATION)
    (folder / "processor_config.json").write_text(json.dumps(describe_processor(kind, pictures)))
    config = make_config(kind, tokenizer, spread=0.1, rope_theta=10_000.0, max_length=2048)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config)
    model.save_pretrained(folder)
