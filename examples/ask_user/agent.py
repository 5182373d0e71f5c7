"""An agent that books a taxi and may ask its user first."""

from __future__ import annotations

from typing import Any

from examples.ask_user.environment import FIELDS, User, read_booking, score, write_request
from openai import DefaultHttpxClient, OpenAI

from swarmq import Episode, Outcome

POOL = DefaultHttpxClient()
"""Connections that all episodes share."""
MAX_TURNS = {"toy": 3, "full": 6}
MAX_TOKENS = {"toy": 24, "full": 512}


def opening(task: dict[str, Any]) -> list[dict[str, Any]]:
    fields = ", ".join(FIELDS[task["size"]])
    system = f"Book a taxi: book {fields}. Or ask."
    if task["size"] == "full":
        system = (
            f"You book taxis. When you know all of {fields}, write as your last line `book` and their values in this order, "
            "with commas between. If something is missing, ask the user one short question instead. Never guess, and never ask "
            "for what the user has said."
        )
    return [{"role": "system", "content": system}, {"role": "user", "content": write_request(task)}]


def attempt(ep: Episode) -> Outcome:
    task: dict[str, Any] = ep.payload
    model = OpenAI(base_url=ep.base_url, api_key=ep.api_key, http_client=POOL)
    messages: list[Any] = opening(task)
    user, questions, booking = User(task), 0, None
    for _turn in range(MAX_TURNS[task["size"]]):
        answer = model.chat.completions.create(model=ep.model, messages=messages, max_tokens=MAX_TOKENS[task["size"]])
        said = answer.choices[0].message.content or ""
        if "book" in said.lower():
            booking = read_booking(said, task["size"])
            break
        questions += 1
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": user.reply(said)}]
    reward = score(task, booking, user.needless)
    asked_all = user.told == set(task["missing"])
    return Outcome(
        reward,
        success=reward == 1.0,
        metrics={"questions": questions, "needless": user.needless, "asked_what_was_missing": asked_all},
    )
