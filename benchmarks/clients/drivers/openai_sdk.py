"""OpenAI's own library for Python."""

import json
import sys
from typing import Literal

import openai
import pydantic
from answers import BASE_URL, FOLLOW_UP, KEY, MODEL, NUMBERS, QUESTION, add, tell

CHAT_TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": NUMBERS}}
TOOL = {"type": "function", "name": "add", "description": "Adds.", "parameters": NUMBERS, "strict": False}


class Verdict(pydantic.BaseModel):
    right: bool
    digit: Literal["one", "two", "three"]


def message(client, messages, streamed, **more):
    asked = {"model": MODEL, "messages": messages, **more}
    if streamed:
        with client.chat.completions.stream(**asked) as stream:
            return stream.get_final_completion().choices[0].message
    return client.chat.completions.create(**asked).choices[0].message


def chat(client, streamed):
    messages = [{"role": "user", "content": QUESTION}]
    for _ in range(2):
        answer = message(client, messages, streamed)
        tell(answer.content)
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": FOLLOW_UP}]


def tools(client, streamed):
    messages = [{"role": "user", "content": QUESTION}]
    while True:
        answer = message(client, messages, streamed, tools=[CHAT_TOOL])
        calls = answer.tool_calls or []
        tell(answer.content, [(call.function.name, call.function.arguments) for call in calls])
        if not calls:
            return
        messages.append(answer.to_dict())
        for call in calls:
            result = str(add(**json.loads(call.function.arguments)))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def structured(client):
    messages = [{"role": "user", "content": QUESTION}]
    for _ in range(2):
        answer = client.chat.completions.parse(model=MODEL, messages=messages, response_format=Verdict)
        tell(parsed=answer.choices[0].message.parsed.model_dump())


def responses(client, streamed):
    given, previous = [{"role": "user", "content": QUESTION}], None
    while True:
        asked = {"model": MODEL, "input": given, "tools": [TOOL]}
        if previous:
            asked["previous_response_id"] = previous
        if streamed:
            with client.responses.stream(**asked) as stream:
                answer = stream.get_final_response()
        else:
            answer = client.responses.create(**asked)
        calls = [item for item in answer.output if item.type == "function_call"]
        tell(answer.output_text, [(call.name, call.arguments) for call in calls])
        if not calls:
            return
        previous = answer.id
        given = [
            {
                "type": "function_call_output",
                "call_id": call.call_id,
                "output": str(add(**json.loads(call.arguments))),
            }
            for call in calls
        ]


def structured_responses(client):
    for _ in range(2):
        tell(parsed=client.responses.parse(model=MODEL, input=QUESTION, text_format=Verdict).output_parsed.model_dump())


with openai.OpenAI(base_url=BASE_URL, api_key=KEY) as client:
    match sys.argv[1:]:
        case ["chat", "structured"]:
            structured(client)
        case ["responses", "structured"]:
            structured_responses(client)
        case ["chat", "tools", *rest]:
            tools(client, bool(rest))
        case ["responses", "tools", *rest]:
            responses(client, bool(rest))
        case ["chat", form]:
            chat(client, form == "stream")
