"""Pydantic AI: an agent with a tool, and one with a structured output, over three protocols."""

import asyncio
import sys
from typing import Literal

import pydantic
from answers import ANTHROPIC_URL, BASE_URL, FOLLOW_UP, KEY, MODEL, QUESTION, add, tell
from pydantic_ai import Agent
from pydantic_ai.messages import ModelResponse
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

protocol, *form = sys.argv[1:]


class Verdict(pydantic.BaseModel):
    right: bool
    digit: Literal["one", "two", "three"]


def model():
    match protocol:
        case "messages":
            return AnthropicModel(MODEL, provider=AnthropicProvider(base_url=ANTHROPIC_URL, api_key=KEY))
        case "responses":
            return OpenAIResponsesModel(MODEL, provider=OpenAIProvider(base_url=BASE_URL, api_key=KEY))
        case _:
            return OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=BASE_URL, api_key=KEY))


def tell_all(run):
    for message in run.all_messages():
        if isinstance(message, ModelResponse):
            text = "".join(part.content for part in message.parts if part.part_kind == "text")
            tell(text, [(part.tool_name, part.args) for part in message.parts if part.part_kind == "tool-call"])


async def main():
    if "structured" in form:
        return tell_all(await Agent(model(), output_type=Verdict).run(QUESTION))
    agent = Agent(model(), tools=[add] if "tools" in form else [])
    if "stream" in form:
        async with agent.run_stream(QUESTION) as run:
            await run.get_output()
        return tell_all(run)
    run = await agent.run(QUESTION)
    return tell_all(await agent.run(FOLLOW_UP, message_history=run.all_messages()))


asyncio.run(main())
