"""Which files are the user's own, and tracebacks of agents without the frames of swarmq that called them."""

from __future__ import annotations

import os
import sysconfig
import traceback
from pathlib import Path
from types import TracebackType

from swarmq.errors import SwarmqError

PACKAGE_PREFIX = f"{Path(__file__).parents[2]}{os.sep}"
DEMO_PREFIX = f"{PACKAGE_PREFIX}demo{os.sep}"
"""Folder of the demo, whose agents are treated like a user's code."""
INSTALLED_PREFIXES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
INSTALLED_FOLDERS = frozenset({"site-packages", "dist-packages"})
"""Names of the folders of installed packages, of which Python may have more than the above: a user's, and the system's."""


def format_agent_traceback(error: BaseException) -> str:
    """Return the traceback without swarmq's own frames at its beginning."""
    return "".join(traceback.format_exception(type(error), error, skip_swarmq_frames(error)))


def skip_swarmq_frames(error: BaseException) -> TracebackType | None:
    trace = error.__traceback__
    while trace is not None and is_swarmq_file(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    if trace is None and not isinstance(error, SwarmqError):
        return error.__traceback__  # only swarmq's own frames: a defect of swarmq
    return trace


def is_swarmq_file(file: str) -> bool:
    return file.startswith(PACKAGE_PREFIX) and not file.startswith(DEMO_PREFIX)


def is_user_file(file: str) -> bool:
    """Return whether `file` is the user's own: not swarmq's, not Python's, not that of an installed package."""
    return not (
        is_swarmq_file(file)
        or file.startswith((*INSTALLED_PREFIXES, "<frozen "))
        or INSTALLED_FOLDERS.intersection(Path(file).parts)
    )
