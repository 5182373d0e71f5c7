"""Self-play: one model trades as seller and as buyer, and each side is rewarded for its own share.

Each side has a conversation of its own, in which it sees its own number and the other's moves. The header `x-swarmq-agent` names the
side, so a seller's reward is compared with those of the other sellers of its group.
"""

from __future__ import annotations

from typing import Any

from examples.negotiation.environment import SIDES, Bargain
from openai import DefaultHttpxClient, OpenAI

from swarmq import Episode, Outcome

POOL = DefaultHttpxClient()
"""Connections that all episodes share."""
MAX_TOKENS = {"toy": 8, "full": 384}
BEGIN = "begin"
"""What the side that moves first is told."""


def opening(task: dict[str, Any], side: str) -> list[dict[str, Any]]:
    number = f"Cost {task['cost']}" if side == "seller" else f"Value {task['value']}"
    system = f"You are the {side}. {number}."
    if task["size"] == "full":
        system += (
            " Trade at a price that is good for you; without a trade you get nothing. The other side's number is unknown to you."
            " Think, then write as your last line `offer N`, `accept` or `leave`."
        )
    return [{"role": "system", "content": system}]


def attempt(ep: Episode) -> Outcome:
    task: dict[str, Any] = ep.payload
    model = OpenAI(base_url=ep.base_url, api_key=ep.api_key, http_client=POOL)
    talks: dict[str, list[Any]] = {side: opening(task, side) for side in SIDES}
    bargain, heard = Bargain(task), BEGIN
    while not bargain.ended:
        side = bargain.turn
        talks[side].append({"role": "user", "content": heard})
        answer = model.chat.completions.create(
            model=ep.model,
            messages=talks[side],
            max_tokens=MAX_TOKENS[task["size"]],
            extra_headers={"x-swarmq-agent": side},
        )
        said = answer.choices[0].message.content or ""
        talks[side].append({"role": "assistant", "content": said})
        heard = bargain.move(said)
    shares = bargain.shares()
    fair = bargain.price is not None and min(shares.values()) >= 0.0
    moved = [side for side in SIDES if len(talks[side]) > 1]
    return Outcome(
        float(fair),
        success=fair,
        agent_rewards={ep.model: {side: shares[side] for side in moved}},
        metrics={
            "trade": bargain.price is not None,
            "loss": bargain.price is not None and not fair,
            "moves": bargain.moves,
            "sellers_share": shares["seller"],
        },
    )
