"""What a vLLM that ended while it started said of why."""

from __future__ import annotations

import re
from pathlib import Path

LINE_PREFIX = r"(?:\([^)]*\) )?(?:ERROR [^\]]*\] )?"
"""What vLLM writes before a line: which of its processes, and where."""
ERROR = re.compile(rf"{LINE_PREFIX}([A-Za-z_][\w.]*(?:Error|Exception)\b.*)")
DETAIL = re.compile(rf"{LINE_PREFIX}  +(\S.*)")
SECONDARY_ERROR = "root cause"
"""Stands in the errors of processes that only pass on that another one has failed."""
MAX_CHARS = 500
"""Characters; some errors name every architecture there is."""


def find_root_cause(log_path: Path, begin_at: int) -> str:
    """The last error in the log from byte `begin_at` on, with the line that says more; empty where there is none."""
    try:
        with log_path.open("rb") as log:
            log.seek(begin_at)
            lines = log.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    for at in reversed(range(len(lines))):
        if (error := ERROR.fullmatch(lines[at])) and SECONDARY_ERROR not in error[1]:
            detail = DETAIL.fullmatch(lines[at + 1]) if at + 1 < len(lines) else None
            return " ".join([error[1].strip(), *([detail[1]] if detail else [])])[:MAX_CHARS]
    return ""
