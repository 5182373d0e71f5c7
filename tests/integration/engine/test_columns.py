"""What the engine core tells the API servers is the same in columns, in vLLM's own messages."""

from __future__ import annotations

import multiprocessing
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

    from swarmq.weights.vllm_plugin import forked_core, logprob_columns

pytestmark = pytest.mark.vllm

STOCK = {patched: getattr(*patched) for patched in logprob_columns.PATCHED}


def now():
    return [getattr(*patched) for patched in logprob_columns.PATCHED]


@pytest.fixture(autouse=True)
def given_back(monkeypatch):
    """Each test begins with vLLM as it is, and leaves it so."""
    for (owner, name), method in STOCK.items():
        monkeypatch.setattr(owner, name, method)


@pytest.fixture
def in_core(monkeypatch):
    """This is an engine core that reads its own messages."""
    monkeypatch.setattr(multiprocessing.current_process(), "name", "EngineCore_DP0")
    logprob_columns.register()


def of_step(positions, candidates=1, firsts=None):
    """As the model runner makes them: three arrays of all requests."""
    numbers = np.random.default_rng(7)
    shape = positions, candidates
    return LogprobsLists(
        numbers.integers(0, 150_000, shape, dtype=np.int32),
        -numbers.random(shape, dtype=np.float32),
        numbers.integers(1, 100, positions, dtype=np.int64),
        firsts,
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
@pytest.mark.parametrize(
    ("asking", "firsts", "lengths"),
    [
        ((0, 1, 2), None, (1, 1, 1)),
        # the batch's order is not the message's; one of its requests did not ask, or is another server's
        ((2, 0), None, (1, 1)),
        ((0, 1, 2), [0, 2, 2], (2, 0, 3)),  # tokens guessed ahead
    ],
)
def test_what_is_sent_in_columns_arrives_as_vllm_would_cut_it(in_core, asking, firsts, lengths, candidates):
    step = of_step(5, candidates, firsts)
    cut = [STOCK[LogprobsLists, "slice_request"](step, *each) for each in zip(asking, lengths, strict=True)]
    own = [step.slice_request(*each) for each in zip(asking, lengths, strict=True)]
    read, buffers = sent(message(own[0], None, *own[1:]))
    assert buffers == 2
    got = [output.new_logprobs for output in read.outputs]
    assert got.pop(1) is None
    assert all(map(same, got, cut))
    assert all(isinstance(each, LogprobsLists) for each in got)
    for output in read.outputs:
        output.new_logprobs = None
    assert read == message(None, None, *(None for _ in own[1:]))


def test_a_message_without_log_probabilities_is_vllms_own(in_core):
    read, buffers = sent(message(None, None))
    assert buffers == 1
    assert read == message(None, None)


def test_columns_travel_behind_large_arrays(in_core):
    prompt = LogprobsTensors(torch.arange(4000).reshape(1000, 4), torch.rand(1000, 4), torch.arange(1000))
    outputs = message(of_step(1).slice_request(0, 1))
    outputs.outputs[0].new_prompt_logprobs_tensors = prompt
    outputs.outputs[0].finish_reason = FinishReason.STOP
    read, buffers = sent(outputs)
    assert buffers == 5  # the message, three arrays of the prompt, the columns
    assert all(map(torch.equal, read.outputs[0].new_prompt_logprobs_tensors[:3], prompt[:3]))
    assert same(read.outputs[0].new_logprobs, of_step(1))
    assert read.outputs[0].finish_reason is FinishReason.STOP


def test_log_probabilities_of_several_steps_go_vllms_own_way(in_core):
    one, other = of_step(1), of_step(2)
    read, buffers = sent(message(one.slice_request(0, 1), other.slice_request(1, 1)))
    assert buffers == 1
    assert same(read.outputs[0].new_logprobs, one)
    assert same(read.outputs[1].new_logprobs, LogprobsLists(*(array[1:] for array in other[:3])))


def test_who_is_no_engine_core_cuts_and_sends_as_ever():
    logprob_columns.register()
    assert now()[1:] == list(STOCK.values())[1:]
    read, buffers = sent(message(of_step(1).slice_request(0, 1)))
    assert buffers == 1
    assert same(read.outputs[0].new_logprobs, of_step(1))


def test_other_messages_are_left_alone(in_core):
    assert MsgpackDecoder(list).decode(MsgpackEncoder().encode([1, "two"])) == [1, "two"]
    assert MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(message(None))[0]) == message(None)


def test_columns_are_brought_once(in_core):
    once = now()
    logprob_columns.register()
    assert now() == once


def test_a_core_that_a_server_forks_sends_columns():
    logprob_columns.register()  # in the server, which sends none
    context = multiprocessing.get_context("fork")
    reading, writing = context.Pipe(duplex=False)

    def core():
        writing.send(sent(message(of_step(1).slice_request(0, 1)))[1])

    process = context.Process(target=forked_core._wrap_run(core), name="EngineCore")
    process.start()
    assert reading.poll(20), "the core did not answer"
    assert reading.recv() == 2
    process.join()
    assert now()[1:] == list(STOCK.values())[1:]


def test_a_vllm_that_reads_otherwise_keeps_its_own_way(monkeypatch):
    before, told = now(), []
    monkeypatch.setattr(multiprocessing.current_process(), "name", "EngineCore")
    monkeypatch.setattr(logprob_columns, "restore_columns", lambda outputs, buffer: None)
    monkeypatch.setattr(
        logprob_columns, "_log", SimpleNamespace(warning=lambda text, error: told.append((text, error)))
    )
    logprob_columns.register()
    assert now() == before
    assert same(sent(message(of_step(1).slice_request(0, 1)))[0].outputs[0].new_logprobs, of_step(1))
    [(text, error)] = told
    assert "one request at a time" in text
    assert "but read" in str(error)
