"""What the loop's random model says can be sent back to it without growing."""

import random

import pytest
from benchmarks.loop.model import make_tokenizer


@pytest.mark.parametrize("size", [2048, 40_000])
def test_random_ids_are_spelled_and_read_again_in_about_as_many_tokens(size):
    tokenizer = make_tokenizer(size)
    assert len(tokenizer) == size
    ids = random.Random(0).choices(range(300, size), k=2000)
    again = tokenizer(tokenizer.decode(ids), add_special_tokens=False).input_ids
    assert len(again) < 1.7 * len(ids)
    assert tokenizer.decode(again) == tokenizer.decode(ids)
