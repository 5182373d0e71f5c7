"""`ask`: one request to an episode's model, for agents that need no SDK."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from email.message import Message
from typing import Any

from swarmq.client.episodes.episode import Handle
from swarmq.client.episodes.event_loops import run_in_thread
from swarmq.client.episodes.http import HttpError, post_json
from swarmq.client.episodes.received_answers import observe_own_request
from swarmq.errors import EpisodeError

FIRST_PAUSE_S = 0.5


def ask(
    ep: Handle,
    messages: str | Sequence[Mapping[str, Any]],
    *,
    policy: str | None = None,
    agent: str | None = None,
    timeout_s: float = 600.0,
    attempts: int = 5,
    **options: Any,
) -> str:
    """Return the text of the model's answer.

    `messages` is a question or a whole conversation; `policy` defaults to the episode's first policy; `agent` tags the call for
    rewards by role; after transient errors it is repeated, up to `attempts` times in all; `options` are added to the request. Raises
    EpisodeError.
    """
    conversation = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
    body = {"model": policy or ep.model, "messages": conversation, **options}
    headers = {"X-Swarmq-Agent": agent} if agent else {}
    url = f"{ep.base_url}/chat/completions"
    mark, record_answer = observe_own_request(ep.api_key, url)
    for attempt in range(attempts):
        headers |= {"X-Stainless-Retry-Count": str(attempt), **mark}
        answer_headers: list[Message] = []
        try:
            answer = post_json(
                url,
                body,
                token=ep.api_key,
                timeout_s=timeout_s,
                headers=headers,
                ca=ep.ca,
                on_headers=answer_headers.append,
            )
            record_answer(answer_headers[0])
            return str(answer["choices"][0]["message"].get("content") or "")
        except HttpError as error:
            if not error.is_transient or attempt + 1 == attempts:
                raise EpisodeError(f"episode {ep.episode_id}: {error}") from error
            time.sleep(max(error.retry_after_s or 0.0, FIRST_PAUSE_S * 2**attempt) * random.uniform(0.5, 1.0))
    raise AssertionError


async def ask_async(ep: Handle, messages: str | Sequence[Mapping[str, Any]], **options: Any) -> str:
    """Await `ask` in a thread; `options` are its keyword arguments."""
    return await run_in_thread(lambda: ask(ep, messages, **options))
