"""smolagents: its model for OpenAI's servers, and its agent that calls tools."""

import sys

from answers import BASE_URL, KEY, MODEL, QUESTION, add, tell
from smolagents import OpenAIServerModel, ToolCallingAgent, tool

protocol, *form = sys.argv[1:]
agent = ToolCallingAgent(
    tools=[tool(add)],
    model=OpenAIServerModel(model_id=MODEL, api_base=BASE_URL, api_key=KEY, tool_choice="auto"),
    stream_outputs="stream" in form,
    max_steps=4,
    verbosity_level=0,
)
agent.run(QUESTION)
for step in agent.memory.steps:
    if message := getattr(step, "model_output_message", None):
        calls = message.tool_calls or []
        tell(message.content, [(call.function.name, call.function.arguments) for call in calls])
