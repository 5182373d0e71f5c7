"""Checks for JSON schemas and grammars that an engine would not survive. Pure.

vLLM's compiler of schemas follows references by recursion in C++: a schema that refers to itself never ends, and one with tens
of thousands of steps crashes the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from urllib.parse import unquote

import msgspec

from swarmq.proxy.http_errors import RefusedError

Json = dict[str, Any]
Node = dict[str, Any] | list[Any]

ALTERNATIVES = ("anyOf", "oneOf", "allOf")
MAX_PARTS = 10_000
"""Maximum number of objects and lists in all schemas of a request, including entries of lists."""
MAX_PROPERTIES = 1000
"""Maximum number of properties of one object: the grammar of optional properties grows with the square of their number."""
MAX_HELD_TOOLS = 128
"""Maximum number of tools that are strict or forced; OpenAI accepts as many tools in all."""
MAX_STEPS = 1000
"""Maximum depth of a schema, references included."""
MAX_PATTERN = 8192
"""Maximum number of characters of a regular expression in a schema, whose brackets recurse as well."""
MAX_GRAMMAR = 65_536
"""Maximum number of characters of a grammar or a regular expression; parsing time grows with the square of its rules."""


def check_schemas(chat: Json) -> None:
    """Raise RefusedError for a schema without end, or too large or too deep to compile."""
    for kind in ("regex", "grammar"):
        if len(str(_field(chat, "structured_outputs").get(kind) or "")) > MAX_GRAMMAR:
            raise _make_refusal("structured_outputs", f"the {kind} has more than {MAX_GRAMMAR} characters")
    choices = _field(chat, "structured_outputs").get("choice")
    if isinstance(choices, list) and len(choices) > MAX_PARTS:
        raise _make_refusal("structured_outputs", f"choice has more than {MAX_PARTS} entries")
    if (held := _num_held_tools(chat)) > MAX_HELD_TOOLS:
        raise _make_refusal(
            "tools",
            f"{held} tools are strict or forced, but at most {MAX_HELD_TOOLS} may be: compiling their grammar delays all calls",
        )
    parts, enforced = 0, _find_enforced(chat)
    for where, schema in _schemas(chat):
        nodes = []
        for node, depth, _ in _descent(schema, partial(_steps, root=schema), set()):
            parts += 1 + (len(node) if isinstance(node, list) else 0)
            nodes.append(node)
            if where in enforced and (elsewhere := _elsewhere(node)):
                raise _make_refusal(
                    where, f"the JSON schema refers to {elsewhere!r:.100}: it can only refer to its own parts (#/...)"
                )
            if len(_field(node, "properties") if isinstance(node, dict) else ()) > MAX_PROPERTIES:
                raise _make_refusal(where, f"an object in the JSON schema has more than {MAX_PROPERTIES} properties")
            if parts > MAX_PARTS or depth > MAX_STEPS:
                raise _make_refusal(
                    where, f"JSON schemas may have at most {MAX_PARTS} parts and be at most {MAX_STEPS} steps deep"
                )
            if any(len(pattern) > MAX_PATTERN for pattern in _patterns(node)):
                raise _make_refusal(where, f"a pattern in the JSON schema has more than {MAX_PATTERN} characters")
        done: set[int] = set()
        for node in nodes:
            for _, _, again in _descent(node, partial(_silent_steps, root=schema), done):
                if again:
                    raise _make_refusal(where, "the JSON schema refers to itself without end")


def _schemas(chat: Json) -> Iterator[tuple[str, Node]]:
    """Yield (place, schema) for every schema. Raises RefusedError for text that is not a schema."""
    wanted, outputs, tools = _field(chat, "response_format"), _field(chat, "structured_outputs"), chat.get("tools")
    places = [
        ("response_format", _field(wanted, "json_schema").get("schema")),
        ("structured_outputs", outputs.get("json")),
        *(
            ("tools", _field(tool, "function").get("parameters"))
            for tool in (tools if isinstance(tools, list) else ())
            if isinstance(tool, dict)
        ),
        *(("response_format", schema) for schema in _find_tagged(wanted) if wanted.get("type") == "structural_tag"),
        *(
            ("structured_outputs", schema)
            for schema in _find_tagged(_parse(outputs.get("structural_tag"), "structural_tag"))
        ),
    ]
    for where, schema in places:
        parsed = _parse(schema, where)
        if isinstance(parsed, (dict, list)):
            yield where, parsed


def _find_enforced(chat: Json) -> frozenset[str]:
    """Return the places whose schemas constrain the answer; those of other tools are only shown to the model."""
    choice, tools = chat.get("tool_choice"), chat.get("tools")
    functions = (
        [_field(tool, "function") for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    )
    held = choice == "required" or isinstance(choice, dict) or any(one.get("strict") is True for one in functions)
    return frozenset({"response_format", "structured_outputs", *(("tools",) if held else ())})


def _num_held_tools(chat: Json) -> int:
    """Return the number of tools whose schemas become a grammar."""
    tools = chat.get("tools")
    functions = (
        [_field(tool, "function") for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    )
    return sum(one.get("strict") is True or chat.get("tool_choice") == "required" for one in functions)


def _elsewhere(node: Node) -> str | None:
    """Return the node's reference to another document, or None."""
    reference = node.get("$ref") if isinstance(node, dict) else None
    return reference if isinstance(reference, str) and reference and not reference.startswith("#") else None


