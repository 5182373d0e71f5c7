"""When messages share a message of the broker, and who hears of its fate."""

from __future__ import annotations

import asyncio

import pytest

from swarmq.broker.message_batches import KIND, MAX_BYTES, MAX_IN_FLIGHT, MAX_MESSAGES, BatchingPublisher
from swarmq.errors import UnroutableError
from swarmq.messages import PackedMessage, decode_batch


class Wire:
    """A broker that confirms on demand."""

    def __init__(self) -> None:
        self.sent: list[list[str]] = []
        """Keys of the messages of each attempt."""
        self.answers: list[asyncio.Future[bool]] = []

    async def attempt(self, message: PackedMessage) -> bool:
        parts = decode_batch(message.body).messages if message.kind == KIND else (message,)
        self.sent.append([part.key for part in parts])
        self.answers.append(answer := asyncio.get_running_loop().create_future())
        return await answer


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
async def publisher(wire: Wire) -> BatchingPublisher:
    return BatchingPublisher("r", wire.attempt)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def publish(publisher: BatchingPublisher, *keys: str, size: int = 1) -> list[asyncio.Task[None]]:
    return [asyncio.ensure_future(publisher.publish(PackedMessage("end", key, b"x" * size))) for key in keys]


async def test_a_message_goes_out_at_once_and_those_after_it_together_when_it_is_confirmed(
    publisher: BatchingPublisher, wire: Wire
) -> None:
    published = publish(publisher, "a", "b", "c")
    await settle()
    assert wire.sent == [["a"]]
    wire.answers[0].set_result(True)
    await settle()
    assert wire.sent == [["a"], ["b", "c"]]
    assert [one.done() for one in published] == [True, False, False]
    wire.answers[1].set_result(True)
    await asyncio.gather(*published)


@pytest.mark.parametrize(
    ("size", "batch"), [(1, MAX_MESSAGES), (MAX_BYTES // 4, 4), (MAX_BYTES // 4 + 1, 3), (2 * MAX_BYTES, 1)]
)
async def test_full_batches_do_not_wait_and_their_number_is_limited(
    publisher: BatchingPublisher, wire: Wire, size: int, batch: int
) -> None:
    keys = [str(number) for number in range(2 * MAX_IN_FLIGHT * batch)]
    tasks = publish(publisher, *keys, size=size)
    await settle()
    assert len(wire.sent) == MAX_IN_FLIGHT
    assert {len(one) for one in wire.sent[1:]} == {batch}
    assert [key for one in wire.sent for key in one] == keys[: 1 + (MAX_IN_FLIGHT - 1) * batch]
    publisher.close()
    for task in tasks:
        task.cancel()


async def test_a_batch_is_sent_again_without_the_messages_that_nobody_waits_for(
    publisher: BatchingPublisher, wire: Wire
) -> None:
    first, *others = publish(publisher, "a", "b", "c", "d")
    await settle()
    others[0].cancel()
    wire.answers[0].set_result(True)
    await first
    await settle()
    assert wire.sent[1:] == [["c", "d"]]
    others[1].cancel()
    await settle()
    wire.answers[1].set_result(False)
    await settle()
    assert wire.sent[2:] == [["d"]]
    wire.answers[2].set_result(True)
    await others[2]


async def test_nothing_is_sent_again_when_nobody_waits(publisher: BatchingPublisher, wire: Wire) -> None:
    [only] = publish(publisher, "a")
    await settle()
    only.cancel()
    await settle()
    wire.answers[0].set_result(False)
    await settle()
    assert wire.sent == [["a"]]


async def test_a_refusal_is_raised_to_every_publisher_of_the_batch_and_the_next_goes_out(
    publisher: BatchingPublisher, wire: Wire
) -> None:
    first, *others = publish(publisher, "a", "b", "c")
    await settle()
    wire.answers[0].set_result(True)
    await first
    await settle()
    wire.answers[1].set_exception(UnroutableError("no queue"))
    for one in others:
        with pytest.raises(UnroutableError, match="no queue"):
            await one
    [last] = publish(publisher, "d")
    await settle()
    wire.answers[2].set_result(True)
    await last
