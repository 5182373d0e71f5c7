"""Detection of near-duplicate texts: those that share most of their runs of three words. It does not compare every pair. Pure."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict

RUN = 3
"""Words in a run."""
SIMILAR = 0.7
"""Minimum share of runs of words in common (Jaccard index) at which two texts are duplicates."""
_WORD = re.compile(r"\w+")


class Seen:
    """The texts that were accepted so far, to which a new text is compared."""

    def __init__(self) -> None:
        self._runs: list[frozenset[tuple[str, ...]]] = []
        self._names: list[str] = []
        self._with_run: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)

    def add(self, name: str, text: str) -> str | None:
        """Return the name of an accepted text that this one duplicates; without one, accept it and return None."""
        runs = _runs(text)
        shared = Counter(other for run in runs for other in self._with_run.get(run, ()))
        for other, number in shared.most_common():
            if number / (len(runs) + len(self._runs[other]) - number) >= SIMILAR:
                return self._names[other]
        for run in runs:
            self._with_run[run].append(len(self._runs))
        self._runs.append(runs)
        self._names.append(name)
        return None


def _runs(text: str) -> frozenset[tuple[str, ...]]:
    words = _WORD.findall(unicodedata.normalize("NFKC", text).casefold())
    if len(words) < RUN:
        return frozenset({tuple(words)})
    return frozenset(tuple(words[i : i + RUN]) for i in range(len(words) - RUN + 1))
