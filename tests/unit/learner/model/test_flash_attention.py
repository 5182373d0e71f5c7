"""Packed rows are left to FlashAttention where it passed its trial, and give what attention in batches gives. The kernel here computes
its definition."""

from itertools import pairwise

import pytest
import torch
from structlog.testing import capture_logs

from swarmq.learner.model import attention_check, flash_attention, layout_attention, layout_model
from swarmq.learner.model.attention_check import AttentionCall, draw_call, find_flash_refusal
from swarmq.learner.model.batched_attention import AttentionForm
from swarmq.learner.model.context_parallel import ContextGroup, cut_for_rank
from swarmq.learner.model.flash_attention import MAX_ROWS, Kind, find_obstacle
from swarmq.learner.model.layout_attention import BLOCK, Visibility
from swarmq.learner.model.layout_model import LayoutModel
from swarmq.timeline import PrefixTree, lay_rows, make_resolved_turn, plan_rows, unfold

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
FORMS = {
    "plain": AttentionForm(0.3, None, None, None),
    "window": AttentionForm(0.3, 7, None, None),
    "one token": AttentionForm(0.3, 1, None, None),
    "softcap": AttentionForm(0.3, None, 2.0, None),
    "sinks": AttentionForm(0.3, 7, None, SINKS),
}


def kernel(  # the arguments of flash_attn_varlen_func that are used
    q,
    k,
    v,
    *,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    softmax_scale,
    causal,
    window_size,
    learnable_sink,
    softcap,
):
    """Attention of sequences of several lengths, [T, heads, D], by its definition."""
    edges = cu_seqlens_q.tolist()
    assert causal
    assert cu_seqlens_q.dtype == torch.int32
    assert edges == cu_seqlens_k.tolist()
    assert max_seqlen_q == max_seqlen_k >= max(b - a for a, b in pairwise(edges))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    outputs = []
    for start, end in pairwise(edges):
        scores = torch.einsum("qhd,khd->hqk", q[start:end], k[start:end]) * softmax_scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        behind = torch.arange(end - start)[:, None] - torch.arange(end - start)
        left, right = (None, 0) if window_size == (None, None) else window_size
        assert right == 0
        unseen = (behind < 0) if left is None else (behind < 0) | (behind > left)
        scores = scores.masked_fill(unseen, -torch.inf)
        if learnable_sink is not None:
            scores = torch.cat([learnable_sink[:, None, None].expand(-1, end - start, 1), scores], dim=2)
        shares = scores.softmax(-1)[:, :, -(end - start) :].to(v.dtype)
        outputs.append(torch.einsum("hqk,khd->qhd", shares, v[start:end]))
    return torch.cat(outputs), None


def without_window(*asked, **named):
    return kernel(*asked, **{**named, "window_size": (None, None)})


def without_sinks(*asked, **named):
    return kernel(*asked, **{**named, "learnable_sink": None})


def across_rows(*asked, cu_seqlens_q, **named):
    edges = cu_seqlens_q[[0, -1]]
    return kernel(*asked, **{**named, "cu_seqlens_q": edges, "cu_seqlens_k": edges})


def refused(*_, **__):
    raise RuntimeError("no such instruction\nTraceback")


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(_, values):
        return values.clone()

    backward = staticmethod(refused)


def refused_backwards(*asked, **named):
    return Backward.apply(kernel(*asked, **named)[0]), None


def rows_of(*lengths):
    turns = [make_resolved_turn([0] * (n - 1), [0], [0.0]) for n in lengths]
    return lay_rows([(0, row) for row in unfold(turns)])


def call_of(form, num_tokens):
    return draw_call(AttentionCall(*(torch.empty(1, heads, 1, 8) for heads in (4, 2, 2)), form), num_tokens)


def outcome(visibility, call):
    asked = [x.clone().requires_grad_() for x in (*call[:3], *([] if call.form.sinks is None else [call.form.sinks]))]
    form = call.form._replace(sinks=None if call.form.sinks is None else asked[3])
    output = visibility.attend(None, *asked[:3], form)
    return [
        output.detach(),
        *torch.autograd.grad((output * torch.arange(output.numel()).view_as(output).sin()).sum(), asked),
    ]


