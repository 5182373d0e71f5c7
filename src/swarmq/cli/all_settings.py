"""All settings of a job as TOML, for `swarmq up --show`. Sections that are off appear as comments, so that the output loads to
the same job."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import msgspec.inspect
import tomli_w

from swarmq.config import Settings, SwarmJob

Path = tuple[str, ...]


def all_settings(job: SwarmJob) -> str:
    """Return every setting of the job as TOML."""
    return "".join(f"{line}\n" for line in _section(job, ())).lstrip("\n")


def _section(settings: Settings, path: Path, *, one_of_many: bool = False) -> Iterator[str]:
    """Yield the lines of a section, values first: in TOML, a value below the heading of a subsection would belong to the
    subsection."""
    if path:
        heading = f"[{'.'.join(path)}]"
        yield from ("", f"[{heading}]" if one_of_many else heading)
    below: list[str] = []
    for field in _fields(type(settings)):
        value, name, there = getattr(settings, field.name), field.encode_name, (*path, field.encode_name)
        if isinstance(value, Settings):
            below += _section(value, there)
        elif not value and (inside := _settings_in(field.type)):
            below += _comment_section(inside, _example(field.type, there), "off")
        elif value is None:
            yield f"# {name} = ...  # not set"
        elif _settings_in(field.type):
            for key, one in value.items() if isinstance(value, dict) else ():
                below += _section(one, (*there, key))
            for one in value if isinstance(value, tuple) else ():
                below += _section(one, there, one_of_many=True)
        elif isinstance(value, dict):
            below += ["", *_toml(there, value)]
        else:
            yield from _toml((name,), msgspec.to_builtins(value))
    yield from below


def _comment_section(kind: type, heading: str, why: str) -> Iterator[str]:
    """Yield the lines of an absent section as comments, with its defaults."""
    yield from ("", f"# {heading}  # {why}")
    below: list[str] = []
    for field in _fields(kind):
        if inside := _settings_in(field.type):
            below += _comment_section(
                inside, _example(field.type, (*heading.strip("[]").split("."), field.encode_name)), "needed"
            )
        elif field.required:
            yield f"# {field.encode_name} = ...  # required"
        elif field.default is None:
            yield f"# {field.encode_name} = ...  # not set"
        else:
            yield from (f"# {line}" for line in _toml((field.encode_name,), msgspec.to_builtins(field.default)))
    yield from below


def _example(kind: msgspec.inspect.Type, path: Path) -> str:
    """Return an example heading for a section of this type."""
    match _without_none(kind):
        case msgspec.inspect.DictType():
            return f"[{'.'.join(path)}.NAME]"
        case msgspec.inspect.VarTupleType():
            return f"[[{'.'.join(path)}]]"
    return f"[{'.'.join(path)}]"


def _fields(kind: type) -> tuple[msgspec.inspect.Field, ...]:
    found = msgspec.inspect.type_info(kind)
    assert isinstance(found, msgspec.inspect.StructType)
    return found.fields


def _settings_in(kind: msgspec.inspect.Type) -> type | None:
    """Return the settings class that a value of this type is or contains, or None."""
    match _without_none(kind):
        case msgspec.inspect.StructType(cls=found):
            return found
        case msgspec.inspect.DictType(value_type=inner) | msgspec.inspect.VarTupleType(item_type=inner):
            return _settings_in(inner)
    return None


def _without_none(kind: msgspec.inspect.Type) -> msgspec.inspect.Type:
    if isinstance(kind, msgspec.inspect.UnionType):  # the unions in the settings have one type and None
        return next(one for one in kind.types if not isinstance(one, msgspec.inspect.NoneType))
    return kind


def _toml(path: Path, value: Any) -> list[str]:
    tree: Any = value
    for name in reversed(path):
        tree = {name: tree}
    return tomli_w.dumps(tree).splitlines()
