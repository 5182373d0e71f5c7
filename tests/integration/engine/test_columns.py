"""What the engine core tells the API servers is the same in columns, in vLLM's own messages."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its own
    pytest.importorskip("vllm")
    import torch
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
    from vllm.v1.outputs import LogprobsLists, LogprobsTensors
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    from swarmq.engine import columns

pytestmark = pytest.mark.vllm

STOCK = MsgpackEncoder.encode, MsgpackEncoder.encode_into, MsgpackDecoder.decode


def now():
    return MsgpackEncoder.encode, MsgpackEncoder.encode_into, MsgpackDecoder.decode


@pytest.fixture(autouse=True)
def given_back(monkeypatch):
    """Each test begins with vLLM as it is, and leaves it so."""
    for owner, name, method in zip(
        (MsgpackEncoder, MsgpackEncoder, MsgpackDecoder), ("encode", "encode_into", "decode"), STOCK, strict=True
    ):
        monkeypatch.setattr(owner, name, getattr(method, "__wrapped__", method))


def of_step(positions, candidates):
    """As the model runner makes them: three arrays of all requests."""
    numbers = np.random.default_rng(7)
    shape = positions, candidates
    return LogprobsLists(
        numbers.integers(0, 150_000, shape, dtype=np.int32),
        -numbers.random(shape, dtype=np.float32),
        numbers.integers(1, 100, positions, dtype=np.int32),
    )


def message(*own):
    outputs = [EngineCoreOutput(f"request-{row}", [row], new_logprobs=each) for row, each in enumerate(own)]
    return EngineCoreOutputs(engine_index=3, outputs=outputs, timestamp=1.0, finished_requests={"request-9"})


def sent(outputs):
    """What arrives, and how many buffers travelled."""
    buffers = MsgpackEncoder().encode_into(outputs, bytearray())
    return MsgpackDecoder(EngineCoreOutputs).decode([bytearray(buffer) for buffer in buffers]), len(buffers)


def same(one, other):
    return one is other or all(map(np.array_equal, one[:3], other[:3]))


@pytest.mark.parametrize("candidates", [1, 6])
@pytest.mark.parametrize("lengths", [(1, 1, 1), (2, 0, 3), (1, None, 1), (None, None, 4)])
def test_what_is_sent_in_columns_arrives_as_it_was(lengths, candidates):
    step, end, own = of_step(sum(length or 0 for length in lengths), candidates), 0, []
    for length in lengths:
        own.append(None if length is None else step.slice_request(end, length))
        end += length or 0
    plain, _ = sent(message(*own))
    columns.register()
    read, buffers = sent(message(*own))
    assert buffers == 2
    assert all(same(output.new_logprobs, each) for output, each in zip(read.outputs, own, strict=True))
    assert all(isinstance(o.new_logprobs, LogprobsLists) for o, each in zip(read.outputs, own, strict=True) if each)
    for each in (*read.outputs, *plain.outputs):
        each.new_logprobs = None
    assert read == plain


def test_arrays_that_are_not_contiguous_arrive_too():
    step = of_step(4, 6)
    own = [LogprobsLists(step.logprob_token_ids[:, ::2], step.logprobs[:, ::2], step.sampled_token_ranks)] * 2
    columns.register()
    read, _ = sent(message(*own))
    assert all(same(output.new_logprobs, each) for output, each in zip(read.outputs, own, strict=True))


def test_a_message_without_log_probabilities_is_vllms_own():
    columns.register()
    read, buffers = sent(message(None, None))
    assert buffers == 1
    assert read == message(None, None)


def test_columns_travel_behind_large_arrays():
    prompt = LogprobsTensors(torch.arange(4000).reshape(1000, 4), torch.rand(1000, 4), torch.arange(1000))
    outputs = message(of_step(1, 1))
    outputs.outputs[0].new_prompt_logprobs_tensors = prompt
    outputs.outputs[0].finish_reason = FinishReason.STOP
    columns.register()
    read, buffers = sent(outputs)
    assert buffers == 5  # the message, three arrays of the prompt, the columns
    assert all(map(torch.equal, read.outputs[0].new_prompt_logprobs_tensors[:3], prompt[:3]))
    assert same(read.outputs[0].new_logprobs, of_step(1, 1))
    assert read.outputs[0].finish_reason is FinishReason.STOP


def test_other_messages_are_left_alone():
    columns.register()
    assert MsgpackDecoder(list).decode(MsgpackEncoder().encode([1, "two"])) == [1, "two"]
    assert MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(message(None))[0]) == message(None)


def test_columns_are_brought_once():
    columns.register()
    once = now()
    columns.register()
    assert now() == once


def test_a_vllm_that_reads_otherwise_keeps_its_own_way(monkeypatch):
    before, told = now(), []
    monkeypatch.setattr(columns, "put_back", lambda outputs, buffer: None)
    monkeypatch.setattr(columns, "_log", SimpleNamespace(warning=lambda text, error: told.append((text, error))))
    columns.register()
    assert now() == before
    assert same(sent(message(of_step(1, 1)))[0].outputs[0].new_logprobs, of_step(1, 1))
    [(text, error)] = told
    assert "one request at a time" in text
    assert "None was read where" in str(error)
