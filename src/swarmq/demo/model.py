"""The demo's model: a small Qwen3-architecture causal LM with fresh weights, in the folder format of Hugging Face."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes. `head_dim` is one that vLLM's CPU attention kernels know (a multiple of 32)."""

    hidden: int = 256
    layers: int = 2
    heads: int = 8
    head_dim: int = 32
    feed_forward: int = 768
    max_tokens: int = 512
    rope_theta: float = 100.0
    """Dialogues are about a hundred tokens long; the usual 10,000 leaves most frequencies unused, and copying is
    learned late."""
    spread: float = 0.06
    """Standard deviation of fresh weights, near 1 / sqrt(hidden); the usual 0.02 is for much wider models."""


def build_model(tokenizer: PreTrainedTokenizerFast, architecture: Architecture, *, seed: int) -> Qwen3ForCausalLM:
    """Fresh FP32 weights, the same for the same seed. Head and embedding are separate tensors."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=architecture.hidden,
        num_hidden_layers=architecture.layers,
        num_attention_heads=architecture.heads,
        num_key_value_heads=architecture.heads,
        head_dim=architecture.head_dim,
        intermediate_size=architecture.feed_forward,
        max_position_embeddings=architecture.max_tokens,
        initializer_range=architecture.spread,
        rope_parameters={"rope_type": "default", "rope_theta": architecture.rope_theta},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """A folder that vLLM and the Auto classes load."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
