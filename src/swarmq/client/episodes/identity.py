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
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from swarmq.broker.client_rules import NAME_SEPARATOR
from swarmq.client.episodes.tracebacks import is_user_file


def make_client_id(name: str) -> str:
    """Return a name unique per client object: the invite's name, the host, the process and a random suffix."""
    return f"{name}{NAME_SEPARATOR}{socket.gethostname().split('.')[0]}-{os.getpid()}-{secrets.token_hex(2)}"


def hash_source(function: Callable[..., Any]) -> str:
    """Return a short hash of the source file that holds `function` and of all modules of the user's own, which may hold its tools or
    reward; "" if there is no source."""
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
        return _hash_with_modules(source or inspect.getsource(function).encode())
    except (OSError, TypeError):
        return ""


@cache
def hash_main_script() -> str:
    """Return a short hash of the running script, and of all modules of the user's own, as they were when this function was first
    called, or "" in a notebook or an interactive session."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        return _hash_with_modules(Path(path).read_bytes()) if path else ""
    except OSError:
        return ""


@cache
def _hash_with_modules(source: bytes) -> str:
    """Return a short hash of the source and of the user's modules that are loaded when it is first asked for: modules that the agent
    loads while it runs are not new code."""
    found = set(filter(None, map(_find_file, list(sys.modules.values()))))
    digest = hashlib.sha256(source)
    for path in map(Path, sorted(file for file in found if file.endswith(".py") and is_user_file(file))):
        with suppress(OSError):
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:12]


def _find_file(module: Any) -> str | None:
    """Return the file of a module, without the attribute access that would load a lazy module now."""
    try:
        file = object.__getattribute__(module, "__dict__").get("__file__")
    except AttributeError:  # anything may be among the modules
        return None
    return file if isinstance(file, str) else None
