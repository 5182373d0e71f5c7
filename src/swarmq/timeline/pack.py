"""Pack items of given lengths into bins of a token budget."""

from __future__ import annotations

from collections.abc import Sequence

from swarmq.errors import TimelineError


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Bins of item indices, none over `budget` tokens: first-fit decreasing, at most 11/9 of the fewest bins.

    Raises TimelineError (`over_budget`) for an item that fits no bin. Bins are found through a tree of the room
    left in them, so n items take n log n steps.
    """
    if lengths and max(lengths) > budget:
        worst = max(range(len(lengths)), key=lengths.__getitem__)
        raise over_budget(worst, lengths[worst], budget)
    leaves = 1 << max(len(lengths) - 1, 0).bit_length()
    room = [budget] * (2 * leaves)
    bins: list[list[int]] = []
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = 1
        while at < leaves:
            at = 2 * at if room[2 * at] >= lengths[item] else 2 * at + 1
        if at - leaves == len(bins):
            bins.append([])
        bins[at - leaves].append(item)
        room[at] -= lengths[item]
        while at > 1:
            at //= 2
            room[at] = max(room[2 * at], room[2 * at + 1])
    return bins


def over_budget(item: int, length: int, budget: int) -> TimelineError:
    return TimelineError(
        "over_budget",
        f"sequence {item} has {length} tokens, over the budget of {budget}: raise train.micro_batch_tokens, "
        "or shorten episodes (engine.max_model_len)",
    )
