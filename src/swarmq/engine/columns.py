"""Runs inside vLLM: log-probabilities go from the engine core to the API servers in columns.

vLLM sends three small arrays for each request in each step, which takes the core longer than all else that it sends. Every call
of an agent in training asks for log-probabilities, so here those of a step travel as three arrays for all requests together, in a
buffer behind the message, and the other side puts them back. `python -m benchmarks.columns` measures both ways.
"""

from __future__ import annotations

import functools
import logging
import math
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

MARK = b"swarmq/columns/1"
"""Begins our buffer. vLLM's own buffers are the bytes of arrays, found by their index and never by what they begin with."""

_log = logging.getLogger("vllm.swarmq")  # vLLM shows what is told below its own name


class Column(msgspec.Struct, array_like=True):
    """An array on its way."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, parts: Sequence[Any]) -> Column:
        """Arrays of one type that differ in their first dimension at most, one behind the other."""
        try:
            data = b"".join(parts)  # four times as fast as np.concatenate
        except TypeError:  # not contiguous
            data = b"".join(np.ascontiguousarray(part).data for part in parts)
        dtype, (_, *rest) = parts[0].dtype, parts[0].shape
        return cls(dtype.str, (len(data) // (dtype.itemsize * math.prod(rest)), *rest), data)

    def array(self) -> npt.NDArray[Any]:
        return np.frombuffer(self.data, dtype=self.dtype).reshape(self.shape)


class Columns(msgspec.Struct, array_like=True):
    """The log-probabilities of a message's outputs."""

    rows: list[int]
    """[outputs that have any] their places in the message."""
    lengths: list[int]
    """[outputs that have any] positions of each: one, unless the engine guesses tokens ahead."""
    token_ids: Column
    """[positions, candidates]"""
    logprobs: Column
    """[positions, candidates]"""
    ranks: Column
    """[positions]"""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Columns)


def register() -> None:
    """Have this process send and read columns. If its vLLM does not take them, it goes on as it was, and says so."""
    if hasattr(MsgpackEncoder.encode, "__wrapped__"):
        return
    stock = MsgpackEncoder.encode, MsgpackEncoder.encode_into, MsgpackDecoder.decode
    MsgpackEncoder.encode = _sending(MsgpackEncoder.encode)
    MsgpackEncoder.encode_into = _sending(MsgpackEncoder.encode_into)
    MsgpackDecoder.decode = _reading(MsgpackDecoder.decode)
    try:
        _rehearse()
    except Exception as error:
        MsgpackEncoder.encode, MsgpackEncoder.encode_into, MsgpackDecoder.decode = stock
        _log.warning("log-probabilities are sent one request at a time, which is slower, by this vLLM: %r", error)


def take_out(outputs: EngineCoreOutputs) -> bytes | None:
    """The log-probabilities of a step, which `outputs` is without then. None if it has none."""
    having = [(row, output) for row, output in enumerate(outputs.outputs) if output.new_logprobs is not None]
    if not having:
        return None
    token_ids, logprobs, ranks, _ = zip(*(output.new_logprobs for _, output in having), strict=True)
    columns = Columns(
        rows=[row for row, _ in having],
        lengths=[len(own) for own in ranks],
        token_ids=Column.of(token_ids),
        logprobs=Column.of(logprobs),
        ranks=Column.of(ranks),
    )
    for _, output in having:
        output.new_logprobs = None
    return MARK + _encoder.encode(columns)


def put_back(outputs: EngineCoreOutputs, buffer: memoryview) -> None:
    """Undo `take_out`: `buffer` is what it returned. The arrays are views of it."""
    columns = _decoder.decode(buffer[len(MARK) :])
    token_ids, logprobs, ranks = columns.token_ids.array(), columns.logprobs.array(), columns.ranks.array()
    end = 0
    for row, length in zip(columns.rows, columns.lengths, strict=True):
        begin, end = end, end + length
        outputs.outputs[row].new_logprobs = LogprobsLists(token_ids[begin:end], logprobs[begin:end], ranks[begin:end])


def _sending(stock: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    @functools.wraps(stock)
    def encode(self: MsgpackEncoder, message: Any, *rest: Any) -> list[Any]:
        columns = take_out(message) if type(message) is EngineCoreOutputs else None
        buffers = stock(self, message, *rest)
        return buffers if columns is None else [*buffers, columns]

    return encode


def _reading(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def decode(self: MsgpackDecoder, buffers: Any) -> Any:
        message = stock(self, buffers)
        if type(message) is EngineCoreOutputs and isinstance(buffers, list | tuple):
            last = memoryview(buffers[-1])
            if last[: len(MARK)] == MARK:
                put_back(message, last)
        return message

    return decode


def _rehearse() -> None:
    """Raise unless what is sent is read as it was."""

    def message() -> EngineCoreOutputs:
        lists = LogprobsLists(np.array([[5], [6]]), np.array([[-0.5], [-1.5]], np.float32), np.array([1, 2]))
        told = [lists.slice_request(0, 1), None, lists.slice_request(1, 1)]
        return EngineCoreOutputs(outputs=[EngineCoreOutput(f"r{row}", [row], own) for row, own in enumerate(told)])

    read = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(message()))
    for sent, got in zip(message().outputs, read.outputs, strict=True):
        ours, theirs = sent.new_logprobs, got.new_logprobs
        same = ours is theirs if ours is None or theirs is None else all(map(np.array_equal, ours[:3], theirs[:3]))
        if not same:
            raise ValueError(f"{theirs} was read where {ours} was sent")
