"""Runs inside vLLM: log-probabilities go from the engine core to the API servers in columns.

vLLM sends three small arrays per request and step, which takes the engine core longer than sending everything else. All
training requests ask for log-probabilities, so this patch sends three arrays per step for all requests together, in a buffer
after the message, and the API server slices them. `python -m benchmarks.columns` measures both ways.
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
"""Marker at the start of the columns' buffer. vLLM's own buffers are found by index and never by content."""

CORE_PROCESS_NAME = "EngineCore"
"""Name prefix of vLLM's engine core processes."""

PATCHED = (
    (MsgpackDecoder, "decode"),
    (MsgpackEncoder, "encode"),
    (MsgpackEncoder, "encode_into"),
    (LogprobsLists, "slice_request"),
)

_log = logging.getLogger("vllm.swarmq")  # vLLM shows only messages of loggers below its own

_stock_slice_request = LogprobsLists.slice_request
"""vLLM's unpatched `slice_request`."""

DeferredRows = tuple[LogprobsLists, int, int]
"""A deferred call of `slice_request`: a step's log-probabilities, the request's index, its number of positions."""


class Column(msgspec.Struct, array_like=True):
    """A serialized array."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, array: npt.NDArray[Any]) -> Column:
        return cls(array.dtype.str, array.shape, array.tobytes())

    def array(self) -> npt.NDArray[Any]:
        return np.frombuffer(self.data, dtype=self.dtype).reshape(self.shape)


class Columns(msgspec.Struct, array_like=True):
    """Log-probabilities of all outputs in a message."""

    rows: list[int]
    """[outputs with log-probabilities] indices among the message's outputs."""
    lengths: tuple[int, ...]
    """[outputs with log-probabilities] number of positions: 1 without speculative decoding."""
    token_ids: Column
    """Token ids [positions, candidates]."""
    logprobs: Column
    """Natural log-probabilities [positions, candidates]."""
    ranks: Column
    """Rank of each sampled token among all tokens [positions]."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Columns)


def register() -> None:
    """Make this process read columns and, if it is an engine core, send them.

    If this vLLM does not have the expected formats, its own code stays in use, and a warning is logged.
    """
    reads = hasattr(MsgpackDecoder.decode, "__wrapped__")  # in a core that was forked, too
    sends = hasattr(MsgpackEncoder.encode, "__wrapped__")
    is_core = multiprocessing.current_process().name.startswith(CORE_PROCESS_NAME)
    if reads and (sends or not is_core):
        return
    stock = [(owner, name, getattr(owner, name)) for owner, name in PATCHED]
    if not reads:
        MsgpackDecoder.decode = _wrap_decode(MsgpackDecoder.decode)
    if is_core:
        MsgpackEncoder.encode = _wrap_encode(MsgpackEncoder.encode)
        MsgpackEncoder.encode_into = _wrap_encode(MsgpackEncoder.encode_into)
        LogprobsLists.slice_request = defer_rows
    try:
        _check_round_trip()
    except Exception as error:
        for owner, name, method in stock:
            setattr(owner, name, method)
        _log.warning("this vLLM sends log-probabilities one request at a time, which is slower: %r", error)


def defer_rows(step: LogprobsLists, request: int, count: int) -> DeferredRows:
    """Replace `LogprobsLists.slice_request`: record the call, for `extract_columns` to gather all requests at once."""
    return step, request, count


def extract_columns(outputs: EngineCoreOutputs) -> bytes | None:
    """Remove the deferred log-probabilities from `outputs` and return them as a buffer; None if there are none.

    If a request has log-probabilities of several steps in one message, they are sliced and sent as vLLM does.
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
    if lengths.count(1) < len(lengths):  # speculative decoding guessed tokens ahead
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
    """Undo `extract_columns`, given the buffer that it returned; arrays are views of the buffer."""
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
    """Raise ValueError if decoding does not restore what was encoded."""
    step = LogprobsLists(np.array([[5], [6]]), np.array([[-0.5], [-1.5]], np.float32), np.array([1, 2]))
    own = [defer_rows(step, 0, 1), None, defer_rows(step, 1, 1)]
    message = EngineCoreOutputs(outputs=[EngineCoreOutput(f"r{row}", [row], each) for row, each in enumerate(own)])
    columns = extract_columns(message)
    read = MsgpackDecoder(EngineCoreOutputs).decode([*MsgpackEncoder().encode(message), columns])
    got = [output.new_logprobs for output in read.outputs]
    if [own and own.logprobs.tolist() for own in got] != [[[-0.5]], None, [[-1.5]]]:
        raise ValueError(f"sent {own}, but read {got}")
