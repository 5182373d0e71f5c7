"""Loading of `module:function`, as written on a command line, with errors that say what is wrong with it."""

from __future__ import annotations

import importlib
import os
import sys
from difflib import get_close_matches
from typing import Any

from swarmq.errors import TaskError


def load_object(target: str) -> Any:
    """Load the object that `module:name` names, also from the working directory. Raises TaskError if there is none."""
    module_name, colon, path = target.partition(":")
    if not (module_name and colon and path):
        raise TaskError(f"{target!r} is not of the form module:function, e.g. my_agent:attempt")
    if module_name.endswith(".py"):
        file = os.path.relpath(module_name)
        folder, name = os.path.split(file) if file.startswith(os.pardir) else ("", file)
        where = f" in {os.path.abspath(folder)}" if folder else ""  # noqa: PTH100 - of a folder that need not exist
        raise TaskError(
            f"{target!r} names a file, not a module: write {name.removesuffix('.py').replace(os.sep, '.')}:{path}{where}"
        )
    here = os.getcwd()  # noqa: PTH109 - sys.path holds text
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if module_name == missing or module_name.startswith(missing + "."):
            raise TaskError(f"{target!r}: there is no module {missing!r} in {here} or on PYTHONPATH") from error
        raise TaskError(f"{target!r}: {module_name} needs {missing!r}, which is not installed") from error
    except Exception as error:  # a module may raise anything when it is imported
        raise TaskError(f"{target!r}: importing {module_name} failed: {type(error).__name__}: {error}") from error
    for name in path.split("."):
        if not hasattr(found, name):
            near = get_close_matches(name, dir(found), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TaskError(f"{target!r}: {module_name} has no {path!r}{hint}")
        found = getattr(found, name)
    return found
