"""A LangGraph agent. Nothing in it is made for training, but the address and the key with which the model is asked.

START -> model -> tools -> model ... -> check -> END
                                         |
                                         +-> model, once, if the answer is no action
"""

from __future__ import annotations

from typing import Any, NamedTuple

import httpx
from examples.langgraph.environment import ACTIONS, Desk, answer_of, build, score
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.runnables import Runnable
from langchain_core.tools import tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, ToolRuntime
from langgraph.runtime import Runtime
from pydantic import SecretStr

from swarmq import Episode, Outcome

POOL = httpx.Client(timeout=600)
"""Connections shared by all episodes of the process."""
SYSTEM = {
    "toy": "Help the customer.",
    "full": (
        "You decide what to do with an order of a customer. Look up the order, its customer and the policy for its status; "
        f"then give one action in tags. The actions are {', '.join(ACTIONS)}. For example: <answer>wait</answer>"
    ),
}
REMINDER = f"Answer with {', '.join(ACTIONS)}."
MAX_TOKENS = {"toy": 48, "full": 512}
MAX_NODES = {"toy": 8, "full": 24}
"""Largest number of nodes that a graph may visit."""


class State(MessagesState):
    reminded: bool


class Context(NamedTuple):
    """What differs from episode to episode; the graph is built once for all of them."""

    chat_model: Runnable[Any, AIMessage]
    desk: Desk


@tool
def lookup(order: str, runtime: ToolRuntime[Context]) -> str:
    """Return an order by its number."""
    return runtime.context.desk.lookup(order)


@tool
def customer(name: str, runtime: ToolRuntime[Context]) -> str:
    """Return whether a customer is a gold member."""
    return runtime.context.desk.customer(name)


@tool
def policy(status: str, runtime: ToolRuntime[Context]) -> str:
    """Return the rule for orders of a status."""
    return runtime.context.desk.policy(status)


TOOLS = [lookup, customer, policy]
OFFERED = [convert_to_openai_tool(one) for one in TOOLS]
"""The tools as the model is told of them."""


def ask_model(state: State, runtime: Runtime[Context]) -> dict[str, Any]:
    return {"messages": [runtime.context.chat_model.invoke(state["messages"])]}


def check(state: State) -> dict[str, Any]:
    """Ask once more if the answer is no action."""
    if state["reminded"] or answer_of(state["messages"][-1].text) in ACTIONS:
        return {}
    return {"messages": [HumanMessage(REMINDER)], "reminded": True}


def after_model(state: State) -> str:
    last = state["messages"][-1]
    return "tools" if isinstance(last, AIMessage) and last.tool_calls else "check"


def after_check(state: State) -> str:
    return "model" if isinstance(state["messages"][-1], HumanMessage) else END


def build_graph() -> Any:
    graph = StateGraph(State, context_schema=Context)
    graph.add_node("model", ask_model)
    graph.add_node("tools", ToolNode(TOOLS))
    graph.add_node("check", check)
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", after_model, ["tools", "check"])
    graph.add_edge("tools", "model")
    graph.add_conditional_edges("check", after_check, ["model", END])
    return graph.compile()


GRAPH = build_graph()


def attempt(ep: Episode) -> Outcome:
    size, desk = ep.payload["size"], build(ep.payload)
    chat_model = ChatOpenAI(
        model=ep.model,
        base_url=ep.base_url,
        api_key=SecretStr(ep.api_key),
        http_client=POOL,
        max_tokens=MAX_TOKENS[size],
        use_responses_api=False,
    )
    opening = [SystemMessage(SYSTEM[size]), HumanMessage(desk.question)]
    try:
        end = GRAPH.invoke(
            {"messages": opening, "reminded": False},
            {"recursion_limit": MAX_NODES[size]},
            context=Context(chat_model.bind_tools(OFFERED), desk),
        )
    except GraphRecursionError:  # the model never stopped calling tools
        return Outcome(0.0, success=False)
    reward = score(desk, end["messages"][-1].text)
    lookups = sum(message.type == "tool" for message in end["messages"])
    return Outcome(reward, success=reward == 1.0, metrics={"lookups": lookups, "reminded": float(end["reminded"])})
