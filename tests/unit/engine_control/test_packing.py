"""Tensors packed into bytes come out as they went in, but for the type that was asked for."""

from __future__ import annotations

import json

import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmq.engine.packing import ALIGNMENT, Packed

shapes = st.lists(st.lists(st.integers(1, 7), max_size=3).map(tuple), min_size=1, max_size=6)


@given(shapes=shapes, half=st.booleans())
def test_what_is_packed_comes_out_on_the_other_side(shapes, half):
    dtype = torch.bfloat16 if half else torch.float32
    tensors = {f"t{number}": torch.randn(shape) for number, shape in enumerate(shapes)}
    tensors["count"] = torch.arange(5)
    tensors["turned"] = torch.randn(4, 3).T
    plan = Packed.of(tensors, dtype)
    buffer = torch.empty(plan.size_bytes, dtype=torch.uint8)
    plan.pack(tensors, buffer)
    arrived = Packed(json.loads(json.dumps(plan.entries))).views(buffer)
    assert arrived.keys() == tensors.keys()
    for name, tensor in tensors.items():
        wanted = tensor.to(dtype) if tensor.is_floating_point() else tensor
        assert torch.equal(arrived[name], wanted)
        assert arrived[name].storage_offset() * arrived[name].itemsize % ALIGNMENT == 0
