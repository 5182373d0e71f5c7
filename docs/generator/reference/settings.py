"""Every setting of a job, with type, range, default and description, from `swarmq.config`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import msgspec
from docs.generator.reference.source import directive, field_docs
from msgspec import inspect as types

from swarmq import live_settings
from swarmq.config import RENAMED, Settings, SwarmJob

LARGEST = (2**63 - 1, sys.float_info.max)
NAMED_BY = {"policies": "POLICY", "kinds": "KIND"}
"""Tables of sections -> what stands for a name in paths."""


def page() -> str:
    return "\n".join(_section(SwarmJob, ()))


def _section(owner: type[Settings], path: tuple[str, ...], text: str = "", *, many: bool = False) -> Iterator[str]:
    """Yield the description of a section: its own settings, then the sections inside it."""
    if path:
        heading = ".".join(path)
        yield f"## `{f'[[{heading}]]' if many else f'[{heading}]'}`\n"
    else:
        yield "## Top level\n"
    yield f"{owner.__doc__}\n"
    if text:
        yield f"{text}\n"
    below: list[tuple[type[Settings], tuple[str, ...], str, bool]] = []
    described = field_docs(owner)
    for one in types.type_info(owner).fields:
        name, there = one.encode_name, (*path, one.encode_name)
        kind = without_none(one.type)
        match kind:
            case types.StructType(cls=inner):
                off = "Off unless it is given." if one.default is None else ""
                below.append((inner, there, off, False))
            case types.DictType(value_type=types.StructType(cls=inner)):
                below.append((inner, (*there, NAMED_BY[name]), described[one.name], False))
            case types.VarTupleType(item_type=types.StructType(cls=inner)):
                below.append((inner, there, "", True))
            case _:
                yield _setting(".".join(there), one, described.get(one.name, ""))
    for inner, there, about, repeated in below:
        yield from _section(inner, there, about, many=repeated)


def _setting(path: str, one: types.Field, description: str) -> str:
    notes = []
    pattern = path.replace(".POLICY.", ".*.").replace(".KIND.", ".*.")
    if live_settings.is_live(pattern):
        notes.append("Can change while the run is up.")
    if former := [old for old, new in RENAMED.items() if new == pattern]:
        notes.append(f"Former name: `{former[0].rpartition('.')[2]}`.")
    content = "\n\n".join([description, " ".join(notes)])
    return directive("confval", path, content, type=describe_type(one.type), default=_default(one))


def _default(one: types.Field) -> str:
    if one.required:
        return "required"
    value = one.default_factory() if one.default_factory is not msgspec.NODEFAULT else one.default
    return f"`{_as_toml(msgspec.to_builtins(value))}`" if value is not None else "not set"


def _as_toml(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case str():
            return f'"{value}"'
        case dict():
            return "{" + ", ".join(f"{key} = {_as_toml(one)}" for key, one in value.items()) + "}"
        case list() | tuple():
            return "[" + ", ".join(map(_as_toml, value)) + "]"
        case float():
            return f"{value:g}" if value < 1e-3 else str(value)
    return str(value)


def without_none(kind: types.Type) -> types.Type:
    if isinstance(kind, types.UnionType):  # the unions in the settings have one type and None
        return next(one for one in kind.types if not isinstance(one, types.NoneType))
    return kind


def describe_type(kind: types.Type) -> str:
    """Return type and range in words."""
    match without_none(kind):
        case types.BoolType():
            return "true or false"
        case types.StrType():
            return "text"
        case types.IntType() as number:
            return f"whole number{_range(number)}"
        case types.FloatType() as number:
            return f"number{_range(number)}"
        case types.LiteralType(values=values):
            return "one of " + ", ".join(f'`"{value}"`' for value in values)
        case types.Metadata(extra={"names": names}):
            return "one of " + ", ".join(f'`"{name}"`' for name in (*names, "module:function"))
        case types.Metadata(extra={"names_a": "file"}):
            return "path"
        case types.Metadata(extra={"names_a": "model"}):
            return "text"
        case types.AnyType():
            return "any value"
        case types.VarTupleType(item_type=inner):
            return f"list of {_plural(describe_type(inner))}"
        case types.TupleType(item_types=inner):
            return f"list of {len(inner)} {_plural(describe_type(inner[0]))}"
        case types.DictType(value_type=inner):
            return f"table of name to {describe_type(inner)}"
    raise TypeError(f"{kind}: no words for this type of a setting; add them to docs/generator/reference/settings.py")


def _plural(words: str) -> str:
    for one, many in (
        ("whole number", "whole numbers"),
        ("number", "numbers"),
        ("text", "texts"),
        ("one of", "values out of"),
    ):
        if words.startswith(one):
            return many + words.removeprefix(one)
    return words


def _range(number: types.IntType | types.FloatType) -> str:
    low = next((f"{sign} {bound:g}" for sign, bound in ((">", number.gt), ("≥", number.ge)) if bound is not None), "")
    high = next(
        (f"{sign} {bound:g}" for sign, bound in (("<", number.lt), ("≤", number.le)) if bound not in (None, *LARGEST)),
        "",
    )
    finite = "finite" if number.le == sys.float_info.max else ""
    return "".join(f", {words}" for words in (low, high, finite) if words)
