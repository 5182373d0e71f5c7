"""Tensors packed into bytes come out as they went in, but for the type that was asked for."""

from __future__ import annotations

import json

import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmq.weights.format.packing import ALIGNMENT, FolderWeight, LowRankUpdate, PackedLayout, materialize

shapes = st.lists(st.lists(st.integers(1, 7), max_size=3).map(tuple), min_size=1, max_size=6)


@given(shapes=shapes, half=st.booleans())
def test_what_is_packed_comes_out_on_the_other_side(shapes, half):
    dtype = torch.bfloat16 if half else torch.float32
    tensors = {f"t{number}": torch.randn(shape) for number, shape in enumerate(shapes)}
    tensors["count"] = torch.arange(5)
    tensors["turned"] = torch.randn(4, 3).T
    plan = PackedLayout.of(tensors, dtype)
    buffer = torch.empty(plan.size_bytes, dtype=torch.uint8)
    plan.pack(tensors, buffer)
    arrived = PackedLayout(json.loads(json.dumps(plan.entries))).views(buffer)
    assert arrived.keys() == tensors.keys()
    for name, tensor in tensors.items():
        wanted = tensor.to(dtype) if tensor.is_floating_point() else tensor
        assert torch.equal(arrived[name], wanted)
        assert arrived[name].storage_offset() * arrived[name].itemsize % ALIGNMENT == 0


def test_what_an_adapter_adds_is_added_where_it_is_wanted():
    """That of weights in host memory on a GPU, for one; another device stands for it."""
    elsewhere, base = torch.device("meta"), torch.randn(5, 3, dtype=torch.bfloat16)
    adapter = LowRankUpdate(down=torch.randn(2, 3), up=torch.randn(5, 2), scale=0.5)
    assert materialize(FolderWeight(base, adapter), adding_on=elsewhere).device == elsewhere
    assert torch.equal(
        materialize(FolderWeight(base, adapter)), torch.addmm(base.float(), adapter.up, adapter.down, alpha=0.5)
    )
    assert materialize(FolderWeight(base), adding_on=elsewhere) is base, "copied once, to where it goes"