@pytest.fixture
def flash(monkeypatch):
    """Allow kinds of attention to FlashAttention, which is a kernel given here; `runs` counts what either attention computed."""
    runs = {"flash": 0, "flex": 0}

    def flex(query, key, value, visibility, form):
        runs["flex"] += 1
        return Visibility(visibility._layout, CPU, compiled=False).attend(None, query, key, value, form)

    def allow(by, *calls):
        def counted(*asked, **named):
            runs["flash"] += 1
            return by(*asked, **named)

        monkeypatch.setattr(flash_attention, "load_kernel", lambda: counted)
        flash_attention.allow(Kind.of(*call)._replace(backward=True) for call in calls)
        return runs

    monkeypatch.setattr(flash_attention, "_usable", set())
    monkeypatch.setattr(layout_attention, "_run_flex_attention", flex)
    return allow


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("lengths", [(1,), (50,), (1, 30, 2, 9), (12,) * 5], ids=str)
def test_packed_rows_give_what_attention_in_batches_gives(flash, form, lengths):
    layout = rows_of(*lengths)
    call = call_of(form, layout.num_tokens)
    runs = flash(kernel, call)
    ours, expected = (outcome(Visibility(layout, CPU, compiled=compiled), call) for compiled in (True, False))
    assert runs == {"flash": 1, "flex": 0}
    assert [x.shape for x in ours] == [x.shape for x in expected]
    for a, b in zip(ours, expected, strict=True):
        assert (a - b).abs().max() < 1e-5


def test_rows_of_folded_conversations_are_packed_rows_and_trees_are_not(flash, make_group):
    group = make_group(seed=3)
    for layouts, by in ((plan_rows(group, 2000), "flash"), (PrefixTree(group).layouts(2000), "flex")):
        call = call_of(FORMS["plain"], layouts[0].num_tokens)
        before = dict(flash(kernel, call))
        outcome(Visibility(layouts[0], CPU, compiled=True), call)
        runs = flash(kernel)
        assert {name: runs[name] - before[name] for name in runs} == {"flash": 0, "flex": 0} | {by: 1}


def test_a_tree_without_forks_is_packed_rows(flash):
    first = make_resolved_turn([1, 2], [3], [0.0])
    second = make_resolved_turn([1, 2, 3, 4], [5], [0.0])
    (layout,) = PrefixTree([[first, second]]).layouts(100)
    call = call_of(FORMS["window"], layout.num_tokens)
    runs = flash(kernel, call)
    ours, expected = (outcome(Visibility(layout, CPU, compiled=compiled), call) for compiled in (True, False))
    assert runs["flash"] == 1
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(ours, expected, strict=True))


@pytest.mark.parametrize(("rows", "by"), [(MAX_ROWS, "flash"), (MAX_ROWS + 1, "flex")])
def test_more_rows_than_the_trial_reaches_are_left_to_flex_attention(flash, rows, by):
    layout = rows_of(*[1] * rows)
    call = call_of(FORMS["plain"], layout.num_tokens)
    runs = flash(kernel, call)
    outcome(Visibility(layout, CPU, compiled=True), call)
    assert runs == {"flash": 0, "flex": 0} | {by: 1}


def test_a_pass_that_ranks_share_is_left_to_flex_attention(flash):
    layout, context = rows_of(300, 200), ContextGroup(2, 0)
    part = cut_for_rank(layout, context, block=BLOCK)
    call = call_of(FORMS["plain"], part.layout.num_tokens)
    runs = flash(kernel, call)
    outcome(Visibility(layout, CPU, compiled=True, part=part, context=context), call)
    assert runs == {"flash": 0, "flex": 1}


@pytest.mark.parametrize(
    "other",
    [
        {"form": FORMS["window"]},
        {"form": FORMS["plain"]._replace(scale=0.2)},
        {"form": FORMS["softcap"]},
        {"form": FORMS["plain"]._replace(sinks=SINKS)},
        {"key": torch.zeros(1, 4, 20, 8), "value": torch.zeros(1, 4, 20, 8)},
    ],
)
def test_what_was_not_tried_is_left_to_flex_attention(flash, other):
    call = call_of(FORMS["plain"], 20)
    runs = flash(kernel, call)
    outcome(Visibility(rows_of(20), CPU, compiled=True), call._replace(**other))
    assert runs == {"flash": 0, "flex": 1}


@pytest.mark.parametrize(("tried_backward", "asked_backward", "by"), [(True, False, "flash"), (False, True, "flex")])
def test_a_kind_that_was_tried_without_a_backward_pass_is_not_trained(flash, tried_backward, asked_backward, by):
    call = call_of(FORMS["plain"], 20)
    runs = flash(kernel)
    flash_attention.allow([Kind.of(*call)._replace(backward=tried_backward)])
    asked = [x.requires_grad_(asked_backward) for x in call[:3]]
    Visibility(rows_of(20), CPU, compiled=True).attend(None, *asked, call.form)
    assert runs == {"flash": 0, "flex": 0} | {by: 1}


