"""An agent of the OpenAI Agents SDK, which asks over responses, or over chat completions, plain and streamed."""

import asyncio
import os
import sys

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI


@function_tool(strict_mode=False)  # a strict one has a grammar of its own, and the test gives it one already
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


async def main() -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=os.environ["AGENT_BASE_URL"], api_key=os.environ["AGENT_KEY"])
    form = OpenAIResponsesModel if "responses" in sys.argv else OpenAIChatCompletionsModel
    agent = Agent(name="adder", instructions="Use add.", model=form(model="main", openai_client=client), tools=[add])
    if "streamed" in sys.argv:
        run = Runner.run_streamed(agent, "What is 1 + 2 + 3 + 4?")
        async for _ in run.stream_events():
            pass
    else:
        run = await Runner.run(agent, "What is 1 + 2 + 3 + 4?")
    print(run.final_output)


asyncio.run(main())
