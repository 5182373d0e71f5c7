"""The OpenAI Agents SDK, over responses or chat completions, plain and streamed."""

import asyncio
import sys

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from answers import BASE_URL, KEY, MODEL, QUESTION, add, tell
from openai import AsyncOpenAI

protocol, *form = sys.argv[1:]


async def main():
    set_tracing_disabled(True)
    model = OpenAIResponsesModel if protocol == "responses" else OpenAIChatCompletionsModel
    client = AsyncOpenAI(base_url=BASE_URL, api_key=KEY)
    tool = function_tool(add, strict_mode=False)
    agent = Agent(name="adder", instructions="Use add.", model=model(model=MODEL, openai_client=client), tools=[tool])
    if "stream" in form:
        run = Runner.run_streamed(agent, QUESTION)
        async for _ in run.stream_events():
            pass
    else:
        run = await Runner.run(agent, QUESTION)
    for answer in run.raw_responses:
        calls = [(item.name, item.arguments) for item in answer.output if item.type == "function_call"]
        said = [part.text for item in answer.output if item.type == "message" for part in item.content]
        tell("".join(said), calls)


asyncio.run(main())
