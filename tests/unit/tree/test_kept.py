"""Gradient checkpointing computes a layer again, but its attention only where memory is short."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from swarmq.learner import tree_attention
from swarmq.learner.tree_attention import Kept

LAYERS = 3


class Layer(nn.Module):
    """Two matrix products with something like attention between them."""

    def __init__(self):
        super().__init__()
        self.before, self.after = nn.Linear(4, 4), nn.Linear(4, 4)
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(num_hidden_layers=LAYERS))
        self.attended = 0

    def attend(self, x):
        self.attended += 1
        return torch.sin(x) * x

    def forward(self, x, kept):
        x = torch.tanh(self.before(x))
        return torch.tanh(self.after(kept.output(self, (x, x, x), lambda: self.attend(x))))


@pytest.fixture
def layers():
    torch.manual_seed(0)
    return nn.ModuleList(Layer() for _ in range(LAYERS))


def gradient(layers, *, checkpointed, times=1):
    layers.zero_grad()
    for layer in layers:
        layer.attended = 0
    for _ in range(times):
        kept, x = Kept(), torch.linspace(-1, 1, 8).view(2, 4)
        for layer in layers:
            x = checkpoint(layer, x, kept, use_reentrant=False) if checkpointed else layer(x, kept)
        x.square().sum().backward()
    return torch.cat([p.grad.flatten() for p in layers.parameters()])


@pytest.mark.parametrize(("free", "computed"), [(1 << 20, 1), (100, 2)])
def test_attention_is_computed_again_only_where_memory_is_short(layers, monkeypatch, free, computed):
    monkeypatch.setattr(tree_attention, "free_memory", lambda _: free)
    expected = gradient(layers, checkpointed=False)
    found = gradient(layers, checkpointed=True)
    assert [layer.attended for layer in layers] == [computed] * LAYERS
    assert torch.equal(found, expected)


def test_a_second_pass_over_a_layout_is_computed_anew(layers, monkeypatch):
    monkeypatch.setattr(tree_attention, "free_memory", lambda _: 1 << 20)
    layer, kept = layers[0], Kept()
    for x in (torch.ones(2, 4), torch.zeros(2, 4)):
        assert torch.equal(layer(x, kept), layer(x, Kept()))


def test_without_a_gradient_nothing_is_kept(layers, monkeypatch):
    monkeypatch.setattr(tree_attention, "free_memory", lambda _: pytest.fail("asked for memory"))
    with torch.no_grad():
        layers[0](torch.ones(2, 4), Kept())
