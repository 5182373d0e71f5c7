"""Tiny random models of several architectures, and random groups of episodes that fork."""

from __future__ import annotations

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers import models as families

from swarmq.timeline import ResolvedTurn, make_resolved_turn

VOCAB = 48
SHARED = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
CONFIGS = {
    "qwen3": (families.qwen3.Qwen3Config, {}),
    "qwen2": (families.qwen2.Qwen2Config, {}),
    "llama": (families.llama.LlamaConfig, {"tie_word_embeddings": True}),
    "mistral": (families.mistral.MistralConfig, {"sliding_window": 7}),
    "gemma2": (
        families.gemma2.Gemma2Config,
        {"sliding_window": 7, "layer_types": MIXED, "attn_logit_softcapping": 2.0},
    ),
    "gemma3": (families.gemma3.Gemma3TextConfig, {"sliding_window": 7, "layer_types": MIXED}),
    "gpt-oss": (
        families.gpt_oss.GptOssConfig,
        {"sliding_window": 7, "layer_types": MIXED, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "cohere": (families.cohere.CohereConfig, {"logit_scale": 0.3}),
    "granite": (families.granite.GraniteConfig, {"logits_scaling": 3.0}),
    "phi": (families.phi.PhiConfig, {"num_key_value_heads": 4}),
}
OF_THEIR_OWN = {
    "phimoe": (families.phimoe.PhimoeConfig, {"sliding_window": 7, "num_local_experts": 4}),
    "nemotron": (families.nemotron.NemotronConfig, {}),
    "moshi": (families.moshi.MoshiConfig, {}),
    "doge": (families.doge.DogeConfig, {}),
    "llama4_text": (
        families.llama4.Llama4TextConfig,
        {"num_local_experts": 2, "intermediate_size_mlp": 48, "attention_chunk_size": 64},
    ),
    "electra": (families.electra.ElectraConfig, {"is_decoder": True, "embedding_size": 16}),
}
"""Families whose layers keep to themselves what attention should know, or whose ends are not where those of others are."""
INHERENTLY_SEQUENTIAL = {
    "qwen3-next": (
        families.qwen3_next.Qwen3NextConfig,
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_value_heads": 2,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "num_experts": 0,
            "mlp_only_layers": [0, 1, 2],
        },
    ),
}


def make_model(name: str, attention: str = "sdpa") -> PreTrainedModel:
    family, special = (CONFIGS | OF_THEIR_OWN | INHERENTLY_SEQUENTIAL)[name]
    torch.manual_seed(0)
    config = family(**(SHARED | special))
    if name in {"gpt-oss", "gemma2"}:
        attention = "eager"  # transformers' other one knows neither sinks nor soft-capping
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32).train()


def make_group(seed: int, episodes: int = 3, turns: int = 5) -> list[list[ResolvedTurn]]:
    """Episodes with a common prompt; each turn continues a random earlier one, whole or edited, or samples it again."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, VOCAB, 9).tolist()
    group = []
    for _ in range(episodes):
        made: list[ResolvedTurn] = []
        for _ in range(turns):
            history = prompt
            if made and rng.random() < 0.85:
                before = made[rng.integers(len(made))]
                kept = len(before) if rng.random() < 0.6 else int(rng.integers(1, len(before) + 1))
                history = before.token_ids[:kept].tolist()
            history = [*history, *rng.integers(0, VOCAB, rng.integers(0, 5)).tolist()]
            sampled = rng.integers(0, VOCAB, rng.integers(1, 6)).tolist()
            made.append(make_resolved_turn(history, sampled, rng.normal(-1, 0.1, len(sampled))))
        made.append(made[0])
        group.append(made)
    return group
