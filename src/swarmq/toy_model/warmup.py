"""Supervised warm-up of a toy model on demonstrations: only assistant tokens are trained.

Chats are rendered by the tokenizer's own template, so the model learns from the text that vLLM and the proxy will render. A
warmed-up toy model can copy, and choose among the phrases that it has seen; it cannot calculate.
"""

from __future__ import annotations

import functools
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from tokenizers import Tokenizer, models
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from swarmq.toy_model.demonstrations import Chat, split_stretches
from swarmq.toy_model.network import build_model, save
from swarmq.toy_model.recipe import Recipe, WarmupProgress, is_complete
from swarmq.toy_model.tokenizer import add_chat_template, build_tokenizer

IGNORED = -100
Stretches = list[str]
"""A rendered chat, split by `split_stretches`: the stretches at odd indices are assistant text."""


class WarmupMicroBatch(NamedTuple):
    """Part of a batch: one demonstration [T], or several, padded [B, T]."""

    ids: torch.Tensor
    labels: torch.Tensor
    """Target token ids; IGNORED at tokens without a loss."""


def make_toy_model(
    folder: Path,
    chats: Iterable[Chat],
    recipe: Recipe,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    report: Callable[[WarmupProgress], None],
) -> Path:
    """Make a warmed-up model in `folder` unless there is one already, and return `folder`. If interrupted, leave nothing
    behind."""
    if not is_complete(folder):
        words, model = warm_up(chats, recipe, tools=tools, report=report)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as making:
            save(model, words, Path(making) / folder.name)
            if not is_complete(folder):  # another process may have made it meanwhile
                (Path(making) / folder.name).rename(folder)
    return folder


def warm_up(
    chats: Iterable[Chat],
    recipe: Recipe,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    report: Callable[[WarmupProgress], None],
) -> tuple[PreTrainedTokenizerFast, Qwen3ForCausalLM]:
    """Train and return tokenizer and model; on the same machine, the same recipe and chats give the same model.

    `chats`: first the chats for the tokenizer, then a batch per step. Operations are too small for several threads, so each uses
    one thread, and each core computes some parts of a batch.
    """
    torch.set_num_threads(1)
    stream = render_chats(chats, tools)
    words = build_tokenizer(
        ("".join(one) for one in islice(stream, recipe.tokenizer_chats)), vocabulary=recipe.vocabulary
    )
    model = build_model(words, recipe.architecture, seed=recipe.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=0.01, betas=(0.9, 0.98))
    steps = recipe.steps + recipe.settling_steps
    model.train()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as cores:
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = recipe.learning_rate * _pace(step, steps, recipe.rise)
            batch = list(islice(stream, recipe.batch))
            if len(batch) < recipe.batch:
                seen = recipe.tokenizer_chats + step * recipe.batch + len(batch)
                needed = recipe.tokenizer_chats + steps * recipe.batch
                raise ValueError(f"the demonstrations ended after {seen} chats; the recipe needs {needed}")
            loss = _set_gradient(model, _pad_batch(words, batch, recipe), cores)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            report(WarmupProgress(step=step + 1, steps=steps, loss=loss))
    model.eval()
    return words, model


def render_chats(chats: Iterable[Chat], tools: Sequence[Mapping[str, Any]] = ()) -> Iterator[Stretches]:
    """Render chats with the template of every toy model, as vLLM does, and split them into stretches.

    `tools`: tools of chats that do not name their own.
    """
    blank = add_chat_template(Tokenizer(models.BPE()))
    for chat in chats:
        messages, offered = (chat["messages"], chat["tools"]) if isinstance(chat, dict) else (chat, tools)
        given = [_parse_arguments(message) for message in messages]
        text = blank.apply_chat_template(given, tools=list(offered) or None, tokenize=False)
        yield split_stretches(text, messages)


def _parse_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with the arguments of its tool calls parsed to objects, as vLLM passes them to the template."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        given = function["arguments"]
        calls.append(
            {
                **call,
                "function": {**function, "arguments": msgspec.json.decode(given) if isinstance(given, str) else given},
            }
        )
    return {**message, "tool_calls": calls}


def _pace(step: int, steps: int, rise: int) -> float:
    """Return the learning-rate factor: linear rise, then half a cosine down to a tenth."""
    if step < rise:
        return (step + 1) / rise
    return 0.55 + 0.45 * math.cos(math.pi * (step - rise) / max(1, steps - rise))


def _set_gradient(model: Qwen3ForCausalLM, parts: Sequence[WarmupMicroBatch], cores: Executor) -> float:
    """Set the gradient of the mean loss over all labelled tokens and return that mean. The order of summation is fixed."""
    parameters = list(model.parameters())
    count = sum(int((labels != IGNORED).sum()) for _, labels in parts)

    def of_part(part: WarmupMicroBatch) -> tuple[float, Sequence[torch.Tensor]]:
        said = part.labels[:, 1:] != IGNORED
        hidden = model.model(input_ids=part.ids).last_hidden_state[:, :-1]
        logits = model.lm_head(hidden[said])
        loss = functional.cross_entropy(logits, part.labels[:, 1:][said], reduction="sum") / count
        return loss.item(), torch.autograd.grad(loss, parameters)

    losses, gradients = zip(*cores.map(of_part, parts), strict=True)
    for parameter, *shares in zip(parameters, *gradients, strict=True):
        parameter.grad = torch.stack(shares).sum(0)
    return math.fsum(losses)


def _pad_batch(words: PreTrainedTokenizerFast, batch: Sequence[Stretches], recipe: Recipe) -> list[WarmupMicroBatch]:
    """Return the batch sorted by length in padded parts of similar demonstrations; only assistant tokens have labels.

    Raises ValueError for a demonstration that is longer than the model's context.
    """
    similar = recipe.similar
    rows = []
    for stretches in batch:
        pieces = words(stretches, add_special_tokens=False).input_ids
        ids = torch.tensor([i for piece in pieces for i in piece])
        if len(ids) > recipe.architecture.max_tokens:
            limit = recipe.architecture.max_tokens
            raise ValueError(
                f"a demonstration has {len(ids)} tokens, more than architecture.max_tokens ({limit}): {stretches}"
            )
        rows.append(
            WarmupMicroBatch(
                ids, torch.tensor([i if n % 2 else IGNORED for n, piece in enumerate(pieces) for i in piece])
            )
        )
    rows.sort(key=lambda row: len(row.ids))
    pad = functools.partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    return [
        WarmupMicroBatch(
            pad([row.ids for row in alike], padding_value=words.pad_token_id),
            pad([row.labels for row in alike], padding_value=IGNORED),
        )
        for alike in (rows[first : first + similar] for first in range(0, len(rows), similar))
    ]
