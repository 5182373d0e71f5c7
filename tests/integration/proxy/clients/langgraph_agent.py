"""A LangGraph agent: a graph of model and tools, over chat completions and over responses, plain and streamed."""

import os
import sys

from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


model = ChatOpenAI(
    model="main",
    base_url=os.environ["AGENT_BASE_URL"],
    api_key=os.environ["AGENT_KEY"],
    use_responses_api="responses" in sys.argv,
    streaming="streamed" in sys.argv,
).bind_tools([add])

graph = StateGraph(MessagesState)
graph.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
graph.add_node("tools", ToolNode([add]))
graph.add_edge(START, "model")
graph.add_conditional_edges("model", tools_condition)
graph.add_edge("tools", "model")

said = graph.compile().invoke({"messages": [("system", "Use add."), ("user", "What is 1 + 2 + 3 + 4?")]})["messages"]
assert sum(isinstance(message, AIMessage) for message in said) == 3
print(said[-1].text)
