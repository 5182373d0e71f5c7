"""Gradient checkpointing computes again only what memory does not hold: layers first, their attention last."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from swarmq.learner.memory.estimate import LAYER_BYTES
from swarmq.learner.model import activation_checkpointing as keeping
from swarmq.learner.model.activation_checkpointing import ActivationCheckpointing, KeptActivations
from swarmq.learner.model.context_parallel import ALONE

LAYERS = 3


class Layer(nn.Module):
    """Two matrix products with something like attention between them."""

    def __init__(self):
        super().__init__()
        self.before, self.after = nn.Linear(4, 4), nn.Linear(4, 4)
        self.attended = 0

    def attend(self, x):
        self.attended += 1
        return torch.sin(x) * x

    def forward(self, x, kept):
        x = torch.tanh(self.before(x))
        return torch.tanh(self.after(kept.compute_attention(self, 4 * x.nbytes, lambda: self.attend(x))))


@pytest.fixture
def layers():
    torch.manual_seed(0)
    return nn.ModuleList(Layer() for _ in range(LAYERS))


def with_room(size=1 << 20):
    kept = KeptActivations()
    kept.room = size
    return kept


def gradient(layers, *, checkpointed, room=1 << 20):
    layers.zero_grad()
    for layer in layers:
        layer.attended = 0
    kept, x = with_room(room), torch.linspace(-1, 1, 8).view(2, 4)
    for layer in layers:
        x = checkpoint(layer, x, kept, use_reentrant=False) if checkpointed else layer(x, kept)
    x.square().sum().backward()
    return torch.cat([p.grad.flatten() for p in layers.parameters()])


@pytest.mark.parametrize(("room", "computed"), [(1 << 20, 1), (100, 2)])
def test_attention_is_computed_again_only_where_memory_is_short(layers, room, computed):
    expected = gradient(layers, checkpointed=False)
    found = gradient(layers, checkpointed=True, room=room)
    assert [layer.attended for layer in layers] == [computed] * LAYERS
    assert torch.equal(found, expected)


def test_a_second_pass_over_a_layout_is_computed_anew(layers):
    layer, kept = layers[0], with_room()
    for x in (torch.ones(2, 4), torch.zeros(2, 4)):
        assert torch.equal(layer(x, kept), layer(x, KeptActivations()))


def test_without_a_gradient_nothing_is_kept(layers):
    kept = with_room()
    with torch.no_grad():
        layers[0](torch.ones(2, 4), kept)
    assert not kept._outputs


WHOLE, INPUT, ATTENTION = 1000, 32, 100
"""Bytes that a layer keeps when it is kept whole, and the input and the attention of one that is not."""
TRIED = LAYER_BYTES * 8
"""Bytes with which the first layer is tried; as many are left for one that is computed again."""
HELD = LAYERS * INPUT + TRIED
REST = HELD + WHOLE + (LAYERS - 1) * ATTENTION
MORE = WHOLE - INPUT - ATTENTION


class Decoder:
    """Layers on a GPU of `total` bytes, of which they take what `Checkpointing` lets them."""

    def __init__(self, monkeypatch, layers, total):
        self.total, self.taken = total, 0
        monkeypatch.setattr(keeping, "get_keepable_bytes", lambda _: self.total - self.taken)
        monkeypatch.setattr(keeping, "get_allocated_bytes", lambda _: self.taken)
        monkeypatch.setattr(keeping, "checkpoint", self.checkpoint)
        self.layers, self.checkpointing = layers, ActivationCheckpointing(LAYERS, list, share=1.0)
        self.kept, self.context = [], ALONE

    def checkpoint(self, layer, *inputs, use_reentrant):
        self.taken -= WHOLE - INPUT - ATTENTION  # which running it adds
        self.kept[-1] = False
        return checkpoint(layer, *inputs, use_reentrant=use_reentrant)

    def gradient(self):
        self.layers.zero_grad()
        self.kept, x = [], torch.linspace(-1, 1, 8).view(1, 2, 4)
        visibility = SimpleNamespace(kept=KeptActivations(), compiled=True, context=self.context)
        self.visibility = visibility
        visibility.kept.attention_bytes, visibility.kept._fits = ATTENTION, True
        for layer in self.layers:
            self.kept.append(True)
            x = self.checkpointing(partial(self.run, layer, visibility=visibility), x)
        x.square().sum().backward()
        return torch.cat([p.grad.flatten() for p in self.layers.parameters()])

    def run(self, layer, x, *, visibility):
        self.taken += WHOLE
        return layer(x, visibility.kept)


@pytest.mark.parametrize(
    ("room", "kept"),
    [
        (HELD + TRIED, [False, False, False]),
        (HELD + TRIED + 1, [True, False, False]),
        (REST + MORE - 1, [True, False, False]),
        (REST + MORE, [True, True, False]),
        (REST + 2 * MORE, [True, True, True]),
    ],
)
def test_layers_are_kept_whole_as_far_as_memory_goes(layers, monkeypatch, room, kept):
    decoder = Decoder(monkeypatch, layers, room)
    found, expected = decoder.gradient(), gradient(layers, checkpointed=False)
    assert decoder.kept == kept
    assert torch.equal(found, expected)


def test_ranks_that_share_a_pass_keep_as_much_as_the_one_with_the_least_room(layers, monkeypatch):
    """What is computed again gathers its keys and values again, so none may do so alone."""

    class Beside:
        ranks, said = 1, []

        def reduce_min(self, value):
            self.said.append(value)
            return min(value, 2 * TRIED if len(self.said) == 1 else 0)

    decoder = Decoder(monkeypatch, layers, REST + 2 * MORE)
    decoder.context = Beside()
    decoder.gradient()
    assert decoder.context.said == [REST + 2 * MORE - HELD, 2]
    assert decoder.kept == [True, False, False]
    assert decoder.visibility.kept.room == 2 * TRIED / LAYERS


def test_attention_of_a_layer_has_its_share_of_what_is_free_beside_all_that_cannot_be_helped(layers, monkeypatch):
    decoder = Decoder(monkeypatch, layers, HELD + 600)
    decoder.gradient()
    assert decoder.visibility.kept.room == 600 / LAYERS


class Share:
    """A parameter of `size` numbers, of which this rank of four has a part."""

    grad, device = None, torch.device("cpu")

    def __init__(self, size, *, requires_grad=True):
        self.size, self.requires_grad = size, requires_grad

    def numel(self):
        return self.size

    def to_local(self):
        return Share(self.size // 4, requires_grad=self.requires_grad)


HIDDEN = torch.zeros(1, 2, 4, dtype=torch.bfloat16)
ENDS, LAYER = 100, 1000
WEIGHT, GRADIENT = 2, 4


def later(monkeypatch, *, held, passes, trained=None):
    """What is counted before each of `passes`, of which only those that learn leave a gradient. `trained`: where it is not all,
    so many numbers of each layer."""
    monkeypatch.setattr(keeping, "DTensor", Share)
    sizes = {LAYER: True} if trained is None else {trained: True, LAYER - trained: False}
    layers = [Share(size, requires_grad=learns) for _ in range(LAYERS) for size, learns in sizes.items()]
    ends = torch.zeros(ENDS, requires_grad=trained is None)
    checkpointing = ActivationCheckpointing(LAYERS, lambda: [ends, *layers])
    checkpointing.held = held
    for learns in passes:
        with torch.set_grad_enabled(learns):
            checkpointing._count_pass()
            yield checkpointing._estimate_later_bytes(HIDDEN)
        if held:
            layers[:] = [torch.zeros(each.numel(), requires_grad=each.requires_grad) for each in layers]


def test_what_stays_gathered_from_pass_to_pass_is_counted_before_it_is_there_and_no_more(monkeypatch):
    weights, gradient = WEIGHT * LAYERS * LAYER, GRADIENT * (LAYERS * LAYER + ENDS)
    assert list(later(monkeypatch, held=True, passes=[True, True, True])) == [weights + gradient, 0, 0]
    assert list(later(monkeypatch, held=True, passes=[False, True, True])) == [weights + gradient, gradient, 0]


def test_layers_that_are_gathered_for_their_turn_alone_are_not_counted_whole(monkeypatch):
    counted = GRADIENT * LAYERS * LAYER // 4 + (WEIGHT + GRADIENT) * (ENDS + 2 * LAYER)
    assert list(later(monkeypatch, held=False, passes=[True, True])) == [counted, counted]


def test_what_is_not_trained_has_no_gradient_to_count(monkeypatch):
    weights, gradient = WEIGHT * LAYERS * LAYER, GRADIENT * LAYERS * 40
    assert list(later(monkeypatch, held=True, passes=[True, True], trained=40)) == [weights + gradient, 0]
    together = ENDS + 2 * LAYER
    shares = (
        GRADIENT * LAYERS * 40 // 4 + WEIGHT * together + GRADIENT * together * LAYERS * 40 // (LAYERS * LAYER + ENDS)
    )
    assert list(later(monkeypatch, held=False, passes=[True], trained=40)) == [shares]
