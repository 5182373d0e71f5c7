"""LiteLLM, which knows a server by the name before the model's."""

import json
import sys

import litellm
from answers import ANTHROPIC_URL, BASE_URL, FOLLOW_UP, KEY, MODEL, NUMBERS, QUESTION, add, tell

TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": NUMBERS}}
protocol, *form = sys.argv[1:]
server, url = ("anthropic", ANTHROPIC_URL) if protocol == "messages" else ("openai", BASE_URL)


def ask(messages, **more):
    asked = {"model": f"{server}/{MODEL}", "api_base": url, "api_key": KEY, "messages": messages, **more}
    if "stream" not in form:
        return litellm.completion(**asked).choices[0].message
    pieces = list(litellm.completion(stream=True, **asked))
    return litellm.stream_chunk_builder(pieces, messages=messages).choices[0].message


messages = [{"role": "user", "content": QUESTION}]
if "tools" in form:
    while True:
        answer = ask(messages, tools=[TOOL])
        calls = answer.tool_calls or []
        tell(answer.content, [(call.function.name, call.function.arguments) for call in calls])
        if not calls:
            break
        messages.append(answer.model_dump())
        for call in calls:
            result = str(add(**json.loads(call.function.arguments)))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
elif protocol == "responses":
    for _ in range(2):
        answer = litellm.responses(model=f"openai/{MODEL}", api_base=url, api_key=KEY, input=QUESTION)
        tell("".join(part.text for item in answer.output if item.type == "message" for part in item.content))
else:
    for _ in range(2):
        answer = ask(messages)
        tell(answer.content)
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": FOLLOW_UP}]
