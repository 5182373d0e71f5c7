"""How many files a process may open: shells give 1,024, which is not enough connections for a swarm of agents."""

from __future__ import annotations

import contextlib
import resource

MOST_FILES = 65_536
"""RabbitMQ's Erlang sets memory aside for each that it may open, and some hosts allow a thousand million."""


def raise_file_limit() -> int:
    """Let this process, and what it starts from now on, open as many files as the host allows; how many that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):  # some systems promise more than they give
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            return most
    return MOST_FILES if soft == resource.RLIM_INFINITY else soft
