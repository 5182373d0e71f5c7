"""FlashAttention over packed rows on a Hopper GPU is as exact as FlexAttention."""

import importlib.util

import pytest
import torch

from swarmq.learner.model import flash_attention
from swarmq.learner.model.attention_check import AttentionCall, draw_call, find_flash_refusal
from swarmq.learner.model.batched_attention import AttentionForm
from swarmq.learner.model.flash_attention import CAPABILITY, Kind
from swarmq.learner.model.layout_attention import Visibility, attend
from swarmq.timeline import lay_rows, make_resolved_turn, unfold

GPU = torch.device("cuda")


def is_installed():
    try:
        return importlib.util.find_spec("flash_attn.cute") is not None
    except ImportError:
        return False


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != CAPABILITY,
        reason="needs a Hopper GPU",
    ),
    pytest.mark.skipif(not is_installed(), reason="needs swarmq[flash]"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),  # compilers warn about many things
]

LENGTHS = [(2, 63, 128, 129, 1000, 700), (3000,), (40,) * 50]
HEADS = [(4, 2, 128), (4, 4, 64), (4, 1, 256)]
FORMS = {
    "plain": AttentionForm(0.1, None, None, None),
    "window": AttentionForm(0.1, 100, None, None),
    "softcap": AttentionForm(0.1, 300, 5.0, None),
    "sinks": AttentionForm(0.1, 100, None, torch.tensor([0.5, -1.0, 2.0, 0.0])),
}


@pytest.fixture(autouse=True)
def _nothing_tried_yet(monkeypatch):
    monkeypatch.setattr(flash_attention, "_usable", set())


def rows_of(*lengths):
    turns = [make_resolved_turn([0] * (n - 1), [0], [0.0]) for n in lengths]
    return lay_rows([(0, row) for row in unfold(turns)])


def call_of(form, heads, num_tokens):
    query_heads, key_heads, size = heads
    shaped = AttentionCall(*(torch.empty(1, n, 1, size) for n in (query_heads, key_heads, key_heads)), form)
    return draw_call(shaped, num_tokens)


def outcome(layout, call, dtype, *, compiled, contiguous=False):
    """Return output and gradients, with queries, keys and values in either order in memory."""
    asked = [x.to(GPU, torch.bfloat16).to(dtype) for x in call[:3]]
    if not contiguous:  # as the layers hand them over
        asked = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in asked]
    asked += [] if call.form.sinks is None else [call.form.sinks.to(GPU)]
    asked = [x.requires_grad_() for x in asked]
    visibility = Visibility(layout, GPU, compiled=compiled)
    output, _ = attend(
        None,
        *asked[:3],
        scaling=call.form.scale,
        sliding_window=call.form.window,
        softcap=call.form.softcap,
        s_aux=asked[3] if len(asked) > 3 else None,
        visibility=visibility,
    )
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(GPU, torch.bfloat16)
    return [x.float() for x in (output.detach(), *torch.autograd.grad(output, asked, upstream.to(dtype)))]


def assert_as_exact(layout, call, *, contiguous=False):
    exact = outcome(layout, call, torch.float32, compiled=False)
    flex = outcome(layout, call, torch.bfloat16, compiled=True, contiguous=contiguous)
    flash_attention.allow([Kind.of(*call)._replace(dtype=torch.bfloat16, backward=True)])
    flash = outcome(layout, call, torch.bfloat16, compiled=True, contiguous=contiguous)
    assert any(not torch.equal(a, b) for a, b in zip(flash, flex, strict=True))  # by another kernel
    for name, a, b, c in zip(("output", "query", "key", "value", "sinks"), flash, flex, exact, strict=False):
        assert (a - c).norm() < 2 * (b - c).norm() + 1e-4 * c.norm(), name
        assert (a - c).norm() < 0.02 * c.norm(), name


@pytest.mark.parametrize("lengths", LENGTHS, ids=len)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_it_is_as_exact_as_flex_attention(form, lengths):
    layout = rows_of(*lengths)
    assert_as_exact(layout, call_of(form, HEADS[0], layout.num_tokens))


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("contiguous", [False, True])
def test_heads_of_every_size_and_order_in_memory_are_computed(heads, contiguous):
    layout = rows_of(*LENGTHS[0])
    assert_as_exact(layout, call_of(FORMS["plain"], heads, layout.num_tokens), contiguous=contiguous)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_its_trial_passes(form):
    assert find_flash_refusal([call_of(form, HEADS[0], 1)], GPU, torch.bfloat16, backward=True) is None
