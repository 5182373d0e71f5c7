"""How many tokens are drafted in a step, chosen by measurement; none is one of the choices.

What a draft costs and saves depends on text, model, GPU and the number of requests in a step. So each of `DRAFT_COUNTS` is tried
for some steps, what sampled most tokens per second is kept, and the others are tried again after ever longer times.
"""

from __future__ import annotations

from statistics import median

from swarmq.weights.format.conventions import DRAFT_COUNTS

WINDOW = 48
"""Number of steps of which a rate is the mean."""
SETTLING = 3
"""Number of steps after a change that are not measured: those in flight were drafted before it."""
SHORTEST_STAY, LONGEST_STAY = 8, 64
"""Windows until the other counts are tried again, at first and at most."""
MARGIN = 1.03
"""Ratio of rates from which another count is better."""
WAITED = 5.0
"""Multiple of the median above which a step waited for something else, such as a push of weights."""


class DraftCounts:
    """The number of tokens to draft, by the number of requests in a step; vLLM indexes it as a list.

    Steps of alike sizes (1, 2 to 3, 4 to 7 requests, and so on) share a choice.
    """

    def __init__(self) -> None:
        self._choices: dict[int, Choice] = {}
        self._count = 0
        self._since: float | None = None

    def __getitem__(self, requests: int) -> int:
        return self._find(requests).count

    def observe(self, *, requests: int, sampled: int, count_after: int, idle_after: bool, now: float) -> None:
        """Take note of a computed step.

        `count_after`: what was chosen when the step was scheduled, the number of drafts of the step after it. `idle_after`:
        whether no request is left, so that the next step begins when one comes. `now`: seconds of any clock.
        """
        count, self._count = self._count, count_after
        since, self._since = self._since, None if idle_after else now
        if requests and since is not None:
            self._find(requests).observe(count, sampled / requests, now - since)

    def _find(self, requests: int) -> Choice:
        return self._choices.setdefault(requests.bit_length(), Choice())


class Choice:
    """The count of steps of alike sizes: all counts are tried in turn, then the best stays."""

    def __init__(self) -> None:
        self.count = self._best = DRAFT_COUNTS[0]
        self._rates: dict[int, float] = {}
        self._untried = list(DRAFT_COUNTS[1:])
        self._stay = SHORTEST_STAY
        self._windows_left = 0
        self._begin_window()

    def observe(self, count: int, tokens_per_request: float, took_s: float) -> None:
        """Take note of a step that had `count` drafts for each request."""
        if count != self.count:
            return
        if self._settling:
            self._settling -= 1
            return
        self._tokens.append(tokens_per_request)
        self._seconds.append(took_s)
        if len(self._seconds) == WINDOW:
            longest_s = WAITED * median(self._seconds)
            kept = [pair for pair in zip(self._tokens, self._seconds, strict=True) if pair[1] <= longest_s]
            self._rates[self.count] = sum(tokens for tokens, _ in kept) / sum(seconds for _, seconds in kept)
            self._end_window()

    def _begin_window(self, settling: int = SETTLING) -> None:
        self._settling = settling
        self._tokens: list[float] = []
        self._seconds: list[float] = []

    def _end_window(self) -> None:
        if self._windows_left > 1:
            self._windows_left -= 1
            return self._begin_window(settling=0)
        if self._windows_left == 1:
            self._windows_left = 0
            self._untried = [count for count in DRAFT_COUNTS if count != self.count]
        if self._untried:
            self.count = self._untried.pop(0)
        else:
            self._stay_with_best()
        return self._begin_window()

    def _stay_with_best(self) -> None:
        """Stay longer than last time if the best count is still the same."""
        best = max(self._rates, key=self._rates.__getitem__)
        if self._rates[best] < MARGIN * self._rates[self._best]:
            best = self._best
        self._stay = min(2 * self._stay, LONGEST_STAY) if best == self._best else SHORTEST_STAY
        self.count, self._best, self._windows_left = best, best, self._stay
