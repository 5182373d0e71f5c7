"""A chunk that was sent is the chunk that arrives, whatever its base; damage is noticed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmq.weights.format.chunks import WeightFileManifest, decode_chunk, encode_chunk


@st.composite
def pairs(draw):
    """A chunk and its base, equal but for some bytes; or a chunk alone."""
    chunk = np.frombuffer(draw(st.binary(min_size=1, max_size=600)), np.uint8)
    if draw(st.booleans()):
        return chunk, None
    base = chunk.copy()
    for place in draw(st.lists(st.integers(0, len(base) - 1), max_size=20)):
        base[place] = draw(st.integers(0, 255))
    return chunk, base


@given(pair=pairs(), word_bytes=st.sampled_from([2, 4]))
def test_a_chunk_arrives_as_it_was(pair, word_bytes):
    chunk, base = pair
    arrived = decode_chunk(encode_chunk(chunk, base, word_bytes), len(chunk), base, word_bytes)
    assert arrived.tobytes() == chunk.tobytes()


@given(pair=pairs(), junk=st.binary(max_size=40), at=st.integers(0, 600), word_bytes=st.sampled_from([2, 4]))
def test_damaged_bytes_give_another_chunk_or_an_error_and_never_a_longer_one(pair, junk, at, word_bytes):
    chunk, base = pair
    encoded = bytearray(encode_chunk(chunk, base, word_bytes))
    encoded[at : at + len(junk)] = junk
    try:
        arrived = decode_chunk(bytes(encoded), len(chunk), base, word_bytes)
    except ValueError:
        return
    assert len(arrived) == len(chunk)


def step(base, share: float):
    """Of `base`, as many weights changed by one in the last place as a small step changes."""
    draw = np.random.default_rng(0)
    return base + draw.choice(np.array([0, 1, -1]), len(base), p=[1 - share, share / 2, share / 2]).astype(np.uint16)


@pytest.mark.parametrize(("share", "most"), [(0.0, 1e-4), (0.02, 0.014), (0.25, 0.11)])
def test_the_difference_of_a_small_step_is_a_small_part_of_the_weights(share, most):
    base = np.random.default_rng(1).integers(0, 1 << 16, 1 << 20).astype(np.uint16)
    chunk = step(base, share)
    encoded = encode_chunk(chunk.view(np.uint8), base.view(np.uint8), 2)
    assert len(encoded) < most * chunk.nbytes


def test_a_file_has_the_name_of_its_content_alone():
    one, same, other = (
        WeightFileManifest(size_bytes=3, chunk_bytes=3, word_bytes=2, digests=["a" * 64], base=None),
        WeightFileManifest(size_bytes=3, chunk_bytes=3, word_bytes=2, digests=["a" * 64], base="before"),
        WeightFileManifest(size_bytes=3, chunk_bytes=3, word_bytes=2, digests=["b" * 64], base=None),
    )
    assert one.name == same.name != other.name
