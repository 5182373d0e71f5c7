"""Methods by name. A built-in method is a function with the name of its file. An own method is one that a user wrote, `module:function`:
it is loaded from source text, which every batch record keeps, so that a replay computes with the code that trained. Without torch.

  job file ──read_own──> MethodCode ──adopt──> function          Hello, batch record ──adopt──> function
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import linecache
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from swarmq.config import Train, is_own_method
from swarmq.errors import SetUpError
from swarmq.learner.store.records import MethodCode

PACKAGES = {
    "loss": "losses",
    "advantage": "advantages",
    "grouping": "groupings",
    "schedule": "schedules",
    "optimizer": "optimizers",
    "filter": "filters",
    "reward": "rewards",
}
"""Kind of method -> package of its built-in ones."""
SETTINGS = {
    "loss": "loss.name",
    "advantage": "advantage",
    "grouping": "grouping",
    "schedule": "schedule",
    "optimizer": "optimizer",
    "filter": "token_filter",
    "reward": "reward_transform",
}
"""Kind of method -> setting that names it, within `policies.X.train`."""


class NamedMethod(NamedTuple):
    """A method that settings name."""

    setting: str
    """Path of the setting within `policies.X.train`."""
    kind: str
    """A key of `PACKAGES`."""
    name: str


class AdoptedMethod(NamedTuple):
    code: MethodCode
    function: Callable[..., Any]


_adopted: dict[str, AdoptedMethod] = {}
"""Name -> own method that this process has loaded."""


def find_method(kind: str, name: str) -> Any:
    """Return the function of a method. Raises SetUpError for an own method that was not adopted."""
    if not is_own_method(name):
        return _find_built_in(kind, name)
    if name not in _adopted:
        raise SetUpError(f"{name}: the code of this own method was not loaded")
    return _adopted[name].function


@functools.cache
def _find_built_in(kind: str, name: str) -> Any:
    return getattr(importlib.import_module(f"{__package__}.{PACKAGES[kind]}.{name}"), name)


def look_in(folder: str | None) -> None:
    """Let this process find modules in the folder, also those that an own method's module imports."""
    if folder is not None and folder not in sys.path:
        sys.path.insert(0, folder)


def list_methods(train: Train) -> Iterator[NamedMethod]:
    """Yield the methods that the settings name."""
    yield NamedMethod(SETTINGS["loss"], "loss", train.loss.name)
    yield NamedMethod(SETTINGS["advantage"], "advantage", train.advantage)
    for kind, name in train.advantages.items():
        yield NamedMethod(f"advantages.{kind}", "advantage", name)
    yield NamedMethod(SETTINGS["grouping"], "grouping", train.grouping)
    yield NamedMethod(SETTINGS["schedule"], "schedule", train.schedule)
    yield NamedMethod(SETTINGS["optimizer"], "optimizer", train.optimizer)
    if train.token_filter:
        yield NamedMethod(SETTINGS["filter"], "filter", train.token_filter)
    if train.reward_transform:
        yield NamedMethod(SETTINGS["reward"], "reward", train.reward_transform)


def read_own(train: Train, folder: str | None) -> tuple[MethodCode, ...]:
    """Read and adopt the own methods that the settings name. `folder`: where their modules are looked for first.

    Raises SetUpError, which begins with the setting's path, if one of them cannot be loaded.
    """
    codes = []
    for setting, kind, name in list_methods(train):
        if not is_own_method(name):
            continue
        try:
            codes.append(code := read_code(kind, name, folder))
            adopt([code])
        except SetUpError as error:
            raise SetUpError(f"train.{setting}: {error}") from error
    return tuple(codes)


def describe_methods(train: Train) -> tuple[MethodCode, ...]:
    """Return the code of all methods that the settings name. Own methods must have been adopted."""
    return tuple(
        _adopted[name].code if is_own_method(name) else read_code(kind, name)
        for kind, name in dict.fromkeys((kind, name) for _, kind, name in list_methods(train))
    )


def read_code(kind: str, name: str, folder: str | None = None) -> MethodCode:
    """Return the code that a method has at present. Only own methods come with their source. Raises SetUpError if there is no such
    module."""
    if not is_own_method(name):
        return MethodCode(kind=kind, name=name, sha256=_hash_built_in(kind, name))
    source = _find_file(name.partition(":")[0], folder).read_text(encoding="utf-8")
    return MethodCode(kind=kind, name=name, sha256=_hash(source), source=source)


def adopt(codes: Iterable[MethodCode]) -> None:
    """Load the own methods among `codes` from their source, for this process. Raises SetUpError if that fails."""
    for code in codes:
        known = _adopted.get(code.name)
        if code.source and (known is None or known.code.sha256 != code.sha256):
            _adopted[code.name] = AdoptedMethod(code, _load(code))


def explain_changes(codes: Iterable[MethodCode], folder: str | None = None) -> Iterator[str]:
    """Yield a sentence for each method whose present code is not the recorded one."""
    for code in codes:
        try:
            if read_code(code.kind, code.name, folder).sha256 == code.sha256:
                continue
            what = "has changed since it trained"
        except SetUpError:
            what = "is no longer there"
        used = "the recorded code is used" if code.source else "its present code is used, so the weights may differ"
        yield f"the {code.kind} {code.name} {what}: {used}"


@functools.cache
def _hash_built_in(kind: str, name: str) -> str:
    path = Path(__file__).parent / PACKAGES[kind] / f"{name}.py"  # imports no torch, unlike the package
    if not path.is_file():
        raise SetUpError(f"this version of swarmq has no {kind} {name!r}")
    return _hash(path.read_text(encoding="utf-8"))


def _hash(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()


def _find_file(module: str, folder: str | None) -> Path:
    """Return the source file of a module, which is not imported; only the packages that contain it are."""
    look_in(folder)
    importlib.invalidate_caches()
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        spec = None
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        where = f"in {folder} or among" if folder else "among"
        raise SetUpError(f"there is no Python module {module!r} {where} the installed packages")
    return Path(spec.origin)


def _load(code: MethodCode) -> Callable[..., Any]:
    """Execute the source as a module of its own, so that several versions of one module can be loaded."""
    name, _, function = code.name.partition(":")
    module = ModuleType(f"swarmq_method_{code.sha256[:12]}_{name.rpartition('.')[2]}")
    module.__package__ = name.rpartition(".")[0]
    module.__file__ = place = f"<{code.name}, sha256 {code.sha256[:12]}>"
    linecache.cache[place] = (len(code.source), None, code.source.splitlines(keepends=True), place)
    sys.modules[module.__name__] = module
    try:
        exec(compile(code.source, place, "exec"), module.__dict__)  # noqa: S102 - an own method is code that the user chose to run
    except Exception as error:
        raise SetUpError(f"{code.name}: its module cannot be loaded: {type(error).__name__}: {error}") from error
    found: Callable[..., Any] | None = getattr(module, function, None)
    if not callable(found):
        raise SetUpError(f"{code.name}: {name} has no function {function!r}")
    return found
