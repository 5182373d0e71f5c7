"""A LangGraph agent. Nothing in it is made for training, but the address and the key with which the model is asked.

START -> model -> tools -> model ... -> check -> END
                                         |
                                         +-> model, once, if the answer is no action
"""

from __future__ import annotations

from typing import Any

import httpx
from examples.langgraph.environment import ACTIONS, Desk, answer_of, build, score
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.tools import BaseTool, tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
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


def make_tools(desk: Desk) -> list[BaseTool]:
    @tool
    def lookup(order: str) -> str:
        """Return an order by its number."""
        return desk.lookup(order)

    @tool
    def customer(name: str) -> str:
        """Return whether a customer is a gold member."""
        return desk.customer(name)

    @tool
    def policy(status: str) -> str:
        """Return the rule for orders of a status."""
        return desk.policy(status)

    return [lookup, customer, policy]


def make_graph(chat_model: ChatOpenAI, desk: Desk) -> Any:
    """Return the compiled graph for one desk."""
    tools = make_tools(desk)
    with_tools = chat_model.bind_tools(tools)

    def ask_model(state: State) -> dict[str, Any]:
        return {"messages": [with_tools.invoke(state["messages"])]}

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

    graph = StateGraph(State)
    graph.add_node("model", ask_model)
    graph.add_node("tools", ToolNode(tools))
    graph.add_node("check", check)
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", after_model, ["tools", "check"])
    graph.add_edge("tools", "model")
    graph.add_conditional_edges("check", after_check, ["model", END])
    return graph.compile()


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
        end = make_graph(chat_model, desk).invoke(
            {"messages": opening, "reminded": False}, {"recursion_limit": MAX_NODES[size]}
        )
    except GraphRecursionError:  # the model never stopped calling tools
        return Outcome(0.0, success=False)
    reward = score(desk, end["messages"][-1].text)
    lookups = sum(message.type == "tool" for message in end["messages"])
    return Outcome(reward, success=reward == 1.0, metrics={"lookups": lookups, "reminded": float(end["reminded"])})
