"""Make a toy model from demonstrations of a task, and link to it.

    python -m swarmq.toy_model MODULE FOLDER

The model is made once for each recipe and source, in the user's cache; FOLDER becomes a link to it, for `model = "FOLDER"` in a job
file. MODULE has `demonstrations(dice)`, an endless iterator of chats (OpenAI messages, with `tool_calls` where tools are used;
`dice` is a random.Random), and may have:

  copying(dice)   an iterator of chats that replace `demonstrations` in the first steps, to train what takes longest to learn
  TOOLS           the tools that the agent offers in its requests
  RECIPE          fields of `Recipe` (swarmq.toy_model.recipe) that differ from the defaults, e.g. {"steps": 60} for a quick try
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from swarmq.errors import ConfigError, SwarmqError
from swarmq.toy_model.demonstrations import Lessons, load_lessons
from swarmq.toy_model.recipe import WarmupProgress, is_complete, user_cache_folder

PROGRESS_LINES = 10
"""Number of progress lines to print during a warm-up."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m swarmq.toy_model", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("module")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cache", type=Path, default=user_cache_folder())
    options = parser.parse_args()
    try:
        made = ensure_toy_model(load_lessons(options.module), options.cache)
        link(made, options.folder)
    except SwarmqError as error:
        sys.exit(f"error: {error}")
    print(f"{options.folder} -> {made}")  # noqa: T201 - a command


def ensure_toy_model(lessons: Lessons, cache: Path) -> Path:
    """Return the folder of the model, which is made unless it is in `cache`; progress is printed to stdout."""
    folder = lessons.folder(cache)
    if is_complete(folder):
        return folder
    from swarmq.toy_model.warmup import make_toy_model  # noqa: PLC0415 - torch only where a model is made

    tenth = -1

    def show(now: WarmupProgress) -> None:
        nonlocal tenth
        if tenth != (tenth := PROGRESS_LINES * now.step // max(now.steps, 1)):
            print(f"warm-up step {now.step} of {now.steps}, loss {now.loss:.3f}", flush=True)  # noqa: T201

    return make_toy_model(folder, lessons.chats(), lessons.recipe, tools=lessons.tools, report=show)


def link(made: Path, place: Path) -> None:
    """Make `place` a link to a model. Raises ConfigError if something else is there."""
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.is_symlink():
        place.unlink()
    try:
        place.symlink_to(made.absolute())
    except FileExistsError as error:
        raise ConfigError(f"{place}: exists and is not a link; move it away or choose another folder") from error
