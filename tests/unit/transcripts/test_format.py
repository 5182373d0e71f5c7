"""Frames and segments: what was packed is read back, and damage costs only what it hit."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from support.transcripts import frame_of, make_transcript
from swarmq.transcripts.format import (
    SEGMENT,
    decode_meta,
    pack_frame,
    pack_segment_header,
    read_segment_header,
    walk,
)

EPISODES = [make_transcript(f"e{number}") for number in range(4)]
FRAMES = [frame_of(one) for one in EPISODES]
SEGMENT_OF_FOUR = b"".join([pack_segment_header(3), *FRAMES])


def names(data: bytes) -> list[str]:
    metas = (decode_meta(frame) for frame in walk(io.BytesIO(data)))
    return [meta.episode_id for meta in metas if meta]


def test_a_segment_names_its_generation():
    assert read_segment_header(io.BytesIO(SEGMENT_OF_FOUR)) == 3


@pytest.mark.parametrize("data", [b"", b"SQTRSEG\n", b"x" * 64, pack_segment_header(0)[:-1] + b"\xff"])
def test_another_file_is_no_segment(data):
    assert read_segment_header(io.BytesIO(data)) is None


def test_frames_come_back_in_order_with_their_numbers():
    frames = list(walk(io.BytesIO(SEGMENT_OF_FOUR)))
    assert names(SEGMENT_OF_FOUR) == ["e0", "e1", "e2", "e3"]
    assert [frame.number for frame in frames] == [0, 1, 2, 3]
    assert [frame.end for frame in frames] == [*(frame.offset for frame in frames[1:]), len(SEGMENT_OF_FOUR)]


def test_a_walk_begins_anywhere():
    third = list(walk(io.BytesIO(SEGMENT_OF_FOUR)))[2]
    assert next(walk(io.BytesIO(SEGMENT_OF_FOUR), offset=third.offset, number=2)) == third


@given(cut=st.integers(0, len(SEGMENT_OF_FOUR)))
def test_a_cut_anywhere_loses_the_frame_that_it_hit_and_those_after_it(cut):
    whole = [frame for frame in walk(io.BytesIO(SEGMENT_OF_FOUR)) if frame.end <= cut]
    with capture_logs() as logs:
        assert names(SEGMENT_OF_FOUR[:cut]) == [f"e{frame.number}" for frame in whole]
    assert not logs  # a writer may be at work


@given(at=st.integers(SEGMENT.size, len(SEGMENT_OF_FOUR) - len(FRAMES[3]) - 1), wrong=st.integers(1, 255))
def test_a_damaged_byte_loses_one_frame_and_keeps_the_numbers_of_the_others(at, wrong):
    hit = next(frame.number for frame in walk(io.BytesIO(SEGMENT_OF_FOUR)) if at < frame.end)
    damaged = bytearray(SEGMENT_OF_FOUR)
    damaged[at] ^= wrong
    with capture_logs():
        frames = list(walk(io.BytesIO(bytes(damaged))))
    found = {frame.number: meta.episode_id for frame in frames if (meta := decode_meta(frame))}
    others = {number: f"e{number}" for number in range(4) if number != hit}
    assert others.items() <= found.items()  # a damaged body leaves the meta
    assert all(name == f"e{number}" for number, name in found.items())


def test_a_frame_without_body_has_no_body_bytes():
    (frame,) = walk(io.BytesIO(pack_segment_header(0) + frame_of(EPISODES[0], with_body=False)))
    meta = decode_meta(frame)
    assert meta is not None
    assert meta.body_bytes == 0


def test_a_meta_of_another_shape_is_left_out():
    data = pack_segment_header(0) + pack_frame(b"\x81\xa1a\x01", b"") + FRAMES[1]
    assert names(data) == ["e1"]
