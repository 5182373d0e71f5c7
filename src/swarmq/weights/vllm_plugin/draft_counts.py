"""How many tokens are drafted in a step, chosen by measurement; none is one of the choices.

What a draft costs and saves depends on text, model, GPU and the number of requests in a step. So each of `DRAFT_COUNTS` is tried
for some steps, what sampled most tokens per second is kept, and the others are tried again later, so that trials take a thirtieth of the time.
"""

from __future__ import annotations

from statistics import median

from swarmq.weights.format.conventions import DRAFT_COUNTS

WINDOW = 48
"""Number of steps of which a rate is the mean."""
FEWEST = 4
"""Number of steps after which a trial may end sooner."""
SETTLING = 3
"""Number of steps after a change that are not measured: those in flight were drafted before it."""
STAY = 30
"""Multiple of the time of trials for which the best count stays."""
MARGIN = 1.03
"""Ratio of rates from which another count is better."""
SMOOTHED = 16
"""Number of steps over which the number of requests is averaged."""
BEYOND = 0.125
"""Share of a bound by which the mean must be beyond it."""
WAITED = 5.0
"""Multiple of the median above which a step waited for something else, such as a push of weights."""


class DraftCounts:
    """The number of tokens to draft; vLLM indexes it, as a list, by the number of requests in a step.

    Each class of sizes (1, 2 to 3, 4 to 7 requests, and so on) has a choice of its own. The class follows the mean of the last steps, and
    changes where that is well beyond its bound: a step has the drafts that were chosen in the step before, so classes must not alternate.
    """

    def __init__(self) -> None:
        self._choices: dict[int, Choice] = {}
        self._class: int | None = None
        self._mean = 0.0
        self._count = 0
        self._since: float | None = None

    def __getitem__(self, requests: int) -> int:
        return self._find(requests.bit_length() if self._class is None else self._class).count

    def observe(self, *, requests: int, sampled: int, count_after: int, idle_after: bool, now: float) -> None:
        """Take note of a computed step.

        `count_after`: what was chosen when the step was scheduled, the number of drafts of the step after it. `idle_after`:
        whether no request is left, so that the next step begins when one comes. `now`: seconds of any clock.
        """
        count, self._count = self._count, count_after
        since, self._since = self._since, None if idle_after else now
        if not requests:
            return
        self._follow(requests)
        if since is not None and self._class is not None:
            self._find(self._class).observe(count, sampled / requests, now - since)

    def _follow(self, requests: int) -> None:
        if self._class is None:
            self._class, self._mean = requests.bit_length(), requests
        self._mean += (requests - self._mean) / SMOOTHED
        lowest, highest = (1 << self._class - 1) - 0.5, (1 << self._class) - 0.5
        if not lowest * (1 - BEYOND) <= self._mean <= highest * (1 + BEYOND):
            self._class = round(self._mean).bit_length()

    def _find(self, size_class: int) -> Choice:
        return self._choices.setdefault(size_class, Choice())


class Choice:
    """The count of a class of sizes: all counts are tried in turn, then the best stays."""

    def __init__(self) -> None:
        self.count = self._best = DRAFT_COUNTS[0]
        self._rates: dict[int, float] = {}
        self._untried = list(DRAFT_COUNTS[1:])
        self._tried_s = self._left_s = self._window_s = 0.0
        self._begin_window()

    def observe(self, count: int, tokens_per_request: float, took_s: float) -> None:
        """Take note of a step that had `count` drafts for each request."""
        if count != self.count:
            return
        if self._settling:
            self._settling -= 1
            return
        self._steps.append((tokens_per_request, took_s))
        if len(self._steps) == WINDOW or self._is_hopeless():
            self._end_window()

    def _begin_window(self, settling: int = SETTLING) -> None:
        self._settling = settling
        self._steps: list[tuple[float, float]] = []

    def _measure(self) -> tuple[float, float]:
        """Return tokens per second, and seconds, of the window's steps that waited for nothing."""
        longest_s = WAITED * median(took_s for _, took_s in self._steps)
        kept = [step for step in self._steps if step[1] <= longest_s]
        took_s = sum(took_s for _, took_s in kept)
        return sum(tokens for tokens, _ in kept) / took_s, took_s

    def _is_hopeless(self) -> bool:
        """Return whether a trial has taken as long as a whole window of the best count, and samples less."""
        if self.count == self._best or self._best not in self._rates or len(self._steps) < FEWEST:
            return False
        rate, took_s = self._measure()
        return took_s > self._window_s and rate < self._rates[self._best]

    def _end_window(self) -> None:
        self._rates[self.count], took_s = self._measure()
        if self.count == self._best:
            self._window_s = took_s
        if self._left_s > 0:
            self._left_s -= took_s
            if self._left_s > 0:
                return self._begin_window(settling=0)
            self._tried_s = 0.0
            self._untried = [count for count in DRAFT_COUNTS if count != self.count]
        else:
            self._tried_s += took_s
        if self._untried:
            self.count = self._untried.pop(0)
        else:
            self._stay_with_best()
        return self._begin_window()

    def _stay_with_best(self) -> None:
        best = max(self._rates, key=self._rates.__getitem__)
        if self._rates[best] > MARGIN * self._rates[self._best]:
            self._best = best
        self.count, self._left_s = self._best, STAY * self._tried_s
