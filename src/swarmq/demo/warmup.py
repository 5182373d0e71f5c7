"""Supervised warm-up of the demo's model, which teaches the format and leaves the strategy to reinforcement learning.

Every demonstration ends in the true answer. Before it, at each operation, the demonstration either calls the tool or answers at
once, which a model of this size cannot do correctly. After warm-up the model guesses early more often than not; that it pays to
call the tool until the end is left to reinforcement learning.

The recipe is fixed: it never uses training or held-out problems, and stops after its last step.
"""

from __future__ import annotations

import functools
import math
import os
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from swarmq.demo import agent, tokenizer
from swarmq.demo import problems as arithmetic
from swarmq.demo.model import build_model, save
from swarmq.demo.model_recipe import Recipe, WarmupProgress, is_complete, model_folder
from swarmq.demo.problems import KINDS, problems, solution

IGNORED = -100
TOKENIZER_DIALOGUES = 2000


class WarmupMicroBatch(NamedTuple):
    """Part of a batch: one demonstration [T], or several, padded [B, T]."""

    ids: torch.Tensor
    labels: torch.Tensor
    """Target token ids, IGNORED where no loss is taken."""


class Demonstration(msgspec.Struct, frozen=True, kw_only=True):
    """A rendered dialogue as alternating stretches of given and assistant text."""

    stretches: tuple[str, ...]
    """Stretches of text: those at even places are given, those at odd places are the assistant's, up to its end of turn."""


def load_or_warm_up(cache: Path, recipe: Recipe, *, report: Callable[[WarmupProgress], None]) -> Path:
    """Return the folder of the model for this recipe, made on the first call and found in `cache` afterwards."""
    folder = model_folder(cache, recipe)
    if not is_complete(folder):
        words, model = warm_up(recipe, report=report)
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as making:
            save(model, words, Path(making) / folder.name)
            if not is_complete(folder):  # another demo may have made it meanwhile
                (Path(making) / folder.name).rename(folder)
    return folder


def warm_up(
    recipe: Recipe, *, report: Callable[[WarmupProgress], None]
) -> tuple[PreTrainedTokenizerFast, Qwen3ForCausalLM]:
    """Return tokenizer and model after all steps; on one machine, the same for the same recipe.

    Operations use one thread each, because they are too small for two; the cores share the parts of a batch.
    """
    torch.set_num_threads(1)
    stream = demonstrations(recipe)
    first = [next(stream) for _ in range(TOKENIZER_DIALOGUES)]
    words = tokenizer.build_tokenizer("".join(d.stretches) for d in first)
    model = build_model(words, recipe.architecture, seed=recipe.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=0.01, betas=(0.9, 0.98))
    steps = recipe.steps + recipe.settling_steps
    model.train()
    with ThreadPoolExecutor(os.cpu_count()) as cores:
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = recipe.learning_rate * _pace(step, steps, recipe.rise)
            batch = [next(stream) for _ in range(recipe.batch)]
            loss = _set_gradient(model, _pad_batch(words, batch, recipe.similar), cores)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            report(WarmupProgress(step=step + 1, steps=steps, loss=loss))
    model.eval()
    return words, model


def demonstrations(recipe: Recipe) -> Iterator[Demonstration]:
    """Yield an endless stream of demonstrations for a recipe: first those for the tokenizer, then a batch per step."""
    dice = random.Random(recipe.seed)
    start = dice.randrange(arithmetic.SPLIT_SIZE // 2)
    sources = {kind: problems(kind, "warmup", arithmetic.SPLIT_SIZE // 2, start=start) for kind in KINDS}
    copying = TOKENIZER_DIALOGUES + recipe.steps * recipe.batch
    count = 0
    while True:
        problem = next(sources[dice.choice(KINDS)])
        share = recipe.copying_share if count < copying else recipe.tool_share
        calls = 0
        while dice.random() < share:
            calls += 1
        yield demonstrate(problem.question, *solution(problem), calls=calls)
        count += 1


def demonstrate(question: str, expression: str, answer: str, *, calls: int) -> Demonstration:
    """Return one dialogue with at most `calls` tool calls, in the text of the chat template (a test compares the two)."""
    stretches = [
        "<|im_start|>system\n" + agent.SYSTEM + "\nTools: simplify(expression)<|im_end|>\n"
        "<|im_start|>user\n" + question + "<|im_end|>\n<|im_start|>assistant\n"
    ]
    for given, result in reductions(expression)[:calls]:
        arguments = '{"name": "simplify", "arguments": {"expression": "' + given + '"}}'
        stretches += [
            f"<tool_call>\n{arguments}\n</tool_call><|im_end|>",
            f"\n<|im_start|>tool\n{result}<|im_end|>\n<|im_start|>assistant\n",
        ]
    return Demonstration(stretches=(*stretches, f"<answer>{answer}</answer><|im_end|>"))


def reductions(expression: str) -> list[tuple[str, str]]:
    """Return each call of the tool with its result: `1 + 2 - 4` gives `3 - 4`, and that gives `-1`."""
    calls = []
    while " " in expression:
        result = agent.simplify(expression)
        calls.append((expression, result))
        expression = result
    return calls


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


def _pad_batch(words: PreTrainedTokenizerFast, batch: Sequence[Demonstration], similar: int) -> list[WarmupMicroBatch]:
    """Return the batch sorted by length in padded parts of `similar` demonstrations; only assistant tokens have labels."""
    rows = []
    for demonstration in batch:
        pieces = words(list(demonstration.stretches), add_special_tokens=False).input_ids
        ids = torch.tensor([i for piece in pieces for i in piece])
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
