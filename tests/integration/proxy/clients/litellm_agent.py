"""A tool loop over LiteLLM, which knows a server by the name before the model's."""

import json
import os
import sys

import litellm

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
messages = [{"role": "user", "content": "What is 1 + 2 + 3 + 4?"}]
streamed = "streamed" in sys.argv
while True:
    answer = litellm.completion(
        model="openai/main",
        messages=messages,
        tools=[TOOL],
        api_base=os.environ["AGENT_BASE_URL"],
        api_key=os.environ["AGENT_KEY"],
        stream=streamed,
    )
    if streamed:
        answer = litellm.stream_chunk_builder(list(answer), messages=messages)
    message = answer.choices[0].message
    messages.append(message.model_dump())
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        given = json.loads(call.function.arguments)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(given["a"] + given["b"])})
print(messages[-1]["content"])
