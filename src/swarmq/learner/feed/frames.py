"""Messages between trainer and batch feeder, as msgpack in frames. The trainer's side blocks, the feeder's side uses asyncio."""

from __future__ import annotations

import asyncio
import socket

import msgspec

from swarmq.learner.store.records import ToIO, ToTrainer
from swarmq.runtime.frames import LENGTH, read_frame, write_frame

_encoder = msgspec.msgpack.Encoder()
_to_trainer: msgspec.msgpack.Decoder[ToTrainer] = msgspec.msgpack.Decoder(ToTrainer)
_to_io: msgspec.msgpack.Decoder[ToIO] = msgspec.msgpack.Decoder(ToIO)


def send(sock: socket.socket, message: ToIO) -> None:
    """Send a message to the batch feeder. Raises OSError if the feeder is gone."""
    body = _encoder.encode(message)
    sock.sendall(LENGTH.pack(len(body)) + body)


def receive(sock: socket.socket) -> ToTrainer:
    """Receive a message from the batch feeder. Raises EOFError if the feeder is gone."""
    (size,) = LENGTH.unpack(_exactly(sock, LENGTH.size))
    return _to_trainer.decode(_exactly(sock, size))


async def write(writer: asyncio.StreamWriter, message: ToTrainer) -> None:
    """Write a message to the trainer. Raises EOFError if the trainer is gone."""
    await write_frame(writer, _encoder.encode(message))


async def read(reader: asyncio.StreamReader) -> ToIO:
    """Read a message from the trainer. Raises EOFError if the trainer is gone."""
    return _to_io.decode(await read_frame(reader))


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        try:
            part = sock.recv(min(size - len(data), 1 << 20))
        except ConnectionError as error:
            raise EOFError("the batch feeder is gone") from error
        if not part:
            raise EOFError("the batch feeder is gone")
        data += part
    return bytes(data)
