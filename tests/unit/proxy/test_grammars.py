"""Schemas that refer to themselves: harmless where something is written in between, endless where not."""

import pytest

from swarmq.proxy.dialects.grammars import check_schemas
from swarmq.proxy.refusals import RefusedError

LIST = {"type": "object", "properties": {"next": {"$ref": "#"}}}
TREE = {
    "$defs": {"t": {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"$ref": "#/$defs/t"}}]}},
    "$ref": "#/$defs/t",
}
ITSELF = {"$ref": "#"}
ROUND = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"anyOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}
WITHIN = {"type": "object", "properties": {"a": {"allOf": [{"$ref": "#/properties/a"}]}}}


def everywhere(schema):
    yield {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}}
    yield {"structured_outputs": {"json": schema}}
    yield {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]}


@pytest.mark.parametrize("schema", [LIST, TREE, {"$ref": "file:///etc/passwd"}, {"$ref": "#/none"}, {}])
def test_what_ends_is_let_through(schema):
    for chat in everywhere(schema):
        check_schemas(chat)


@pytest.mark.parametrize("schema", [ITSELF, ROUND, WITHIN])
def test_what_never_ends_is_refused(schema):
    for chat in everywhere(schema):
        with pytest.raises(RefusedError, match="without end"):
            check_schemas(chat)
