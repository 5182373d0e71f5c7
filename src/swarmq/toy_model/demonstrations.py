"""Demonstrations of a task as chats: loads a module of demonstrations, and splits rendered chats. Loads no torch.

`command` describes such a module.
"""

from __future__ import annotations

import importlib
import itertools
import random
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from swarmq.errors import ConfigError
from swarmq.toy_model.recipe import Recipe, digest_sources

Message = dict[str, Any]
Chat = list[Message] | dict[str, Any]
"""One conversation as OpenAI messages, or `{"messages": ..., "tools": ...}` if its tools differ from `TOOLS`."""

ASSISTANT = "<|im_start|>assistant\n"
END = "<|im_end|>"
ASSISTANT_TEXT = re.compile(f"(?<={re.escape(ASSISTANT)}).*?{re.escape(END)}", re.DOTALL)


class Lessons(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that determines a toy model: recipe and demonstrations."""

    module: str
    recipe: Recipe
    tools: tuple[Mapping[str, Any], ...]
    digest: str
    """Digest of the recipe and of every source file of the demonstrations."""

    def chats(self) -> Iterator[Chat]:
        """Yield an endless stream: chats of the first steps, then those of the final mix."""
        module = importlib.import_module(self.module)
        dice = random.Random(self.recipe.seed)
        first = getattr(module, "copying", module.demonstrations)(dice)
        yield from itertools.islice(first, self.recipe.first_chats)
        yield from module.demonstrations(dice)

    def folder(self, cache: Path) -> Path:
        """Return the folder in `cache` for the model of these lessons."""
        return cache / f"{'-'.join(self.module.split('.')[-2:])}-{self.digest}"


def load_lessons(name: str, *, overrides: Mapping[str, Any] | None = None) -> Lessons:
    """Load the lessons from a module of demonstrations, which may be in the working directory.

    `overrides`: fields of the recipe that replace those of the module. Raises ConfigError if the module cannot be imported, has no
    `demonstrations`, or has a recipe with an invalid field.
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{name}: there is no module {error.name!r} in {here} or on PYTHONPATH") from error
    if not callable(getattr(module, "demonstrations", None)):
        raise ConfigError(f"{name}: has no function demonstrations(dice) that yields chats")
    try:
        recipe = msgspec.convert({**getattr(module, "RECIPE", {}), **(overrides or {})}, Recipe)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name}.RECIPE: {error}") from error
    digest = digest_sources(recipe, _sources(module))
    return Lessons(module=name, recipe=recipe, tools=tuple(getattr(module, "TOOLS", ())), digest=digest)


def split_stretches(text: str, chat: Sequence[Mapping[str, Any]]) -> list[str]:
    """Split a rendered chat into stretches, alternating between other text (prompts, tool results, markers) and assistant
    text; an assistant stretch ends with the end-of-turn token.

    Text after the last assistant message is left out. Raises ValueError if the chat has no assistant message, or if the
    content of a message contains the template's markers.
    """
    stretches, at = [], 0
    for found in ASSISTANT_TEXT.finditer(text):
        stretches += [text[at : found.start()], found.group()]
        at = found.end()
    answers = sum(message["role"] == "assistant" for message in chat)
    if not answers or len(stretches) != 2 * answers:
        raise ValueError(
            f"a demonstration has {answers} assistant messages but renders to {len(stretches) // 2}: {text!r}"
        )
    return stretches


def _sources(module: ModuleType) -> list[Path]:
    """Return the source files of the demonstrations: the module's own, other imported modules in its folder, and modules of the
    same top package that these use, such as those of other tutorials."""
    assert module.__file__ is not None
    folder = Path(module.__file__).parent
    top = module.__name__.partition(".")[0]
    todo = [module, *(one for one in list(sys.modules.values()) if (path := _path(one)) and path.parent == folder)]
    found: dict[Path, ModuleType] = {}
    while todo:
        one = todo.pop()
        path = _path(one)
        if path is None or path in found:
            continue
        found[path] = one
        names = {
            getattr(value, "__name__" if isinstance(value, ModuleType) else "__module__", None)
            for value in vars(one).values()
        }
        todo += [
            sys.modules[name]
            for name in names
            if isinstance(name, str) and name.partition(".")[0] == top and name in sys.modules
        ]
    return sorted(found)


def _path(module: ModuleType) -> Path | None:
    name = getattr(module, "__file__", None)
    return Path(name) if name else None
