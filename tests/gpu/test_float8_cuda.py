"""FP8 products on a GPU: as on a CPU, where they are emulated, for any number of tokens, compiled or not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from swarmq.learner.model.float8 import Float8Linear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
        reason="no GPU that multiplies FP8",
    ),
    pytest.mark.filterwarnings("ignore"),  # compilers warn about many things
]


def products(layer: nn.Module, tokens: Tensor, grad: Tensor) -> list[Tensor]:
    """Output, and the gradients of input and weight, in FP32 on the CPU."""
    tokens = tokens.clone().requires_grad_()
    layer.zero_grad()
    output = layer(tokens)
    output.backward(grad)
    weights = (p.grad for p in layer.parameters())
    return [each.detach().float().cpu().clone() for each in (output, tokens.grad, *weights) if each is not None]


@pytest.mark.parametrize("compiled", [False, True])
def test_products_are_those_of_the_emulation(compiled: bool) -> None:
    torch.manual_seed(0)
    emulated = Float8Linear(64, 96, bias=False, dtype=torch.bfloat16)
    there = Float8Linear(64, 96, bias=False, device="cuda", dtype=torch.bfloat16)
    there.load_state_dict(emulated.state_dict())
    layer = torch.compile(there, dynamic=True, fullgraph=True) if compiled else there
    for count in (64, 37):
        tokens, grad = (torch.randn(count, width, dtype=torch.bfloat16) for width in (64, 96))
        wanted, made = products(emulated, tokens, grad), products(layer, tokens.cuda(), grad.cuda())
        assert all(float((a - b).norm() / b.norm()) < 0.01 for a, b in zip(made, wanted, strict=True))
