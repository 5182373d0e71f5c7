"""The smallest Qwen2.5-VL and Qwen3-VL that vLLM serves: two or three layers of width 128 under a small vision tower. Tests use them, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

MERGED = 2
"""Number of patches, each way, that become one token."""
IMAGE = "<|image_pad|>"
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", IMAGE, "<|video_pad|>")


class Architecture(NamedTuple):
    """What distinguishes a kind of model that takes images."""

    family: str
    """Type of the model in transformers."""
    patch: int
    """Pixels of a patch, each way."""
    processor: str
    """Prefix of the class of its processor in transformers."""
    video_processor: str
    text: Mapping[str, Any]
    """Fields of its language model's configuration."""
    rotary: Mapping[str, Any]
    """Fields of its rotary embeddings."""
    vision: Mapping[str, Any]
    """Fields of its vision tower's configuration."""

    @property
    def place(self) -> int:
        """Pixels of an image, each way, that become one token."""
        return self.patch * MERGED

    @property
    def values(self) -> int:
        """Number of values of a patch: three channels of two equal frames."""
        return 3 * 2 * self.patch**2


QWEN2_5_VL = Architecture(
    family="qwen2_5_vl",
    patch=14,
    processor="Qwen2_5_VL",
    video_processor="Qwen2VLVideoProcessor",
    text={},
    rotary={"mrope_section": [8, 12, 12]},
    vision={"depth": 2, "fullatt_block_indexes": [1]},
)
QWEN3_VL = Architecture(
    family="qwen3_vl",
    patch=16,
    processor="Qwen3VL",
    video_processor="Qwen3VLVideoProcessor",
    text={"head_dim": 64, "num_hidden_layers": 3},  # what is added after a last layer would reach no sampled token
    rotary={"mrope_section": [12, 10, 10], "mrope_interleaved": True},
    vision={"depth": 3, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64},
)


def describe_pictures(
    kind: Architecture, *, most_places: int, mean: Sequence[float], deviation: Sequence[float]
) -> dict[str, Any]:
    """Return how pictures are prepared. `most_places`: maximum number of tokens of an image. `mean`, `deviation`: of each channel."""
    return {
        "patch_size": kind.patch,
        "temporal_patch_size": 2,
        "merge_size": MERGED,
        "size": {"shortest_edge": kind.place**2, "longest_edge": most_places * kind.place**2},
        # vLLM does this in the model, by what this file says, and nothing where it says nothing
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(mean),
        "image_std": list(deviation),
    }


def describe_processor(kind: Architecture, pictures: dict[str, Any]) -> dict[str, Any]:
    """Return the content of processor_config.json, which transformers writes only where torchvision is."""
    return {
        "processor_class": f"{kind.processor}Processor",
        "image_processor": {"image_processor_type": "Qwen2VLImageProcessor", **pictures},
        "video_processor": {"video_processor_type": kind.video_processor, **pictures},
    }


def make_config(kind: Architecture, tokenizer: Any, *, spread: float, rope_theta: float, max_length: int) -> Any:
    """Return the model's configuration. `spread`: standard deviation of random weights. `tokenizer`: has the `VISION_TOKENS`."""
    from transformers import AutoConfig  # noqa: PLC0415 - takes seconds

    start, end, image, video = tokenizer.convert_tokens_to_ids(list(VISION_TOKENS))
    return AutoConfig.for_model(
        kind.family,
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": max_length,
            "initializer_range": spread,
            "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta, **kind.rotary},
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            **kind.text,
        },
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": 128,
            "patch_size": kind.patch,
            "spatial_merge_size": MERGED,
            "initializer_range": spread,
            **kind.vision,
        },
        vision_start_token_id=start,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
    )
