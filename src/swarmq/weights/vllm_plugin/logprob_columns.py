"""Runs inside vLLM: log-probabilities go from the engine core to the API servers in columns.

vLLM slices the arrays of a step into three small arrays per request and sends those, which takes the engine core longer than sending
everything else. Every training request asks for log-probabilities, so here those of a step are sent as three arrays for all requests
together, in a buffer after the message, and the API server slices them. `python -m benchmarks.columns` measures both ways.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

MARK = b"swarmq/columns/1"
"""Begins our buffer. vLLM's own buffers are the bytes of arrays, found by their index and never by what they begin with."""

CORE_PROCESS_NAME = "EngineCore"
"""How vLLM names the processes that sample."""

PATCHED = (
    (MsgpackDecoder, "decode"),
    (MsgpackEncoder, "encode"),
    (MsgpackEncoder, "encode_into"),
    (LogprobsLists, "slice_request"),
)

_log = logging.getLogger("vllm.swarmq")  # vLLM shows what is told below its own name

_stock_slice_request = LogprobsLists.slice_request
"""vLLM's own."""

DeferredRows = tuple[LogprobsLists, int, int]
"""What it is called with: a step's log-probabilities, a request's number among them, how many positions are its."""


class Column(msgspec.Struct, array_like=True):
    """An array on its way."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, array: npt.NDArray[Any]) -> Column:
        return cls(array.dtype.str, array.shape, array.tobytes())

    def array(self) -> npt.NDArray[Any]:
        return np.frombuffer(self.data, dtype=self.dtype).reshape(self.shape)


class Columns(msgspec.Struct, array_like=True):
    """The log-probabilities of a message's outputs."""

    rows: list[int]
    """[outputs that have any] their places among the message's."""
    lengths: tuple[int, ...]
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
    """Have this process read columns, and send them if it is an engine core.

    If its vLLM has other forms than the known ones, it goes on in its own way, and says so.
    """
    if hasattr(MsgpackDecoder.decode, "__wrapped__"):
        return
    stock = [(owner, name, getattr(owner, name)) for owner, name in PATCHED]
    MsgpackDecoder.decode = _wrap_decode(MsgpackDecoder.decode)
    if multiprocessing.current_process().name.startswith(CORE_PROCESS_NAME):
        MsgpackEncoder.encode = _wrap_encode(MsgpackEncoder.encode)
        MsgpackEncoder.encode_into = _wrap_encode(MsgpackEncoder.encode_into)
        LogprobsLists.slice_request = defer_rows
    try:
        _check_round_trip()
    except Exception as error:
        for owner, name, method in stock:
            setattr(owner, name, method)
        _log.warning("log-probabilities are sent one request at a time, which is slower, by this vLLM: %r", error)


def defer_rows(step: LogprobsLists, request: int, count: int) -> DeferredRows:
    """In place of `LogprobsLists.slice_request`, which makes three arrays: `take_out` gathers all requests' at once."""
    return step, request, count


def extract_columns(outputs: EngineCoreOutputs) -> bytes | None:
    """The log-probabilities of a step, which `outputs`, having `Rows` of it, is without then.

    None if it has none. Should a message ever have some of several steps, they are cut, and go vLLM's own way.
    """
    having = [(place, output) for place, output in enumerate(outputs.outputs) if output.new_logprobs is not None]
    if not having:
        return None
    steps, requests, lengths = zip(*(output.new_logprobs for _, output in having), strict=True)
    step = steps[0]
    if any(other is not step for other in steps):
        for _, output in having:
            output.new_logprobs = _stock_slice_request(*output.new_logprobs)
        return None
    begins = step.cu_num_generated_tokens
    positions = requests if begins is None else [begins[request] for request in requests]
    if lengths.count(1) < len(lengths):  # tokens were guessed ahead
        positions = [at for first, count in zip(positions, lengths, strict=True) for at in range(first, first + count)]
    chosen = np.array(positions, np.intp)
    columns = Columns(
        rows=[place for place, _ in having],
        lengths=lengths,
        token_ids=Column.of(step.logprob_token_ids[chosen]),
        logprobs=Column.of(step.logprobs[chosen]),
        ranks=Column.of(step.sampled_token_ranks[chosen]),
    )
    for _, output in having:
        output.new_logprobs = None
    return MARK + _encoder.encode(columns)


def restore_columns(outputs: EngineCoreOutputs, buffer: memoryview) -> None:
    """Undo `take_out`: `buffer` is what it returned. The arrays are views of it."""
    columns = _decoder.decode(buffer[len(MARK) :])
    step = LogprobsLists(columns.token_ids.array(), columns.logprobs.array(), columns.ranks.array())
    first = 0
    for row, length in zip(columns.rows, columns.lengths, strict=True):
        outputs.outputs[row].new_logprobs = _stock_slice_request(step, first, length)
        first += length


def _wrap_encode(stock: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    @functools.wraps(stock)
    def encode(self: MsgpackEncoder, message: Any, *rest: Any) -> list[Any]:
        columns = extract_columns(message) if type(message) is EngineCoreOutputs else None
        buffers = stock(self, message, *rest)
        return buffers if columns is None else [*buffers, columns]

    return encode


def _wrap_decode(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def decode(self: MsgpackDecoder, buffers: Any) -> Any:
        message = stock(self, buffers)
        if type(message) is EngineCoreOutputs and isinstance(buffers, list | tuple):
            last = memoryview(buffers[-1])
            if last[: len(MARK)] == MARK:
                restore_columns(message, last)
        return message

    return decode


def _check_round_trip() -> None:
    """Raise unless what is sent is read as it was."""
    step = LogprobsLists(np.array([[5], [6]]), np.array([[-0.5], [-1.5]], np.float32), np.array([1, 2]))
    own = [defer_rows(step, 0, 1), None, defer_rows(step, 1, 1)]
    message = EngineCoreOutputs(outputs=[EngineCoreOutput(f"r{row}", [row], each) for row, each in enumerate(own)])
    columns = extract_columns(message)
    read = MsgpackDecoder(EngineCoreOutputs).decode([*MsgpackEncoder().encode(message), columns])
    got = [output.new_logprobs for output in read.outputs]
    if [own and own.logprobs.tolist() for own in got] != [[[-0.5]], None, [[-1.5]]]:
        raise ValueError(f"{got} was read where {own} was sent")
