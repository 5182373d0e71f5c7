"""A LangGraph agent: a graph of model and tools."""

import sys

from answers import BASE_URL, KEY, MODEL, QUESTION, add, tell
from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

protocol, *form = sys.argv[1:]
adder = tool(add)
model = ChatOpenAI(
    model=MODEL,
    base_url=BASE_URL,
    api_key=KEY,
    use_responses_api=protocol == "responses",
    streaming="stream" in form,
).bind_tools([adder])

graph = StateGraph(MessagesState)
graph.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
graph.add_node("tools", ToolNode([adder]))
graph.add_edge(START, "model")
graph.add_conditional_edges("model", tools_condition)
graph.add_edge("tools", "model")

for message in graph.compile().invoke({"messages": [("user", QUESTION)]})["messages"]:
    if isinstance(message, AIMessage):
        tell(message.text, [(call["name"], call["args"]) for call in message.tool_calls])
