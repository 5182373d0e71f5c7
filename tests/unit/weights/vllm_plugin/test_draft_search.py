"""A draft continues the longest match of the newest tokens in any text."""

from __future__ import annotations

import numpy as np
import pytest

from swarmq.weights.format.conventions import LONGEST_MATCH
from swarmq.weights.vllm_plugin.draft_search import find_continuation

SIZE = 40


def draft(*texts, row=0, count=8):
    table, lengths = (
        np.zeros((len(texts), SIZE), dtype=np.int32),
        np.array([len(text) for text in texts], dtype=np.int32),
    )
    for at, text in enumerate(texts):
        table[at, : len(text)] = text
    return find_continuation(table, lengths, row, count)


def test_a_draft_continues_another_conversation():
    assert draft([9, 5, 6], [1, 5, 6, 7, 8]) == [7, 8]
    assert draft([9, 5, 6], [1, 5, 6, 7, 8], count=1) == [7]


def test_the_longest_match_wins_then_the_same_text_then_the_last_place():
    assert draft([5, 6, 1, 4, 5, 6], [4, 5, 6, 2]) == [2]
    assert draft([5, 6, 1, 4, 5, 6], [5, 6, 2])[0] == 1
    assert draft([9, 5, 6], [5, 6, 1, 5, 6, 2], [5, 6, 3, 5, 6, 4])[0] == 4


def test_a_match_counts_up_to_a_length():
    common = [*range(10, 10 + LONGEST_MATCH)]
    assert draft([2, *common], [2, *common, 30], [3, *common, 31]) == [31]


@pytest.mark.parametrize("texts", [([7, 5], [6, 5, 1]), ([5],), ([1, 2, 3], []), ([5, 6], [5, 6])])
def test_without_a_match_that_is_followed_nothing_is_drafted(texts):
    assert draft(*texts) == []


def test_what_is_left_of_a_former_text_is_not_read():
    table = np.array([[5, 6, 0, 0], [5, 6, 7, 8]], dtype=np.int32)
    assert find_continuation(table, np.array([2, 2]), 0, 3) == []
    assert find_continuation(table, np.array([2, 3]), 0, 3) == [7]


def test_no_draft_goes_beyond_the_longest_text():
    table = np.tile(np.array([1, 2], dtype=np.int32), (1, SIZE // 2))
    assert find_continuation(table, np.array([SIZE - 1]), 0, 8) == [2]
    assert find_continuation(table, np.array([SIZE]), 0, 8) == []
