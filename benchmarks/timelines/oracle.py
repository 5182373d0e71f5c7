"""Rows and trees against the untouched model in FP32, on whatever device: the same numbers, or how far apart.

The reference computes every turn alone, with the model's own attention and full logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, MistralConfig, PreTrainedModel, Qwen3Config

from benchmarks.timelines.workloads import Episode, Source, forks, think_stripped
from swarmq.learner.model.activation_checkpointing import ActivationCheckpointing
from swarmq.learner.model.layout_model import LayoutModel, PlacedLayout
from swarmq.timeline import Layout, PrefixTree, plan_rows

VOCAB = 512
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.1,
}
CONFIGS = {"qwen3": Qwen3Config(**SHAPE), "mistral": MistralConfig(**SHAPE, sliding_window=100)}

Key = tuple[int, int, int]


def compare(device: torch.device) -> dict[str, dict[str, float]]:
    """Per model and way: largest difference of a log-probability, relative difference of the whole gradient."""
    source = Source(unit=16, vocab=VOCAB)
    group = [*forks(3, members=2, trunk=3)(source), *think_stripped(4)(source)]
    budget = 600
    found = {}
    for name in CONFIGS:
        logprobs, gradient = by_turn(build(name, device), group)
        for way, layouts in (("rows", plan_rows(group, budget)), ("tree", PrefixTree(group).layouts(budget))):
            theirs, their_gradient = by_layout(LayoutModel(build(name, device)), layouts)
            found[f"{name} {way}"] = {
                "oracle_logprob_max_abs": max(abs(theirs[key] - logprobs[key]) for key in logprobs),
                "oracle_grad_rel": float((their_gradient - gradient).norm() / gradient.norm()),
            }
    return found


def worst(found: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Over all of `compare`; nothing of nothing."""
    names = ("oracle_logprob_max_abs", "oracle_grad_rel") if found else ()
    return {name: max(each[name] for each in found.values()) for name in names}


def build(name: str, device: torch.device) -> PreTrainedModel:
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32, attn_implementation="eager")
    model.train()
    ActivationCheckpointing.enable(model)
    return model


def by_turn(model: PreTrainedModel, group: Sequence[Episode]) -> tuple[dict[Key, float], Tensor]:
    logprobs: dict[Key, float] = {}
    for e, turns in enumerate(group):
        for t, turn in enumerate(turns):
            ids = torch.tensor(turn.token_ids.tolist(), device=model.device)
            logits = model(input_ids=ids[None], use_cache=False).logits[0, turn.prompt_length - 1 : -1]
            chosen = logits.log_softmax(-1).gather(1, ids[turn.prompt_length :, None])[:, 0]
            keys = [(e, t, offset) for offset in range(len(chosen))]
            (chosen * weights(keys, chosen)).sum().backward()
            logprobs.update(zip(keys, chosen.tolist(), strict=True))
    return logprobs, gradient_of(model)


def by_layout(model: LayoutModel, layouts: Sequence[Layout]) -> tuple[dict[Key, float], Tensor]:
    logprobs: dict[Key, float] = {}
    for layout in layouts:
        chosen = model(PlacedLayout.of(layout, model.model.device)).logprobs
        keys = list(zip(layout.episodes.tolist(), layout.turns.tolist(), layout.offsets.tolist(), strict=True))
        (chosen * weights(keys, chosen)).sum().backward()
        logprobs.update(zip(keys, chosen.tolist(), strict=True))
    return logprobs, gradient_of(model.model)


def weights(keys: Sequence[Key], like: Tensor) -> Tensor:
    """Some fixed weight for every sampled token, as an advantage would be."""
    return torch.tensor(keys, dtype=torch.float32, device=like.device).matmul(like.new_tensor([7.0, 3.0, 1.0])).sin()


def gradient_of(model: PreTrainedModel) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