def test_deterministic_training_is_left_to_flex_attention(flash):
    call = call_of(FORMS["plain"], 20)
    runs = flash(kernel, call)
    torch.use_deterministic_algorithms(True)
    try:
        outcome(Visibility(rows_of(20), CPU, compiled=True), call)
        assert "not deterministic" in find_obstacle(CUDA, torch.bfloat16)
    finally:
        torch.use_deterministic_algorithms(False)
    assert runs == {"flash": 0, "flex": 1}


@pytest.fixture
def tried(flash, monkeypatch):
    """What a trial says of a kernel."""

    def check(by, form=FORMS["sinks"], *, backward=True):
        monkeypatch.setattr(flash_attention, "find_obstacle", lambda *_: None)
        flash(by)
        return find_flash_refusal([call_of(form, 1)], CPU, torch.bfloat16, backward=backward)

    return check


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_kernel_that_gives_the_same_passes_its_trial(tried, form):
    assert tried(kernel, form) is None


@pytest.mark.parametrize("wrong", [without_window, without_sinks, across_rows])
def test_a_kernel_that_gives_something_else_does_not(tried, wrong):
    assert "is off by" in tried(wrong)


@pytest.mark.parametrize("by", [refused, refused_backwards])
def test_a_kernel_that_is_refused_does_not_and_it_is_said_why(tried, by):
    assert tried(by).endswith("no such instruction")


def test_a_model_that_only_judges_needs_no_backward_pass(tried):
    assert tried(refused_backwards, backward=False) is None


@pytest.mark.parametrize(
    ("capability", "dtype", "said"),
    [
        ((9, 0), torch.float32, "half precision only, not in torch.float32"),
        ((8, 0), torch.bfloat16, "on Hopper GPUs only"),
        ((9, 0), torch.bfloat16, "flash-attn-4 is not installed: pip install 'swarmq[flash]'"),
    ],
)
def test_it_is_said_why_the_package_is_not_used(monkeypatch, capability, dtype, said):
    def missing():
        raise ModuleNotFoundError("No module named 'flash_attn'", name="flash_attn")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(flash_attention, "load_kernel", missing)
    assert said in find_obstacle(CUDA, dtype)


def test_a_package_that_cannot_be_imported_is_not_used(monkeypatch):
    def broken():
        raise ImportError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(flash_attention, "load_kernel", broken)
    assert find_obstacle(CUDA, torch.bfloat16).endswith("ImportError: libcuda.so.1: cannot open shared object file")


@pytest.mark.parametrize("reason", [None, "its compiled attention is off by 2 of the largest value"])
@pytest.mark.parametrize("name", ["qwen3", "gpt-oss"])
def test_a_model_says_once_which_attention_computes_its_packed_rows(make_model, flash, monkeypatch, name, reason):
    flash(kernel)
    monkeypatch.setattr(layout_model, "find_refusal", lambda *_, **__: None)
    monkeypatch.setattr(layout_model, "find_flash_refusal", lambda *_, **__: reason)
    with capture_logs() as logs:
        model = LayoutModel(make_model(name), device=CUDA, dtype=torch.bfloat16)
    said = [entry for entry in logs if entry["event"] == "packed_rows"]
    assert [(entry["attention"], entry["reason"]) for entry in said] == [
        ("FlexAttention" if reason else "FlashAttention", reason)
    ]
    assert model.rows_only is None
    assert model.cost.tree_slowdown == (1.0 if reason else flash_attention.FLEX_SLOWDOWN)
    kinds = {(kind.dtype, kind.window, kind.sinks) for kind in flash_attention._usable if kind.backward}
    windows, sinks = ({7, None}, True) if name == "gpt-oss" else ({None}, False)
    assert kinds == (set() if reason else {(torch.bfloat16, window, sinks) for window in windows})


def test_ranks_that_share_a_pass_try_nothing(make_model, monkeypatch):
    monkeypatch.setattr(layout_model, "find_refusal", lambda *_, **__: None)
    monkeypatch.setattr(layout_model, "find_flash_refusal", refused)
    with capture_logs() as logs:
        LayoutModel(make_model("qwen3"), device=CUDA, dtype=torch.bfloat16, ranks=2)
    assert [entry["reason"] for entry in logs if entry["event"] == "packed_rows"] == ["ranks share each micro-batch"]


def test_rows_of_the_trial_reach_over_blocks():
    assert max(attention_check.TRIAL_ROWS) > 2 * BLOCK
    assert len(attention_check.TRIAL_ROWS) > 1
