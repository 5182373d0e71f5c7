"""LlamaIndex: its model for servers like OpenAI's, and a tool loop of it."""

import sys

from answers import BASE_URL, FOLLOW_UP, KEY, MODEL, QUESTION, add, tell
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

protocol, *form = sys.argv[1:]
model = OpenAILike(
    model=MODEL, api_base=BASE_URL, api_key=KEY, is_chat_model=True, is_function_calling_model=True, context_window=8192
)
messages = [ChatMessage(role="user", content=QUESTION)]
if "tools" in form:
    while True:
        adder = FunctionTool.from_defaults(add)
        answer = model.chat_with_tools([adder], chat_history=messages, allow_parallel_tool_calls=True)
        calls = model.get_tool_calls_from_response(answer, error_on_no_tool_call=False)
        tell(answer.message.content, [(call.tool_name, call.tool_kwargs) for call in calls])
        if not calls:
            break
        messages.append(answer.message)
        for call in calls:
            result = str(add(**call.tool_kwargs))
            messages.append(ChatMessage(role="tool", content=result, additional_kwargs={"tool_call_id": call.tool_id}))
else:
    for _ in range(2):
        answer = list(model.stream_chat(messages))[-1] if "stream" in form else model.chat(messages)
        tell(answer.message.content)
        messages += [answer.message, ChatMessage(role="user", content=FOLLOW_UP)]
