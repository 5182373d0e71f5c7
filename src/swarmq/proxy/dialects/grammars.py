"""JSON schemas that no grammar can be made of, found before an engine fails on them. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from swarmq.proxy.refusals import RefusedError

Json = dict[str, Any]

ALTERNATIVES = ("anyOf", "oneOf", "allOf")


def check_schemas(chat: Json) -> None:
    """Raise RefusedError for a schema that stands for itself, so that it never comes to an end."""
    for where, schema in _schemas(chat):
        for node in _nodes(schema):
            if _endless(node, schema, ()):
                raise RefusedError(f"{where}: the JSON schema refers to itself without end", param=where)


def _schemas(chat: Json) -> Iterator[tuple[str, Json]]:
    tools = chat.get("tools")
    places = [
        ("response_format", _field(_field(chat, "response_format"), "json_schema").get("schema")),
        ("structured_outputs", _field(chat, "structured_outputs").get("json")),
        *(
            ("tools", _field(tool, "function").get("parameters"))
            for tool in (tools if isinstance(tools, list) else ())
            if isinstance(tool, dict)
        ),
    ]
    return ((where, schema) for where, schema in places if isinstance(schema, dict))


def _nodes(schema: Any) -> Iterator[Json]:
    if isinstance(schema, dict):
        yield schema
    for inner in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from _nodes(inner)


def _endless(node: Any, root: Json, on_the_way: tuple[int, ...]) -> bool:
    """Whether the way through references and alternatives alone, which write nothing, comes back to where it was."""
    if not isinstance(node, dict):
        return False
    if id(node) in on_the_way:
        return True
    steps = [_resolved(node["$ref"], root)] if isinstance(node.get("$ref"), str) else []
    for name in ALTERNATIVES:
        inner = node.get(name)
        steps += inner if isinstance(inner, list) else []
    return any(_endless(step, root, (*on_the_way, id(node))) for step in steps)


def _resolved(reference: str, root: Json) -> Any:
    """Where a reference within the document leads; None for others."""
    node: Any = root
    if not reference.startswith("#"):
        return None
    for part in filter(None, reference[1:].split("/")):
        name = part.replace("~1", "/").replace("~0", "~")
        node = node.get(name) if isinstance(node, dict) else None
    return node


def _field(value: Json, name: str) -> Json:
    inner = value.get(name)
    return inner if isinstance(inner, dict) else {}
