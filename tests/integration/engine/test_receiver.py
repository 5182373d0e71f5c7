"""A worker loads the bytes that the learner sent, or none: what does not reach it leaves the model alone."""

from __future__ import annotations

import asyncio

import pytest
import torch

from swarmq.engine import weights_nccl
from swarmq.engine.packing import Packed, checksum
from swarmq.engine.weights_plugin import UNTOUCHED
from swarmq.errors import EngineError
from swarmq.process import free_port

pynccl = pytest.importorskip("vllm.distributed.device_communicators.pynccl")
weights_receiver = pytest.importorskip("swarmq.engine.weights_receiver")

WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)}
CPU = torch.device("cpu")


class Group:
    """Of a learner that holds `sent`."""

    def __init__(self, sent: torch.Tensor) -> None:
        self._sent = sent

    def broadcast(self, buffer: torch.Tensor) -> None:
        buffer.copy_(self._sent)


def worker(group: Group) -> weights_receiver.WeightReceiver:
    receiver = object.__new__(weights_receiver.WeightReceiver)
    receiver.device, receiver._group = CPU, group
    return receiver


@pytest.fixture
def plan() -> Packed:
    return Packed.of(WEIGHTS, torch.float32)


@pytest.fixture
def sent(plan: Packed) -> torch.Tensor:
    buffer = torch.zeros(plan.size_bytes, dtype=torch.uint8)
    plan.pack(WEIGHTS, buffer)
    return buffer


def test_the_bytes_that_were_sent_are_the_weights(plan: Packed, sent: torch.Tensor) -> None:
    update = weights_receiver.Update(tensors=plan.entries, checksum=checksum(sent))
    with worker(Group(sent))._arrived(update) as arrived:
        assert {name: tensor.tolist() for name, tensor in arrived.items()} == {
            name: tensor.tolist() for name, tensor in WEIGHTS.items()
        }


@pytest.mark.parametrize("place", [0, 21, -1])
def test_one_other_byte_is_refused_before_the_model_is_touched(plan: Packed, sent: torch.Tensor, place: int) -> None:
    update, other = weights_receiver.Update(tensors=plan.entries, checksum=checksum(sent)), sent.clone()
    other[place] += 1
    with pytest.raises(ValueError, match=f"{UNTOUCHED}: other bytes arrived"), worker(Group(other))._arrived(update):
        pass


async def test_a_communicator_that_would_send_nothing_is_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(*_: object) -> None:
        raise OSError("libnccl.so.2: cannot open shared object file")

    monkeypatch.setattr(pynccl, "NCCLLibrary", lacking)
    port = free_port()
    both = [
        asyncio.to_thread(weights_nccl.join, "127.0.0.1", port, rank=rank, world_size=2, device=CPU) for rank in (0, 1)
    ]
    told = await asyncio.gather(*both, return_exceptions=True)
    assert [type(each) for each in told] == [EngineError, EngineError]
    assert all("disabled" in str(each) for each in told)
