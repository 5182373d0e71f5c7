"""Reading, requeueing and purging of the dead-letter queue: `swarmq dead`.

Letters are read with `basic.get` and only those requeued or purged are acknowledged. The rest returns to the queue when the session
closes, so listing loses nothing; two concurrent readers each see only part of the letters. A process of the run parks the messages of a
batch one by one; a batch that RabbitMQ has parked is one letter.

The origin of a letter is taken from what RabbitMQ or a process of the run has written, except for letters that clients of older
versions parked themselves:

| exchange of the letter | parked by                                  | queue from       | sender from                       |
|---|---|---|---|
| swarmq.dead            | RabbitMQ: rejected, or delivered too often | its x-death      | its routing key, or our header    |
| the default exchange   | a process of the run                       | our header       | our header                        |
| swarmq.clients         | a client, which older versions allowed     | its headers      | its routing key                   |
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Collection, Container
from typing import Any

import msgspec
from aio_pika.abc import AbstractIncomingMessage
from aio_pika.exceptions import PublishError

from swarmq.broker import topology
from swarmq.broker.deliveries import KEY_HEADER, QUEUE_HEADER, REASON_HEADER, SENDER_HEADER
from swarmq.broker.message_batches import KIND as BATCH
from swarmq.broker.publisher import send_once
from swarmq.broker.session import Session, open_session
from swarmq.errors import BrokerError, MessageError
from swarmq.messages import decode, decode_batch

LIST_LIMIT = 1000
SHOWN_BYTES = 400
"""Maximum number of bytes to show of an undecodable body."""

CONNECTION = "swarmq.dead"


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """A message in the dead-letter queue."""

    id: str
    """Unique message id, by which the functions of this module find the letter."""
    key: str
    kind: str
    queue: str
    """Queue that the message was meant for; empty if unknown."""
    reason: str
    body: bytes
    headers: dict[str, Any]
    sender: str = ""
    """User of the invited client that sent the message (`<run>.<client>`), verified by RabbitMQ; empty for a process of the run
    itself."""


class RequeueResult(msgspec.Struct, frozen=True, kw_only=True):
    """How many letters were requeued, and which were not."""

    sent: int
    left: dict[str, str]
    """Letters that stay in the dead-letter queue: id -> reason."""


async def find_letter(url: str, wanted: str) -> DeadLetter:
    """Return the dead letter with the id `wanted`. Raises BrokerError if there is none."""
    found = {letter.id: letter for letter in await list_letters(url)}
    _require_ids([wanted], found)
    return found[wanted]


async def list_letters(url: str, *, limit: int = LIST_LIMIT) -> list[DeadLetter]:
    """Return the oldest dead letters. Raises UnroutableError on a broker where no run was ever started."""
    async with open_session(url, name=CONNECTION) as session:
        return [letter async for letter, _ in _read_letters(session, limit=limit)]


def format_letter(letter: DeadLetter) -> str:
    """Format a letter as text: its record as JSON, or the first bytes of an undecodable body."""
    try:
        record = _read_record(letter.kind, letter.body)
        content = json.dumps(msgspec.to_builtins(record, str_keys=True, enc_hook=str), indent=2)
    except (msgspec.MsgspecError, MessageError, RecursionError, UnicodeDecodeError):
        content = f"{len(letter.body)} bytes that cannot be decoded: {letter.body[:SHOWN_BYTES]!r}"
    head = {name: getattr(letter, name) for name in ("id", "key", "kind", "queue", "sender", "reason")}
    return "\n".join([*(f"{name}: {value}" for name, value in head.items()), content])


def _read_record(kind: str, body: bytes) -> Any:
    record = msgspec.msgpack.decode(body)
    if kind == BATCH:
        record["messages"] = [_read_record(one.kind, one.body) for one in decode_batch(body).messages]
    return record


async def requeue_letters(url: str, ids: Collection[str] | None = None) -> RequeueResult:
    """Send letters back to their queues; None means all. Each letter is removed only after its queue has confirmed it.

    Letters of an invited client keep their sender and are checked again like new messages. Raises BrokerError if an id is
    unknown, before anything is sent.
    """
    sent, left = 0, {}
    async with open_session(url, name=CONNECTION) as session:
        chosen = [
            (letter, message) async for letter, message in _read_letters(session) if ids is None or letter.id in ids
        ]
        _require_ids(ids or (), [letter.id for letter, _ in chosen])
        for letter, message in chosen:
            reason = await _send_back(session, letter)
            if reason is None:
                await session.call(message.ack())
                sent += 1
            else:
                left[letter.id] = reason
    return RequeueResult(sent=sent, left=left)


async def purge_letters(url: str, ids: Collection[str] | None = None) -> int:
    """Delete letters and return how many; None means all. Raises BrokerError if an id is unknown, before anything is deleted."""
    async with open_session(url, name=CONNECTION) as session:
        if ids is None:
            queue = await session.channel.get_queue(topology.DEAD, ensure=False)
            answer = await session.call(queue.purge())
            return int(answer.message_count or 0)
        chosen = [(letter.id, message) async for letter, message in _read_letters(session) if letter.id in ids]
        _require_ids(ids, [name for name, _ in chosen])
        for _, message in chosen:
            await session.call(message.ack())
        return len(chosen)


def _require_ids(ids: Collection[str], found: Container[str]) -> None:
    if missing := [one for one in ids if one not in found]:
        raise BrokerError(f"no dead letter has the id {missing[0]!r}: `swarmq dead list` shows them")


async def _read_letters(
    session: Session, *, limit: int | None = None
) -> AsyncIterator[tuple[DeadLetter, AbstractIncomingMessage]]:
    queue = await session.channel.get_queue(topology.DEAD, ensure=False)
    count = 0
    while limit is None or count < limit:
        message = await session.call(queue.get(fail=False, timeout=None))
        if message is None:
            return
        count += 1
        yield _parse_letter(message), message


def _parse_letter(message: AbstractIncomingMessage) -> DeadLetter:
    headers, key = message.headers, message.routing_key or ""
    queue, sender = str(headers.get(QUEUE_HEADER, "")), str(headers.get(SENDER_HEADER, ""))
    reason = str(headers.get(REASON_HEADER, "no reason given"))
    if message.exchange == topology.DEAD:
        deaths: Any = headers.get("x-death")
        death = deaths[0] if deaths else {}  # newest first
        queue, reason = str(death.get("queue", "")), _describe_death(str(death.get("reason", "")), message.body)
        if key != queue:  # operators publish by queue name, so this is a client's routing key
            sender = topology.parse_sender(key)
    elif message.exchange == topology.CLIENTS:
        sender = topology.parse_sender(key)
        reason = f"parked by {sender} with the reason: {reason}"
    return DeadLetter(
        id=message.message_id or "",
        key=str(headers.get(KEY_HEADER, "")),
        kind=message.type or "",
        queue=queue,
        reason=reason,
        body=message.body,
        headers=headers,
        sender=sender,
    )


def _describe_death(reason: str, body: bytes) -> str:
    if reason == "delivery_limit":
        return f"delivered more than {topology.DELIVERY_LIMIT} times without an acknowledgement"
    if reason != "rejected":
        return f"dead-lettered by the broker: {reason or 'no reason given'}"
    try:
        decode(body)
    except MessageError as error:
        return f"refused by a client: {error}"
    return "refused by a client: the reason is in the client's log and in the episode of this slot"


async def _send_back(session: Session, letter: DeadLetter) -> str | None:
    """Publish a letter to its queue. Return None when it is confirmed, else the reason why not."""
    queue = topology.client_destination(letter.sender, letter.queue) if letter.sender else letter.queue
    if not queue:
        return f"client {letter.sender} may not send to {letter.queue!r}" if letter.sender else "its queue is unknown"
    headers = {KEY_HEADER: letter.key} | ({SENDER_HEADER: letter.sender} if letter.sender else {})
    try:
        await session.call(send_once(session, queue, letter.body, kind=letter.kind, headers=headers))
    except PublishError:
        return f"queue {queue} does not exist"
    return None
