"""JSON schemas of the requests, for the OpenAPI document. Beyond a field's type, the engine decides what is valid."""

from __future__ import annotations

from typing import Any

from swarmq.proxy.sampling_params import MAX_TOKENS

Json = dict[str, Any]


def nullable(*types: str, **more: Any) -> Json:
    return {"type": [*types, "null"], **more}


def request(required: tuple[str, ...], **fields: Json) -> Json:
    """Return the schema of a request of OpenAI's dialects. Parameters that only vLLM knows are accepted as well
    (docs/reference/dialects.md)."""
    return {
        "type": "object",
        "required": ["model", *required],
        "properties": {
            "model": {"type": "string", "minLength": 1, "description": "A policy that the key names."},
            **fields,
        },
        "additionalProperties": False,
    }


FLAG = nullable("boolean")
NUMBER = nullable("number")
ANSWER = nullable("integer", minimum=1, maximum=MAX_TOKENS)
OBJECT = nullable("object")
LIST = nullable("array", items={"type": "object"})
TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]}
CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}
CHOICE = {"anyOf": [{"type": "string"}, {"type": "object"}, {"type": "null"}]}
SAMPLING = {
    "temperature": NUMBER,
    "top_p": NUMBER,
    "seed": nullable("integer", minimum=-(2**63), maximum=2**63 - 1),
    "stop": TEXTS,
    "presence_penalty": NUMBER,
    "frequency_penalty": NUMBER,
    "logit_bias": OBJECT,
    "n": nullable("integer", minimum=1, maximum=128),
}

CHAT = request(
    ("messages",),
    messages={
        "type": "array",
        "minItems": 1,
        "items": {
            "type": "object",
            "required": ["role", "content"],
            "properties": {
                "role": {"enum": ["system", "developer", "user", "assistant", "tool", "function"]},
                "content": {"anyOf": [*CONTENT["anyOf"], {"type": "null"}]},
            },
        },
    },
    stream=FLAG,
    stream_options=OBJECT,
    max_completion_tokens=ANSWER,
    max_tokens=ANSWER,
    tools=LIST,
    tool_choice=CHOICE,
    parallel_tool_calls=FLAG,
    response_format=OBJECT,
    logprobs=FLAG,
    top_logprobs=nullable("integer", minimum=0, maximum=20),
    reasoning_effort=nullable("string"),
    **SAMPLING,
)
COMPLETION = request(
    ("prompt",),
    prompt={
        "anyOf": [
            {"type": "string", "minLength": 1},
            {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 1},
            {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
        ]
    },
    stream=FLAG,
    stream_options=OBJECT,
    max_tokens=ANSWER,
    logprobs=nullable("integer", minimum=0, maximum=20),
    **SAMPLING,
)
RESPONSE = request(
    ("input",),
    input=CONTENT,
    instructions=nullable("string"),
    previous_response_id=nullable("string"),
    stream=FLAG,
    store=FLAG,
    max_output_tokens=ANSWER,
    tools=LIST,
    tool_choice=CHOICE,
    parallel_tool_calls=FLAG,
    text=OBJECT,
    reasoning=OBJECT,
    include=nullable("array", items={"type": "string"}),
    top_logprobs=nullable("integer", minimum=0, maximum=20),
    temperature=NUMBER,
    top_p=NUMBER,
)
PROMPT: Json = {
    "messages": {
        "type": "array",
        "minItems": 1,
        "items": {
            "type": "object",
            "required": ["role", "content"],
            "properties": {"role": {"enum": ["user", "assistant", "system"]}, "content": CONTENT},
        },
    },
    "system": {"anyOf": [CONTENT, {"type": "null"}]},
    "tools": LIST,
    "tool_choice": OBJECT,
    "thinking": OBJECT,
    "output_config": OBJECT,
}
MESSAGE = request(
    ("messages", "max_tokens"),
    max_tokens={"type": "integer", "minimum": 1, "maximum": MAX_TOKENS},
    stream=FLAG,
    stop_sequences=nullable("array", items={"type": "string"}),
    temperature=NUMBER,
    top_p=NUMBER,
    top_k=nullable("integer"),
    **PROMPT,
) | {"additionalProperties": True}
COUNT_TOKENS = request(("messages",), **PROMPT) | {"additionalProperties": True}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": nullable("string"),
                "code": nullable("string"),
            },
        }
    },
}
