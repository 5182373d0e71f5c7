"""Anthropic's own library for Python."""

import sys
from typing import Literal

import anthropic
import pydantic
from answers import ANTHROPIC_URL, FOLLOW_UP, KEY, MODEL, NUMBERS, QUESTION, add, tell

TOOL = {"name": "add", "description": "Adds.", "input_schema": NUMBERS}
ASKED = {"model": MODEL, "max_tokens": 300}


class Verdict(pydantic.BaseModel):
    right: bool
    digit: Literal["one", "two", "three"]


def message(client, messages, streamed, **more):
    if streamed:
        with client.messages.stream(messages=messages, **ASKED, **more) as stream:
            return stream.get_final_message()
    return client.messages.create(messages=messages, **ASKED, **more)


def talk(client, streamed):
    messages = [{"role": "user", "content": QUESTION}]
    for _ in range(2):
        answer = message(client, messages, streamed)
        tell(answer.content[0].text)
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": FOLLOW_UP}]


def tools(client, streamed):
    messages = [{"role": "user", "content": QUESTION}]
    while True:
        answer = message(client, messages, streamed, tools=[TOOL])
        uses = [block for block in answer.content if block.type == "tool_use"]
        text = "".join(block.text for block in answer.content if block.type == "text")
        tell(text, [(use.name, use.input) for use in uses])
        if not uses:
            return
        results = [{"type": "tool_result", "tool_use_id": use.id, "content": str(add(**use.input))} for use in uses]
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]


def structured(client):
    for _ in range(2):
        answer = client.messages.parse(messages=[{"role": "user", "content": QUESTION}], output_format=Verdict, **ASKED)
        tell(parsed=answer.parsed_output.model_dump())


with anthropic.Anthropic(base_url=ANTHROPIC_URL, api_key=KEY) as client:
    match sys.argv[2:]:
        case ["structured"]:
            structured(client)
        case ["tools", *rest]:
            tools(client, bool(rest))
        case [form]:
            talk(client, form == "stream")
