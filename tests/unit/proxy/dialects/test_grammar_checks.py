"""Schemas that refer to themselves: harmless where something is written in between, endless where not."""

import json

import pytest

from swarmq.proxy.dialects.grammar_checks import MAX_GRAMMAR, MAX_HELD_TOOLS, MAX_PARTS, MAX_PATTERN, check_schemas
from swarmq.proxy.http_errors import RefusedError

LIST = {"type": "object", "properties": {"next": {"$ref": "#"}}}
TREE = {
    "$defs": {"t": {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"$ref": "#/$defs/t"}}]}},
    "$ref": "#/$defs/t",
}
ITSELF = {"$ref": "#"}
ROUND = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"anyOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}
WITHIN = {"type": "object", "properties": {"a": {"allOf": [{"$ref": "#/properties/a"}]}}}
BY_NUMBER = {"allOf": [{"$ref": "#/allOf/0"}]}
QUOTED = {"$defs": {"a": {"$ref": "#/%24defs/a"}}, "$ref": "#/$defs/a"}


def chain(length, link):
    """Definitions that each lead to the next one, in the form that `link` gives a reference."""
    defs = {f"a{i}": link({"$ref": f"#/$defs/a{i + 1}"}) for i in range(length)}
    return {"$defs": {**defs, f"a{length}": {"type": "integer"}}, "$ref": "#/$defs/a0"}


DOUBLED = chain(40, lambda ref: {"allOf": [ref, ref], "anyOf": [ref, ref]})
CHAIN = chain(1100, lambda ref: ref)
NESTED = chain(400, lambda ref: {"type": "object", "properties": {"a": ref}})
WIDE = {"anyOf": [{"const": i} for i in range(MAX_PARTS)]}
PATTERN = {"type": "string", "pattern": "(" * MAX_PATTERN + "a" + ")" * MAX_PATTERN}


def everywhere(schema):
    yield {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}}
    yield {"structured_outputs": {"json": schema}}
    yield {"structured_outputs": {"json": json.dumps(schema)}}
    yield {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]}
    old = {"structures": [{"begin": "<", "schema": schema, "end": ">"}], "triggers": ["<"]}
    tag = {"type": "sequence", "elements": [{"type": "json_schema", "json_schema": schema}]}
    for fields in (old, {"format": tag}):
        yield {"response_format": {"type": "structural_tag", **fields}}
        yield {"structured_outputs": {"structural_tag": json.dumps({"type": "structural_tag", **fields})}}


@pytest.mark.parametrize("schema", [LIST, TREE, {"$ref": "#/none"}, {}, DOUBLED])
def test_a_schema_whose_expansion_ends_is_let_through(schema):
    for chat in everywhere(schema):
        check_schemas(chat)


@pytest.mark.parametrize("schema", [ITSELF, ROUND, WITHIN, BY_NUMBER, QUOTED])
def test_a_schema_whose_expansion_never_ends_is_refused(schema):
    for chat in everywhere(schema):
        with pytest.raises(RefusedError, match="without end"):
            check_schemas(chat)


@pytest.mark.parametrize(
    ("schema", "why"), [(CHAIN, "steps deep"), (NESTED, "steps deep"), (WIDE, "parts"), (PATTERN, "pattern")]
)
def test_what_would_take_an_engine_with_it_is_refused(schema, why):
    for chat in everywhere(schema):
        with pytest.raises(RefusedError, match=why):
            check_schemas(chat)


@pytest.mark.parametrize("kind", ["regex", "grammar"])
def test_a_grammar_without_measure_is_refused(kind):
    check_schemas({"structured_outputs": {kind: "a" * MAX_GRAMMAR}})
    with pytest.raises(RefusedError, match=kind):
        check_schemas({"structured_outputs": {kind: "a" * (MAX_GRAMMAR + 1)}})


@pytest.mark.parametrize(
    ("chat", "why"),
    [
        ({"structured_outputs": {"choice": ["a"] * 10_001}}, "choice"),
        ({"structured_outputs": {"json": {"enum": ["a"] * 10_001}}}, "parts"),
        ({"structured_outputs": {"json": {"type": "object", "required": ["a"] * 10_001}}}, "parts"),
        ({"structured_outputs": {"json": {"properties": {f"p{i}": {} for i in range(1001)}}}}, "properties"),
    ],
    ids=["choices", "enum", "required", "properties"],
)
def test_what_takes_a_compiler_minutes_is_refused(chat, why):
    with pytest.raises(RefusedError, match=why):
        check_schemas(chat)


@pytest.mark.parametrize("fields", [{"json": "{"}, {"structural_tag": "["}, {"json": "[" * 5000}])
def test_a_schema_in_text_that_is_not_json_is_refused(fields):
    with pytest.raises(RefusedError, match="not JSON"):
        check_schemas({"structured_outputs": fields})


@pytest.mark.parametrize("reference", ["http://127.0.0.1/a.json", "file:///etc/passwd", "other.json"])
def test_what_an_answer_is_held_to_refers_to_nothing_elsewhere(reference):
    schema = {"type": "object", "properties": {"a": {"$ref": reference}}}
    for chat in everywhere(schema):
        if "tools" in chat:
            check_schemas(chat)  # nothing is held to it: it is text for the model
            chat["tool_choice"] = "required"
        with pytest.raises(RefusedError, match="its own parts"):
            check_schemas(chat)


def test_a_property_may_be_called_as_a_reference_is():
    for chat in everywhere({"type": "object", "properties": {"$ref": {"type": "string"}}}):
        check_schemas(chat)


@pytest.mark.parametrize("way", [{"strict": True}, {}])
def test_so_many_tools_are_held_to_their_schemas_and_no_more(way):
    def chat(num):
        tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": {}, **way}} for i in range(num)]
        return {"tools": tools, **({} if way else {"tool_choice": "required"})}

    check_schemas(chat(MAX_HELD_TOOLS))
    with pytest.raises(RefusedError, match="strict or forced"):
        check_schemas(chat(MAX_HELD_TOOLS + 1))
    check_schemas({"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(1000)]})
