"""Public names of the package with their docstrings."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from docs.generator.reference.source import directive, field_docs, prose

import swarmq
from swarmq import errors, rewards
from swarmq.config import Settings
from swarmq.observe import run as observed

WITHOUT_SIGNATURE = (swarmq.AsyncEpisode, swarmq.Episode)
"""Classes that users get and do not make."""


def names() -> str:
    found = [name for name in swarmq.__all__ if name not in {"__version__", "SwarmqError"}]
    return "\n".join(_describe(getattr(swarmq, name), f"swarmq.{name}") for name in sorted(found, key=str.lower))


def reward_names() -> str:
    return "\n".join(
        _describe(getattr(rewards, name), f"swarmq.rewards.{name}") for name in sorted(rewards.__all__, key=str.lower)
    )


def error_classes() -> str:
    found = [one for one in vars(errors).values() if inspect.isclass(one) and issubclass(one, errors.SwarmqError)]
    return "\n".join(_error(one) for one in found)


def run_records() -> str:
    """Return `Run`, which `open_run` gives, and the records that can be reached from it."""
    records: dict[type, None] = {}
    _collect(observed.Run, records)
    return "\n".join(_describe(one, f"{one.__module__}.{one.__name__}") for one in records)


def _collect(owner: type, found: dict[type, None]) -> None:
    """Add a class, and the classes of `swarmq.observe` in the annotations of its public parts."""
    if owner in found:
        return
    found[owner] = None
    annotations = [str(text) for name, text in inspect.get_annotations(owner).items() if not name.startswith("_")]
    for name, part in vars(owner).items():
        function = _function(part)
        if not name.startswith("_") and function:
            annotations.append(str(function.__annotations__.get("return", "")))
    known = vars(sys.modules[owner.__module__])
    for word in re.findall(r"\w+", " ".join(annotations)):
        one = known.get(word)
        if inspect.isclass(one) and one.__module__.startswith("swarmq.observe"):
            _collect(one, found)


def _function(part: Any) -> Callable[..., Any] | None:
    part = getattr(part, "func", None) or getattr(part, "fget", None) or getattr(part, "__func__", None) or part
    return part if inspect.isfunction(part) else None


def _error(one: type[Exception]) -> str:
    base = one.__mro__[1].__name__
    text = prose(one.__doc__)
    return directive(
        "py:exception",
        f"swarmq.errors.{one.__name__}",
        text if base == "Exception" else f"{text}\n\nA {{py:exc}}`{base} <swarmq.errors.{base}>`.",
    )


def _describe(thing: Any, path: str) -> str:
    if not inspect.isclass(thing):
        kind = {"async": ""} if inspect.iscoroutinefunction(thing) else {}
        return directive("py:function", f"{path}{_signature(thing)}", prose(thing.__doc__), **kind)
    is_record = issubclass(thing, msgspec.Struct)
    parts = [prose(thing.__doc__)]
    signature = ""
    if not is_record and thing not in WITHOUT_SIGNATURE:
        signature = _signature(thing.__init__, bound=True)
        parts.append(prose(thing.__init__.__doc__))
    if is_record and not issubclass(thing, Settings):
        parts += _fields(thing)
    parts += _members(thing)
    return directive("py:class", f"{path}{signature}", "\n\n".join(parts))


def _fields(record: type[msgspec.Struct]) -> Iterator[str]:
    described = field_docs(record)
    for field in msgspec.structs.fields(record):
        options = {"type": _shorten(_annotation(record, field.name))}
        if not field.required:
            value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
            options["value"] = repr(value)
        yield directive("py:attribute", field.name, prose(described.get(field.name)), **options)


def _annotation(record: type, field: str) -> str:
    owner = next(one for one in record.__mro__ if field in inspect.get_annotations(one))
    return str(owner.__annotations__[field])


def _members(owner: type) -> Iterator[str]:
    """Yield the public methods and properties, inherited ones of the package too."""
    seen: set[str] = set()
    for kind in owner.__mro__:
        if kind.__module__.partition(".")[0] != "swarmq":
            continue
        for name, part in vars(kind).items():
            if name.startswith("_") or name in seen:
                continue
            seen.add(name)
            function = _function(part)
            if function is None:
                continue
            text = prose(function.__doc__)
            if isinstance(part, property) or not (inspect.isfunction(part) or hasattr(part, "__func__")):
                yield directive(
                    "py:property", name, text, type=_shorten(str(function.__annotations__.get("return", "")))
                )
                continue
            options = {"async": ""} if inspect.iscoroutinefunction(function) else {}
            options |= {
                word: ""
                for word, sort in (("classmethod", classmethod), ("staticmethod", staticmethod))
                if isinstance(part, sort)
            }
            yield directive(
                "py:method", f"{name}{_signature(function, bound=not isinstance(part, staticmethod))}", text, **options
            )


def _signature(function: Callable[..., Any], *, bound: bool = False) -> str:
    """Return the signature as it stands in the source, without `self` and without long defaults."""
    found = inspect.signature(function)
    parameters = list(found.parameters.values())[bound:]
    shown = []
    for one in parameters:
        annotation = (
            one.annotation if one.annotation is inspect.Parameter.empty else _Text(_shorten(str(one.annotation)))
        )
        default = one.default
        if default is not inspect.Parameter.empty and not isinstance(
            default, (str, int, float, bool, tuple, type(None))
        ):
            default = _Text("...")
        shown.append(one.replace(annotation=annotation, default=default))
    result = found.return_annotation
    result = result if result is inspect.Signature.empty else _Text(_shorten(str(result)))
    return str(found.replace(parameters=shown, return_annotation=result)).replace(" -> None", "")


class _Text(str):
    """A text that signatures show without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _shorten(annotation: str) -> str:
    return re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", annotation)


def missing_docstrings() -> list[str]:
    """Return the public functions, classes and methods without a docstring."""
    missing = []
    for module in (swarmq, rewards):
        for name in module.__all__:
            thing = getattr(module, name)
            missing += [] if name == "__version__" else _missing(thing, f"{module.__name__}.{name}")
    return [*missing, *_missing(observed.Run, "Run")]


def _missing(thing: Any, path: str) -> Iterator[str]:
    if not (inspect.getdoc(thing) or "").strip():
        yield path
    if inspect.isclass(thing):
        for kind in thing.__mro__:
            if kind.__module__.partition(".")[0] == "swarmq":
                for name, part in vars(kind).items():
                    function = None if name.startswith("_") else _function(part)
                    if function and not function.__doc__:
                        yield f"{path}.{name}"
