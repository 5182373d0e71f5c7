"""The smallest Qwen2.5-VL that vLLM serves: two layers of width 128 under a vision tower of two layers. Tests use it, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import Qwen2_5_VLConfig

PATCH, MERGED = 14, 2
"""Pixels of a patch, each way, and number of patches, each way, that become one token."""
IMAGE = "<|image_pad|>"
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", IMAGE, "<|video_pad|>")


def describe_pictures(*, most_places: int, mean: Sequence[float], deviation: Sequence[float]) -> dict[str, Any]:
    """Return how pictures are prepared. `most_places`: maximum number of tokens of an image. `mean`, `deviation`: of each channel."""
    place = (PATCH * MERGED) ** 2
    return {
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": MERGED,
        "size": {"shortest_edge": place, "longest_edge": most_places * place},
        # vLLM does this in the model, by what this file says, and nothing where it says nothing
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(mean),
        "image_std": list(deviation),
    }


def describe_processor(pictures: dict[str, Any]) -> dict[str, Any]:
    """Return the content of processor_config.json, which transformers writes only where torchvision is."""
    return {
        "processor_class": "Qwen2_5_VLProcessor",
        "image_processor": {"image_processor_type": "Qwen2VLImageProcessor", **pictures},
        "video_processor": {"video_processor_type": "Qwen2VLVideoProcessor", **pictures},
    }


def make_config(tokenizer: Any, *, spread: float, rope_theta: float, max_length: int) -> Qwen2_5_VLConfig:
    """Return the model's configuration. `spread`: standard deviation of random weights. `tokenizer`: has the `VISION_TOKENS`."""
    from transformers import Qwen2_5_VLConfig  # noqa: PLC0415 - takes seconds

    start, end, image, video = tokenizer.convert_tokens_to_ids(list(VISION_TOKENS))
    return Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": max_length,
            "initializer_range": spread,
            "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta, "mrope_section": [8, 12, 12]},
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
            "initializer_range": spread,
        },
        vision_start_token_id=start,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
    )
