"""What vLLM objects to in a request, as an agent is told it: one sentence, the field, a code."""

import pytest

from swarmq.engine.client.vllm_errors import parse_refusal

LISTED = (
    "2 validation errors:\n  {'type': 'missing', 'loc': 'body.tools.0.function', 'msg': 'Field required', 'input': {'type': 'function'}}\n"
    "  {'type': 'string_type', 'loc': 'body.stop', 'msg': 'Input should be a valid string', 'input': 7}"
)
CUT = "1 validation error:\n  {'type': 'string_type', 'loc': 'body.stop', 'msg': 'Input should be a valid string', 'input': '<path>...[truncated]"
OWN = (
    "1 validation error:\n  {'type': 'value_error', 'loc': 'body', 'msg': 'Value error, stream options need stream', 'input': {}, "
    "'ctx': {'error': ValueError('x')}}"
)
DUMPED = (
    "1 validation error for ValidatorIterator\n0.type\n  Input should be 'text' [type=literal_error, input_value='x', input_type=str]\n"
    "    For further information visit https://errors.pydantic.dev"
)


@pytest.mark.parametrize(
    ("said", "param", "told"),
    [
        (
            LISTED,
            "body.tools.0.function",
            ("tools[0].function: Field required", "tools[0].function", "missing_required_parameter"),
        ),
        (CUT, None, ("stop: Input should be a valid string", "stop", "invalid_type")),
        (OWN, None, ("stream options need stream", None, "invalid_value")),
        (DUMPED, None, ("[0].type: Input should be 'text'", "[0].type", "invalid_value")),
        (
            "temperature must be positive",
            "temperature",
            ("temperature must be positive", "temperature", "invalid_value"),
        ),
        ("no such tool", None, ("no such tool", None, "invalid_value")),
    ],
)
def test_an_objection_is_one_sentence_with_its_field_and_a_code(said, param, told):
    assert parse_refusal(said, param) == told