def _parse(value: Any, where: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise _make_refusal(where, f"the JSON schema is not JSON: {error}") from error


def _find_tagged(tag: Any) -> Iterator[Any]:
    """Yield the schemas within a structural tag, each a document of its own."""
    if not isinstance(tag, (dict, list)):
        return
    for node, depth, _ in _descent(tag, _inner, set()):
        if depth > MAX_STEPS:
            raise _make_refusal("structural_tag", f"a structural tag may be at most {MAX_STEPS} steps deep")
        if isinstance(node, dict):
            yield from (node[name] for name in ("schema", "json_schema") if name in node)


def _descent(start: Node, steps: Callable[[Node], Iterator[Node]], done: set[int]) -> Iterator[tuple[Node, int, bool]]:
    """Yield every node once, depth first, as (node, depth, whether the node is its own ancestor).

    `steps`: yields the nodes directly below a node. `done`: ids of nodes to skip; every finished node is added.
    """
    if id(start) in done:
        return
    way, within = [(start, steps(start))], {id(start)}
    yield start, 1, False
    while way:
        node, ahead = way[-1]
        step = next(ahead, None)
        if step is None:
            way.pop()
            within.discard(id(node))
            done.add(id(node))
        elif id(step) in within:
            yield step, len(way), True
        elif id(step) not in done:
            within.add(id(step))
            way.append((step, steps(step)))
            yield step, len(way), False


def _steps(node: Node, root: Node) -> Iterator[Node]:
    yield from _inner(node)
    yield from _find_referred(node, root)


def _silent_steps(node: Node, root: Node) -> Iterator[Node]:
    """Yield the node's references and alternatives, which produce no text of their own: a cycle of them never ends."""
    yield from _find_referred(node, root)
    if isinstance(node, dict):
        for inner in map(node.get, ALTERNATIVES):
            yield from _inner(inner) if isinstance(inner, list) else ()


def _inner(node: Node) -> Iterator[Node]:
    values = node.values() if isinstance(node, dict) else node
    return (value for value in values if isinstance(value, (dict, list)))


def _find_referred(node: Node, root: Node) -> Iterator[Node]:
    """Yield the target of the node's reference within the document."""
    reference = node.get("$ref") if isinstance(node, dict) else None
    if not isinstance(reference, str) or not reference.startswith("#"):
        return
    found: Any = root
    for part in filter(None, unquote(reference[1:]).split("/")):
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list):
            found = found[int(name)] if name.isdecimal() and name.isascii() and int(name) < len(found) else None
        else:
            found = found.get(name) if isinstance(found, dict) else None
    if isinstance(found, (dict, list)):
        yield found


def _patterns(node: Node) -> Iterator[str]:
    if isinstance(node, dict):
        yield from (text for text in (node.get("pattern"),) if isinstance(text, str))
        yield from _field(node, "patternProperties")


def _field(value: Json, name: str) -> Json:
    inner = value.get(name)
    return inner if isinstance(inner, dict) else {}


def _make_refusal(where: str, why: str) -> RefusedError:
    return RefusedError(f"{where}: {why}", param=where)
