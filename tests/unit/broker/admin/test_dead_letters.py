"""How a dead letter is shown."""

from __future__ import annotations

import msgspec
import pytest

from swarmq.broker.admin.dead_letters import DeadLetter, format_letter
from swarmq.broker.message_batches import pack
from swarmq.messages import EpisodeEnd, PackedMessage, Turn, encode


def letter(body: bytes) -> DeadLetter:
    return DeadLetter(id="1", key="e:end", kind="end", queue="swarmq.r.in", reason="too odd", body=body, headers={})


@pytest.mark.parametrize("body", [b"\xff\xfe garbage", b"\x91" * 100_000, b""], ids=["garbage", "deep", "empty"])
def test_a_letter_that_is_no_record_is_shown_as_bytes(body: bytes) -> None:
    assert f"{len(body)} bytes that cannot be decoded" in format_letter(letter(body))


def test_a_letter_is_shown_as_its_record() -> None:
    text = format_letter(letter(encode(EpisodeEnd(run="r", episode_id="e7", status="finished", rewards={"main": 0.5}))))
    for words in ("queue: swarmq.r.in", "reason: too odd", '"episode_id": "e7"', '"main": 0.5'):
        assert words in text


def test_a_batch_is_shown_with_its_records() -> None:
    ends = [EpisodeEnd(run="r", episode_id=f"e{n}", status="failed") for n in range(2)]
    batch = pack("r", [PackedMessage("end", f"e{n}:end", encode(end)) for n, end in enumerate(ends)])
    text = format_letter(msgspec.structs.replace(letter(batch.body), kind=batch.kind, key=batch.key))
    for words in ("key: e0:end+1", "kind: batch", '"episode_id": "e0"', '"episode_id": "e1"'):
        assert words in text


def test_packed_tokens_do_not_hinder_showing() -> None:
    turn = Turn(
        run="r", episode_id="e", policy="p", call_id="c", request_id="q", prompt_ids=b"", sampled_ids=b"", logprobs=b""
    )
    assert '"call_id": "c"' in format_letter(letter(encode(turn)))
