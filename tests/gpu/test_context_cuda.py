"""Two GPUs that share passes make the gradient of one, with compiled kernels, and have room for longer rows."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from support import context_cuda
from support.launch import launch
from support.same_gradient import assert_same_gradient

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.timeout(600),
]

LONG = 65536
EXACT = 1e-4
"""Of each parameter's gradient in FP32, whose sums are in another order, ..."""
WAYS = {"shared": 0.1, "shared, sharded": 0.15}
"""... and in BF16, where shards are rounded as a whole, and weights that ranks hold for each product."""
LESS = 0.75
"""Of the memory of a rank alone that one of two takes: half of it, and the keys and values of all."""


def test_ranks_that_share_passes_make_the_gradient_of_one_and_take_less_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    context_cuda.save_models(tmp_path)
    began = time.perf_counter()
    launch(2, context_cuda.__file__, str(tmp_path), str(LONG), str(tmp_path / "made"))
    found = [f"launched, compiled and computed in {time.perf_counter() - began:.0f} s"]
    made = torch.load(tmp_path / "made")
    compared = [(f"fp32 {layout} 2", f"fp32 {layout} 1", EXACT) for layout in ("rows", "tree")]
    compared += [(f"{of} {way}", f"{of} alone", limit) for of in ("bf16", "long") for way, limit in WAYS.items()]
    found += [f"{ours}: {worst(made[ours], made[wanted])}, limit {limit:g}" for ours, wanted, limit in compared]
    found += [f"{LONG} tokens {way}: {made[f'figures {way}']}" for way in ("alone", *WAYS)]
    with capsys.disabled():
        sys.stdout.write("\n".join(["", *found, ""]))
    for ours, wanted, limit in compared:
        assert_same_gradient(made[ours], made[wanted], limit)
    alone = made["figures alone"]
    for way in WAYS:
        figures = made[f"figures {way}"]
        assert figures["peak_gib"] < LESS * alone["peak_gib"], way
        assert figures["loss"] == pytest.approx(alone["loss"], rel=1e-2)


def worst(ours: dict[str, Tensor], wanted: dict[str, Tensor]) -> str:
    """Of all parameters."""
    apart = {name: float((ours[name] - each).norm() / each.norm()) for name, each in wanted.items()}
    name = max(apart, key=apart.__getitem__)
    return f"{apart[name]:.2g} of the gradient apart at {name}, {sorted(apart.values())[len(apart) // 2]:.2g} in the middle"
