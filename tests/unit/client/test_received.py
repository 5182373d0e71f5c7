"""Where a streamed answer is complete, wherever the wire cuts it."""

from __future__ import annotations

import itertools

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from swarmq.client.received import Received, _Stream

HOST = "http://h:1/v1"


def seen():
    received = Received(HOST)
    assert received.watches(HOST)
    return received


def chunk(index, text=None, finish=None):
    delta = {} if text is None else {"content": text}
    body = {"choices": [{"index": index, "delta": delta, "finish_reason": finish}]}
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


@given(st.lists(st.integers(0, 400)), st.integers(1, 3), st.text())
def test_a_stream_is_received_when_all_of_its_choices_have_ended(cuts, num, text):
    calls = tuple(f"c{n}" for n in range(num))
    received = seen()
    stream = _Stream(received, calls)
    said = '"finish_reason":"stop","type":"message_delta"' + text
    whole = b"".join(chunk(n, said) for n in calls) + b"".join(chunk(n, finish="stop") for n in calls)
    edges = sorted({0, len(whole) - 1, *(cut % len(whole) for cut in cuts)})
    for start, stop in itertools.pairwise(edges):
        stream.take(whole[start:stop])
        is_over = stop > whole.rindex(b"finish_reason") + len(b'finish_reason":"')
        assert received.calls() == (calls if is_over else ())
    stream.take(whole[-1:] + b"data: [DONE]\n\n")
    assert received.calls() == calls


def test_a_stream_that_breaks_after_its_end_is_not_received():
    received = seen()
    stream = _Stream(received, ("c",))
    stream.take(chunk(0, finish="stop"))
    stream.fail()
    assert received.calls() == ()


def test_what_was_not_watched_is_not_known():
    assert Received(HOST).calls() is None
