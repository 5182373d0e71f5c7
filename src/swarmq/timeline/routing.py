"""Lets tokens with recorded experts be shared only where the experts are equal, too.

Two turns may have the same first tokens and yet other experts: routing depends on rounding, and so on the batch in which an engine
computed a token, and on its weights. A shared token is computed once, with one routing, so sharing it would train one of the turns
in another context than the one in which it was sampled. Therefore each pair of a token and its experts gets a number, and tries,
trees and layouts work on these numbers as if they were token ids, until `restore` puts tokens and experts back. So branches
part where their experts differ, which costs time and never changes a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import msgspec
import numpy as np

from swarmq.errors import TimelineError
from swarmq.timeline.layout import Layout
from swarmq.timeline.turns import IntArray, ResolvedTurn, RoutingArray

ID_BYTES = 4


class RoutedTokens:
    """Numbers for all pairs of a token and its experts in some episodes."""

    def __init__(self, size: int) -> None:
        """`size`: bytes of a token's experts."""
        self._size = size
        self._numbers: dict[bytes, int] = {}
        """Token id and experts -> number."""

    def number(self, turns: Sequence[ResolvedTurn]) -> list[ResolvedTurn]:
        """Return the turns of an episode with numbers instead of token ids. Raises TimelineError (`routing_missing`) for a turn without
        experts, or with experts of another size than before."""
        numbered: list[ResolvedTurn] = []
        for i, turn in enumerate(turns):
            # the last shared token has the experts of this turn, which may differ from the parent's
            known = max(turn.shared - 1, 0) if 0 <= turn.parent < i else 0
            numbers = np.empty(len(turn), np.int32)
            if known:
                numbers[:known] = numbered[turn.parent].token_ids[:known]
            numbers[known:] = self._number_tokens(turn, known)
            numbered.append(msgspec.structs.replace(turn, token_ids=numbers, routing=None, shared=known))
        return numbered

    def _number_tokens(self, turn: ResolvedTurn, start: int) -> list[int]:
        if turn.routing is None or turn.routing.shape[1] != self._size:
            raise TimelineError(
                "routing_missing", "a batch has turns without experts, or with other numbers of experts for each token"
            )
        tokens = turn.token_ids[start:].astype("<i4").view(np.uint8).reshape(-1, ID_BYTES)
        pairs = np.concatenate([tokens, turn.routing[start:]], axis=1)
        raw, width = pairs.tobytes(), pairs.shape[1]
        numbers = self._numbers
        return [numbers.setdefault(raw[at : at + width], len(numbers)) for at in range(0, len(raw), width)]

    @cached_property
    def _pairs(self) -> RoutingArray:
        """Number -> token id and experts."""
        return np.frombuffer(b"".join(self._numbers), np.uint8).reshape(-1, ID_BYTES + self._size)

    def restore(self, layout: Layout) -> Layout:
        """Return the layout with token ids instead of numbers, and with the experts of its tokens."""
        pairs = self._pairs[layout.token_ids]
        return msgspec.structs.replace(
            layout,
            token_ids=_read_ids(pairs),
            targets=_read_ids(self._pairs[layout.targets]),
            routing=np.ascontiguousarray(pairs[:, ID_BYTES:]),
        )


def _read_ids(pairs: RoutingArray) -> IntArray:
    ids: IntArray = np.ascontiguousarray(pairs[:, :ID_BYTES]).view("<i4")[:, 0].astype(np.int32)
    return ids
