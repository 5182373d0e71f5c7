"""Demonstrations of the demo, which teach its model the format and leave the strategy to reinforcement learning.

Every demonstration ends in the true answer. Before it, at each operation, the demonstration either calls the tool or answers at
once, which a model of this size cannot do correctly. After warm-up the model guesses early more often than not; that it pays to
call the tool until the end is left to reinforcement learning.

The recipe is fixed: it never uses training or held-out problems, and stops after its last step.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from swarmq.demo import agent
from swarmq.demo import problems as arithmetic
from swarmq.demo.model_recipe import DemoRecipe, model_folder
from swarmq.demo.problems import KINDS, problems, solution
from swarmq.toy_model.demonstrations import Message
from swarmq.toy_model.recipe import WarmupProgress
from swarmq.toy_model.warmup import make_toy_model
from swarmq.toy_model.warmup import warm_up as warm_up_on

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM


def load_or_warm_up(cache: Path, recipe: DemoRecipe, *, report: Callable[[WarmupProgress], None]) -> Path:
    """Return the folder of the model for this recipe, made on the first call and found in `cache` afterwards."""
    folder = model_folder(cache, recipe)
    return make_toy_model(folder, demonstrations(recipe), recipe, tools=agent.TOOLS, report=report)


def warm_up(
    recipe: DemoRecipe, *, report: Callable[[WarmupProgress], None]
) -> tuple[PreTrainedTokenizerFast, Qwen3ForCausalLM]:
    """Return tokenizer and model after all steps; on one machine, the same for the same recipe."""
    return warm_up_on(demonstrations(recipe), recipe, tools=agent.TOOLS, report=report)


def demonstrations(recipe: DemoRecipe) -> Iterator[list[Message]]:
    """Yield an endless stream of demonstrations for a recipe: first those for the tokenizer, then a batch per step."""
    dice = random.Random(recipe.seed)
    start = dice.randrange(arithmetic.SPLIT_SIZE // 2)
    sources = {kind: problems(kind, "warmup", arithmetic.SPLIT_SIZE // 2, start=start) for kind in KINDS}
    count = 0
    while True:
        problem = next(sources[dice.choice(KINDS)])
        share = recipe.copying_share if count < recipe.first_chats else recipe.tool_share
        calls = 0
        while dice.random() < share:
            calls += 1
        yield demonstrate(problem.question, *solution(problem), calls=calls)
        count += 1


def demonstrate(question: str, expression: str, answer: str, *, calls: int) -> list[Message]:
    """Return one chat with at most `calls` tool calls."""
    messages = agent.opening(question)
    for given, result in reductions(expression)[:calls]:
        function = {"name": "simplify", "arguments": json.dumps({"expression": given})}
        messages.append({"role": "assistant", "tool_calls": [{"type": "function", "function": function}]})
        messages.append({"role": "tool", "content": result})
    return [*messages, {"role": "assistant", "content": f"<answer>{answer}</answer>"}]


def reductions(expression: str) -> list[tuple[str, str]]:
    """Return each call of the tool with its result: `1 + 2 - 4` gives `3 - 4`, and that gives `-1`."""
    calls = []
    while " " in expression:
        result = agent.simplify(expression)
        calls.append((expression, result))
        expression = result
    return calls
