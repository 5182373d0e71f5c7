"""Which of verl's choices is fastest on this card: the attention of packed rows, and the log-probabilities of a vocabulary.

    python -m benchmarks.peers.theirs.verl_probe RESULT.json           in verl's environment, about half a minute

FlashAttention 2, verl's default, is built from source; where it is not, `override_config.attn_implementation` names
another that transformers knows. Every choice is computed forward and backward as verl's FSDP engine computes it.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

import benchmarks.peers.theirs.flash_attention_4  # noqa: F401 - so that it runs

CHOICES = (
    ("attention", "flash_attention_4"),
    ("attention", "sdpa"),
    ("logits", "flash"),
    ("logits", "triton"),
    ("logits", "torch"),
    ("logits", "liger"),
    ("attention", "flex_attention"),  # last, because transformers tunes it for minutes
)
ROWS, ROW_TOKENS = 10, 1638
LAYERS = 4
SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
VOCABULARY = 151936
REPEATS = 3


def main(result: Path) -> None:
    found: dict[str, dict[str, float | str]] = {"attention": {}, "logits": {}}
    for kind, name in CHOICES:
        try:
            found[kind][name] = seconds((attention if kind == "attention" else logits)(name))
        except Exception:
            found[kind][name] = traceback.format_exc(limit=-3)[-1500:]
        torch.cuda.empty_cache()
        result.write_text(json.dumps(found, indent=1))
        print(kind, name, found[kind][name], flush=True)


def attention(name: str) -> Callable[[], None]:
    """Return a forward and backward pass through decoder layers, attention by `name`."""
    config = Qwen3Config(**SHAPE, num_hidden_layers=LAYERS, vocab_size=1024, attn_implementation=name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to("cuda").model
    ids = torch.zeros(1, ROWS * ROW_TOKENS, dtype=torch.long, device="cuda")
    positions = torch.arange(ROW_TOKENS, device="cuda").repeat(ROWS)[None]

    def compute() -> None:
        model(
            input_ids=ids, position_ids=positions, use_cache=False
        ).last_hidden_state.float().square().mean().backward()

    return compute


def logits(name: str) -> Callable[[], None]:
    """Return a forward and backward pass from hidden states to the log-probability of each token."""
    from verl.utils.experimental.torch_functional import FusedLinearForPPO  # noqa: PLC0415 - slow to import
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy  # noqa: PLC0415
    from verl.utils.torch_functional import logprobs_from_logits  # noqa: PLC0415

    tokens = ROWS * ROW_TOKENS
    hidden = torch.randn(1, tokens, SHAPE["hidden_size"], dtype=torch.bfloat16, device="cuda", requires_grad=True)
    head = torch.randn(VOCABULARY, SHAPE["hidden_size"], dtype=torch.bfloat16, device="cuda", requires_grad=True)
    labels = torch.randint(VOCABULARY, (1, tokens), device="cuda")

    def compute() -> None:
        if name == "flash":
            logprobs = logprobs_from_logits((hidden @ head.T).squeeze(0), labels.squeeze(0), inplace_backward=True)
        elif name == "triton":
            logprobs, _ = linear_cross_entropy(hidden, head, labels, 1.0, "none")
        else:
            logprobs, _ = FusedLinearForPPO(impl_backend=name)(hidden, head, labels, 1.0)
        logprobs.mean().backward()

    return compute


def seconds(compute: Callable[[], None]) -> float:
    """Return the shortest of some passes after the first, which compiles."""
    compute()
    taken = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        compute()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return min(taken)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
