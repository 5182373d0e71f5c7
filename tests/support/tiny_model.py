"""A small random Qwen3 in the shape of a real model folder: weights, byte-level BPE tokenizer, chat template.

Everything that a real model brings and that our code reads is there (roles, tool calls, special tokens, tied
embeddings), so a test that passes on it does not pass by accident. Built on the spot, kept in a cache folder.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

CORPUS = """
The agent reads the task, thinks, calls a tool and answers. A user asks: what is 17 + 25? The answer is 42.
{"name": "calculator", "arguments": {"expression": "3 * (4 + 5)"}} {"name": "search", "arguments": {"query": "weather"}}
You are a helpful assistant. Use the tools that you are given. Say only what you know, in a few words, and stop.
def reward(answer: str, expected: str) -> float: return 1.0 if answer.strip() == expected else 0.0
The quick brown fox jumps over the lazy dog; it does so 1234567890 times, then it sleeps. Zwölf Boxkämpfer, 北京, 🙂.
import json, os; for i in range(10): print(f"{i} squared is {i * i}"); assert i < 10, "never"
What is the capital of France? Paris. What is the sum of the numbers from one to ten? Fifty-five. Think step by step.
"""

CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools>\\nCall one with <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function or call %}
            {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else (call.arguments | tojson) }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


def tiny_model(cache: Path | None = None, *, seed: int = 0) -> Path:
    """The folder of the model, about 3 million parameters; made on first use, then found again."""
    digest = hashlib.sha256(Path(__file__).read_bytes() + str(seed).encode()).hexdigest()[:12]
    return made_once(f"tiny-qwen3-{digest}", lambda folder: _make(folder, seed), cache=cache)


def tiny_experts(family: str, cache: Path | None = None) -> Path:
    """The folder of a mixture of experts, `qwen3_moe`, `mixtral`, `gpt_oss`, `olmoe` or `glm4_moe`, of less than a million parameters."""
    digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    return made_once(f"tiny-{family}-{digest}", lambda folder: _make_experts(folder, family), cache=cache)


def tiny_tied(family: str, cache: Path | None = None) -> Path:
    """The folder of a model with a tied head that is neither a Qwen nor a Llama, `gemma2` or `bloom`, of less than a million parameters."""
    digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    return made_once(f"tiny-{family}-{digest}", lambda folder: _make_tied(folder, family), cache=cache)


def made_once(name: str, make: Callable[[Path], None], *, cache: Path | None = None) -> Path:
    """The folder of this name in the cache, filled by `make` where it is not there yet."""
    cache = cache or Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "swarmq" / "tests"
    folder = cache / name
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=cache, prefix="making-"))
        try:
            make(scratch)
            scratch.rename(folder)  # two makers at once: the second finds the first's, and both are the same
        except OSError:
            if not folder.is_dir():
                raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _make(folder: Path, seed: int) -> None:
    from transformers import Qwen3Config

    config = Qwen3Config(
        **_with_tokenizer(folder),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    _save_random(folder, config, seed)


def _make_experts(folder: Path, family: str) -> None:
    from transformers import Glm4MoeConfig, GptOssConfig, MixtralConfig, OlmoeConfig, Qwen3MoeConfig

    shape = _with_tokenizer(folder) | {
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 2048,
    }
    configs = {
        "qwen3_moe": lambda: Qwen3MoeConfig(
            **shape, head_dim=32, intermediate_size=256, moe_intermediate_size=96, num_experts=4, norm_topk_prob=True
        ),
        "mixtral": lambda: MixtralConfig(**shape, intermediate_size=80, num_local_experts=4),
        "gpt_oss": lambda: GptOssConfig(
            **shape | {"max_position_embeddings": 4096}, head_dim=32, intermediate_size=96, num_local_experts=4
        ),
        "olmoe": lambda: OlmoeConfig(**shape, intermediate_size=96, num_experts=4),
        "glm4_moe": lambda: Glm4MoeConfig(
            **shape,
            head_dim=32,
            intermediate_size=256,
            moe_intermediate_size=96,
            n_routed_experts=4,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
        ),
    }
    _save_random(folder, configs[family]())


def _make_tied(folder: Path, family: str) -> None:
    from transformers import BloomConfig, Gemma2Config

    shape = _with_tokenizer(folder) | {"hidden_size": 128}
    configs = {
        "gemma2": lambda: Gemma2Config(
            **shape,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=2048,
        ),
        "bloom": lambda: BloomConfig(**shape, n_layer=2, n_head=4),
    }
    _save_random(folder, configs[family]())


def _with_tokenizer(folder: Path) -> dict[str, Any]:
    """What every model's config says of the tokenizer, which is saved, and of its weights."""
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    return {
        "vocab_size": len(tokenizer),
        "initializer_range": 0.05,
        "bos_token_id": None,
        "eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>"),
        "pad_token_id": tokenizer.convert_tokens_to_ids("<|endoftext|>"),
    }


def _save_random(folder: Path, config: Any, seed: int = 0) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)


def tiny_tokenizer():
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        [CORPUS], trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    )
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    bpe.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKERS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>", clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
