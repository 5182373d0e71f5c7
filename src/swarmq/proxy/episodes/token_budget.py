"""Budgets of episodes: model calls and tokens that they may still use, exact within one proxy, also for concurrent calls.

An episode that changes its proxy is counted anew there; it stays with its proxy as long as that lives.
"""

from __future__ import annotations

from swarmq.proxy.http_errors import RefusedError
from swarmq.runtime.wording import count_of


class TokenBudget:
    """Budget of model calls and tokens of one episode."""

    def __init__(self) -> None:
        self.calls = 0
        self.sampled_tokens = 0
        self.reserved_tokens = 0
        """Number of tokens that open calls may still sample."""

    def take_call(self, *, max_calls: int, max_tokens: int) -> None:
        """Count a model call. Raises RefusedError if the episode has used all its calls or tokens; 0: no limit."""
        if max_calls and self.calls >= max_calls:
            raise RefusedError(
                f"the episode has made its {count_of(max_calls, 'call')}", status=403, code="episode_calls_exhausted"
            )
        if max_tokens and self.sampled_tokens >= max_tokens:
            raise RefusedError(
                f"the episode has sampled its {count_of(max_tokens, 'token')}",
                status=403,
                code="episode_tokens_exhausted",
            )
        self.calls += 1

    def give_call_back(self) -> None:
        """Take a model call that failed through no fault of the agent out of the count."""
        self.calls -= 1

    def room(self, max_tokens: int, choices: int) -> int | None:
        """Return the tokens available for each of `choices` choices; None: no limit. Raises RefusedError if there are none."""
        if not max_tokens:
            return None
        room = (max_tokens - self.sampled_tokens - self.reserved_tokens) // choices
        if room >= 1:
            return room
        if self.reserved_tokens:
            raise RefusedError(
                f"open calls have reserved the rest of the episode's {max_tokens} tokens; try again when one of them has ended",
                status=429, code="episode_tokens_reserved",
            )  # fmt: skip
        left = max_tokens - self.sampled_tokens
        raise RefusedError(
            f"{left} of the episode's {max_tokens} tokens are left, for {count_of(choices, 'choice')}",
            status=403, code="episode_tokens_exhausted",
        )  # fmt: skip


class Reservation:
    """The tokens that an open call may still sample."""

    def __init__(self, budget: TokenBudget, choices: int, each: int) -> None:
        self._budget = budget
        self._each = each
        self._left = choices * each
        budget.reserved_tokens += self._left

    def sampled(self, count: int) -> None:
        """Record that a choice is complete, with `count` sampled tokens."""
        self._budget.sampled_tokens += count
        self._release(self._each)

    def end(self) -> None:
        """Release the reservation at the end of the call. Releasing it again does nothing."""
        self._release(self._left)

    def _release(self, count: int) -> None:
        self._budget.reserved_tokens -= count
        self._left -= count
