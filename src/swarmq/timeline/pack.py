"""Pack items of known lengths into bins of a token budget."""

from __future__ import annotations

from collections.abc import Sequence

from swarmq.errors import TimelineError


class Bins:
    """Bins that hold at most `budget` tokens each. Every item goes into the first bin that has room for it, found in
    logarithmic time by a tree of free room."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.items: list[list[int]] = []
        """Bin -> its items."""
        self._leaves = 1
        self._room = [0, 0]
        """Tree node -> largest free room of a bin below it. Node n has children 2n and 2n + 1; the second half of the list are
        the bins, used ones first."""

    def add(self, items: Sequence[int], size: int, opening: int = 0) -> None:
        """Put `items`, which take `size` tokens in total, into one bin. If the bin is new, it also holds `opening` tokens of its
        own."""
        if self._room[1] < size:
            self._open(self.budget - opening)
        at = 1
        while at < self._leaves:
            at = 2 * at if self._room[2 * at] >= size else 2 * at + 1
        self.items[at - self._leaves].extend(items)
        self._set(at, self._room[at] - size)

    def get_size(self, number: int) -> int:
        """Return the number of tokens in the bin with index `number`, with its opening tokens."""
        return self.budget - self._room[self._leaves + number]

    def _open(self, room: int) -> None:
        if len(self.items) == self._leaves:
            rooms, self._leaves = self._room[self._leaves :], 2 * self._leaves
            self._room = [0] * (2 * self._leaves)
            for number, left in enumerate(rooms):
                self._set(self._leaves + number, left)
        self._set(self._leaves + len(self.items), room)
        self.items.append([])

    def _set(self, at: int, room: int) -> None:
        self._room[at] = room
        while at > 1:
            at //= 2
            self._room[at] = max(self._room[2 * at], self._room[2 * at + 1])


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Return bins of item indices, none over `budget` tokens: first-fit decreasing, at most 11/9 of the fewest bins, in O(n log
    n).

    Raises TimelineError (`over_budget`) for an item that fits no bin.
    """
    if lengths and max(lengths) > budget:
        worst = max(range(len(lengths)), key=lengths.__getitem__)
        raise make_over_budget_error(worst, lengths[worst], budget)
    bins = Bins(budget)
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        bins.add([item], lengths[item])
    return bins.items


def make_over_budget_error(item: int, length: int, budget: int) -> TimelineError:
    return TimelineError(
        "over_budget",
        f"sequence {item} has {length} tokens, over the budget of {budget}: raise train.micro_batch_tokens, "
        "or shorten episodes (engine.max_model_len)",
    )
