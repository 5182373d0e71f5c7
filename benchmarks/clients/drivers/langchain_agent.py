"""LangChain's models: OpenAI's chat completions and responses, and Anthropic's messages."""

import sys
from typing import Literal

import pydantic
from answers import ANTHROPIC_URL, BASE_URL, FOLLOW_UP, KEY, MODEL, QUESTION, add, tell
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


class Verdict(pydantic.BaseModel):
    """A verdict."""

    right: bool
    digit: Literal["one", "two", "three"]


protocol, *form = sys.argv[1:]
if protocol == "messages":
    model = ChatAnthropic(model=MODEL, base_url=ANTHROPIC_URL, api_key=KEY, max_tokens=300)
else:
    model = ChatOpenAI(model=MODEL, base_url=BASE_URL, api_key=KEY, use_responses_api=protocol == "responses")


def ask(asked, messages):
    if "stream" not in form:
        return asked.invoke(messages)
    whole = None
    for piece in asked.stream(messages):
        whole = piece if whole is None else whole + piece
    return whole


messages = [HumanMessage(QUESTION)]
if "structured" in form:
    for _ in range(2):
        tell(parsed=model.with_structured_output(Verdict).invoke(messages).model_dump())
elif "tools" in form:
    while True:
        answer = ask(model.bind_tools([tool(add)]), messages)
        tell(answer.text, [(call["name"], call["args"]) for call in answer.tool_calls])
        messages.append(answer)
        if not answer.tool_calls:
            break
        messages += [ToolMessage(str(add(**call["args"])), tool_call_id=call["id"]) for call in answer.tool_calls]
else:
    for _ in range(2):
        answer = ask(model, messages)
        tell(answer.text)
        messages += [answer, HumanMessage(FOLLOW_UP)]
