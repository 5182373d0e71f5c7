"""The root cause of a failed vLLM start, from its log."""

from __future__ import annotations

import re
from pathlib import Path

LINE_PREFIX = r"(?:\([^)]*\) )?(?:ERROR [^\]]*\] )?"
"""Pattern of the prefix of vLLM's log lines: process and source location."""
ERROR = re.compile(rf"{LINE_PREFIX}([A-Za-z_][\w.]*(?:Error|Exception)\b.*)")
DETAIL = re.compile(rf"{LINE_PREFIX}  +(\S.*)")
SECONDARY_ERROR = "root cause"
"""Text that marks an error as the report of another process's failure, which is not the root cause itself."""
MAX_CHARS = 500
"""Maximum number of characters of a cause, because some errors list every known architecture."""


def find_root_cause(log_path: Path, begin_at: int) -> str:
    """Return the last error in the log from byte `begin_at` on, with its detail line; "" if there is none."""
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
