"""A toy model: a small Qwen3-architecture causal LM with random weights, in Hugging Face's folder format."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from swarmq.toy_model.recipe import Architecture


def build_model(tokenizer: PreTrainedTokenizerFast, architecture: Architecture, *, seed: int) -> Qwen3ForCausalLM:
    """Return a model with random FP32 weights that depend on the seed alone. Head and embedding are separate tensors."""
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
    """Save model and tokenizer to a folder that vLLM and the Auto classes load."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
