"""`swarmq.open_run`: a run folder in Python. Imports nothing heavy until a run is opened."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from swarmq.errors import MissingExtraError

if TYPE_CHECKING:
    from swarmq.observe.run import Run

NEEDED = ("numpy", "tokenizers", "zstandard")
"""Packages of the extra `inspect`."""


def open_run(path: str | Path, *, installed: Callable[[str], object] = importlib.util.find_spec) -> Run:
    """Open the folder of a live, stopped or copied run for reading; nothing in it changes.

    Raises ConfigError if the folder is not that of a run that was up, and MissingExtraError if the extra `inspect` is not
    installed.
    """
    if missing := [name for name in NEEDED if installed(name) is None]:
        raise MissingExtraError(f"not installed: {', '.join(missing)}; pip install 'swarmq[inspect]'")
    from swarmq.observe.run import Run  # noqa: PLC0415 - needs the packages checked above

    return Run(Path(path))
