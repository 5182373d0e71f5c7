"""Names of a client and of its code version, which are recorded with every episode."""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import secrets
import socket
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from swarmq.broker.client_rules import NAME_SEPARATOR


def make_client_id(name: str) -> str:
    """Return a name unique per client object: the invite's name, the host, the process and a random suffix."""
    return f"{name}{NAME_SEPARATOR}{socket.gethostname().split('.')[0]}-{os.getpid()}-{secrets.token_hex(2)}"


def hash_source_file(function: Callable[..., Any]) -> str:
    """Return a short hash of the source file that holds `function`, or "" if there is no source."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    if not inspect.isroutine(function):
        function = type(function)
    try:
        path = inspect.getsourcefile(function)
        source = Path(path).read_bytes() if path else b""
    except (OSError, TypeError):
        source = b""
    try:
        return _shorten_hash(source or inspect.getsource(function).encode())
    except (OSError, TypeError):
        return ""


@cache
def hash_main_script() -> str:
    """Return a short hash of the running script as it was when this function was first called, or "" in a notebook or an
    interactive session."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        return _shorten_hash(Path(path).read_bytes()) if path else ""
    except OSError:
        return ""


def _shorten_hash(source: bytes) -> str:
    return hashlib.sha256(source).hexdigest()[:12]
