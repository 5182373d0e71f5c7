"""Questions to a language model behind any OpenAI-compatible endpoint: judges, teachers, graders.

cache ──hit──> answer
  └─miss──> budget ──> request, retried ──> answer, parsed, into the cache
              └──────────────┴── EndpointError
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from swarmq.client.episodes.http import HttpError, post_json
from swarmq.errors import EndpointError
from swarmq.runtime.wording import count_of

Parsed = TypeVar("Parsed")

FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 20.0
BUSY_S = 30.0
"""Seconds to wait for another process that holds the cache's file."""


class Budget(msgspec.Struct, kw_only=True):
    """Limits on what one endpoint object may spend in this process. Answers from its cache are free."""

    calls: int | None = None
    tokens: int | None = None
    """Maximum number of tokens, prompts and answers together, as the endpoint counts them."""
    spent_calls: int = 0
    spent_tokens: int = 0
    answer_tokens: int = 0
    """Tokens of answers, a part of `spent_tokens`."""
    uncounted_calls: int = 0
    """Calls that have failed, or whose tokens the endpoint has not counted."""

    def check(self) -> None:
        """Raise EndpointError if the budget is spent."""
        if self.calls is not None and self.spent_calls >= self.calls:
            raise EndpointError(f"the budget of {count_of(self.calls, 'call')} is spent")
        if self.tokens is not None and self.spent_tokens >= self.tokens:
            raise EndpointError(f"the budget of {count_of(self.tokens, 'token')} is spent")


class ChatEndpoint:
    """A model that answers questions. `ask` may be called from many threads.

    `base_url`, `api_key`: by default `$OPENAI_BASE_URL` and `$OPENAI_API_KEY`. `cache`: a file, shared by all processes that name
    it; without one, answers are kept in memory. `options`: further fields of every request, e.g. {"temperature": 0}.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        attempts: int = 5,
        timeout_s: float = 120.0,
        cache: Path | str | None = None,
        budget: Budget | None = None,
        options: Mapping[str, Any] | None = None,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._url = (base_url or os.environ.get("OPENAI_BASE_URL") or "https://api.openai.com/v1").rstrip("/")
        self._key = api_key or os.environ.get("OPENAI_API_KEY") or "none"
        self._model, self._options = model, dict(options or {})
        self._attempts, self._timeout_s, self._pause = attempts, timeout_s, pause
        self._cache = _Cache(Path(cache) if cache else None)
        self.budget = budget or Budget()
        self._lock = threading.Lock()
        self._asking: dict[str, threading.Lock] = {}

    def __str__(self) -> str:
        return f"{self._model!r} at {self._url}"

    def ask(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        parse: Callable[[str], Parsed],
        *,
        sample: int = 0,
        **options: Any,
    ) -> Parsed:
        """Return the parsed answer to a question or conversation; an answer for which `parse` raises ValueError is asked for again.

        Equal questions are asked once and then come from the cache; `sample`: another number has the same question asked again.
        Raises EndpointError if the endpoint does not answer, if no answer can be parsed, or if the budget is spent.
        """
        conversation = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        body = {"model": self._model, "messages": conversation, **self._options, **options}
        key = hashlib.sha256(msgspec.json.encode([self._url, body, sample], order="deterministic")).hexdigest()
        with self._lock_request(key):
            known = self._cache.get(key)
            if known is not None:
                with contextlib.suppress(ValueError):
                    return parse(known)
            text, parsed = self._request(body, parse)
            self._cache.put(key, text)
        return parsed

    def _request(self, body: dict[str, Any], parse: Callable[[str], Parsed]) -> tuple[str, Parsed]:
        pause_s, trouble = FIRST_PAUSE_S, ""
        for attempt in range(self._attempts):
            if attempt:
                self._pause(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
            with self._lock:
                self.budget.check()
                self.budget.spent_calls += 1
                self.budget.uncounted_calls += 1
            try:
                answer = post_json(f"{self._url}/chat/completions", body, token=self._key, timeout_s=self._timeout_s)
                text = str(answer["choices"][0]["message"]["content"])
            except HttpError as error:
                trouble = str(error)
                if not error.is_transient:
                    break
                pause_s = max(pause_s, min(error.retry_after_s or 0.0, MAX_PAUSE_S))
                continue
            except (KeyError, IndexError, TypeError):
                trouble = "its answer is not a chat completion"
                continue
            with self._lock:
                usage = answer.get("usage") or {}
                self.budget.spent_tokens += int(usage.get("total_tokens") or 0)
                self.budget.answer_tokens += int(usage.get("completion_tokens") or 0)
                self.budget.uncounted_calls -= bool(usage.get("total_tokens"))
            try:
                return text, parse(text)
            except ValueError as error:
                trouble = f"{error}: {text.strip()[-200:]!r}"
        raise EndpointError(f"{self}: {trouble}")

    @contextlib.contextmanager
    def _lock_request(self, key: str) -> Iterator[None]:
        """Hold the lock of a request, so that equal concurrent requests are sent once."""
        with self._lock:
            lock = self._asking.setdefault(key, threading.Lock())
        with lock:
            yield
        with self._lock:
            self._asking.pop(key, None)


class _Cache:
    """Answers by request, in memory or in a file that processes may share."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: dict[str, str] = {}
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            with self._open() as database:
                database.execute("CREATE TABLE IF NOT EXISTS answers (request TEXT PRIMARY KEY, answer TEXT)")

    def get(self, key: str) -> str | None:
        if key not in self._known and self._path:
            with self._open() as database:
                row = database.execute("SELECT answer FROM answers WHERE request = ?", (key,)).fetchone()
            if row:
                self._known[key] = row[0]
        return self._known.get(key)

    def put(self, key: str, answer: str) -> None:
        self._known[key] = answer
        if self._path:
            with self._open() as database:
                database.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", (key, answer))

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        assert self._path is not None
        try:
            with contextlib.closing(sqlite3.connect(self._path, timeout=BUSY_S)) as database, database:
                yield database
        except sqlite3.Error as error:
            raise EndpointError(f"the cache {self._path} cannot be used: {error}") from error
