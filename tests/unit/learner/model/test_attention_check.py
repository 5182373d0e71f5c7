"""A kernel that does not do what training asks of it is found before training begins. The kernels here are scripted."""

from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.utils import get_optimize_ddp_mode

from swarmq.learner.model import layout_attention, layout_model
from swarmq.learner.model.attention_check import RecordingVisibility, find_refusal
from swarmq.learner.model.batched_attention import attend_in_batches
from swarmq.learner.model.layout_model import LayoutModel, PlacedLayout
from swarmq.timeline import PrefixTree

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def right(query, key, value, visibility, form):
    return attend_in_batches(query, key, value, visibility.batches(form.window), form)


def without_sinks(query, key, value, visibility, form):
    return right(query, key, value, visibility, form._replace(sinks=None))


def without_window(query, key, value, visibility, form):
    return right(query, key, value, visibility, form._replace(window=None))


def refused(*_):
    raise RuntimeError("out of resource: shared memory, Required: 262144, Hardware limit: 232448\nTraceback")


def full(*_):
    raise torch.OutOfMemoryError("CUDA out of memory")


class Forward(torch.autograd.Function):
    @staticmethod
    def forward(_, values):
        return values.clone()

    backward = staticmethod(refused)


def refused_backwards(*asked):
    return Forward.apply(right(*asked))


def untrained_sinks(query, key, value, visibility, form):
    sinks = None if form.sinks is None else form.sinks.detach() + 0 * form.sinks
    return right(query, key, value, visibility, form._replace(sinks=sinks))


@pytest.fixture
def checked(make_model, make_group, monkeypatch):
    """What is said of a scripted kernel that computes the layers of a model."""

    def check(kernel, name="gpt-oss", dtype=torch.float32, *, backward=True, **asked):
        (layout, *_) = PrefixTree(make_group(seed=3)).layouts(2000)
        model, recorded = LayoutModel(make_model(name)), RecordingVisibility(layout, CPU)
        placed = PlacedLayout.of(layout, CPU)
        with torch.no_grad():
            model(PlacedLayout(placed.input_ids, placed.position_ids, placed.predictors, placed.targets, recorded))
        monkeypatch.setattr(layout_attention, "_run_flex_attention", kernel)
        return find_refusal(recorded.calls, layout, CPU, dtype, backward=backward, **asked)

    return check


def flex_by_definition(query, key, value, *, score_mod, block_mask, scale, enable_gqa, return_aux):
    """FlexAttention without a compiler, which on a CPU knows neither gradients nor the log of the sum."""
    index = torch.arange(query.shape[2])
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scale
    if score_mod is not None:
        scores = score_mod(scores, None, None, None, None)
    keys = torch.arange(key.shape[2])
    scores = scores.masked_fill(~block_mask.mask_mod(None, None, index[:, None], keys[None, :]), -torch.inf)
    output = scores.softmax(-1) @ value
    return output if return_aux is None else (output, SimpleNamespace(lse=scores.logsumexp(-1)))


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", ["qwen3", "mistral", "gemma2", "gpt-oss"])
def test_what_is_made_of_the_compilers_attention_is_that_of_every_kind_of_layer(checked, monkeypatch, name, ranks):
    """Windows, capped scores and sinks, and lengths that are padded; whole passes and those that ranks share."""
    monkeypatch.setattr(layout_attention, "_compile_flex_attention", lambda: flex_by_definition)
    assert checked(layout_attention._run_flex_attention, name, ranks=ranks) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen3", "mistral", "gemma2", "gpt-oss"])
def test_a_kernel_that_gives_the_same_is_taken(checked, name, dtype):
    assert checked(right, name, dtype) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", [without_sinks, without_window, untrained_sinks])
def test_a_kernel_that_gives_something_else_is_not(checked, kernel, dtype):
    assert "is off by" in checked(kernel, dtype=dtype)


@pytest.mark.parametrize("kernel", [refused, refused_backwards])
def test_a_kernel_that_is_refused_is_not_and_it_is_said_why(checked, kernel):
    assert checked(kernel) == (
        "its attention cannot be compiled for this GPU: out of resource: shared memory, Required: 262144, "
        "Hardware limit: 232448"
    )


def test_a_model_that_only_judges_needs_no_backward_pass(checked):
    assert checked(refused_backwards, backward=False) is None


@pytest.mark.parametrize(
    ("pass_tokens", "ranks", "lengths"),
    [
        (0, 1, [1024]),
        (4097, 1, [1024, 4096, 8192]),
        (8192, 1, [1024, 4096, 8192]),
        (8192, 3, [1024, 4096, 8192, 16384]),
    ],
)
def test_a_kernel_is_tried_for_every_length_that_passes_will_have(checked, pass_tokens, ranks, lengths):
    tried = set()

    def kernel(query, key, value, visibility, form):
        tried.add(visibility.padded_length)
        return right(query, key, value, visibility, form)

    assert checked(kernel, pass_tokens=pass_tokens, ranks=ranks) is None
    assert sorted(tried) == lengths


def test_a_kernel_that_is_wrong_for_one_length_alone_is_refused(checked):
    def kernel(query, key, value, visibility, form):
        return right(query, key, value, visibility, form) * (1 + (visibility.padded_length == 4096))

    assert "is off by" in checked(kernel, pass_tokens=8192)


def test_a_kernel_that_is_wrong_for_one_of_the_ranks_alone_is_refused(checked):
    def kernel(query, key, value, visibility, form):
        return right(query, key, value, visibility, form) * (1 + (visibility.context.rank == 0))

    assert checked(right, ranks=2) is None
    assert "is off by" in checked(kernel, ranks=2)


def test_a_full_gpu_is_no_reason_to_compute_rows(checked):
    with pytest.raises(torch.OutOfMemoryError):
        checked(full)


def test_a_layer_of_every_kind_is_tried(make_model, make_group):
    (layout, *_) = PrefixTree(make_group(seed=3)).layouts(2000)
    model, recorded = LayoutModel(make_model("gpt-oss")), RecordingVisibility(layout, CPU)
    placed = PlacedLayout.of(layout, CPU)
    model(PlacedLayout(placed.input_ids, placed.position_ids, placed.predictors, placed.targets, recorded))
    assert [call.form.window for call in recorded.calls] == [7, None]


@pytest.mark.parametrize("trained", [True, False])
def test_a_model_whose_kernels_are_refused_computes_rows_with_its_own_attention(make_model, monkeypatch, trained):
    tried = []

    def check(calls, _, device, dtype, *, backward, pass_tokens, ranks):
        tried.append((len(calls), device, dtype, backward, pass_tokens, ranks))
        return "its attention cannot be compiled for this GPU: too wide"

    monkeypatch.setattr(layout_model, "find_refusal", check)
    lm = make_model("mistral").requires_grad_(trained)
    model = LayoutModel(lm, device=CUDA, dtype=torch.bfloat16, pass_tokens=5000, ranks=2)
    assert tried == [(1, CUDA, torch.bfloat16, trained, 5000, 2)]
    assert model.rows_only == "its attention cannot be compiled for this GPU: too wide"
    assert lm.config._attn_implementation == "sdpa"


def test_layers_are_compiled_whole_for_the_gpu_that_computes_them_wherever_their_weights_are_kept(
    make_model, monkeypatch
):
    compiled = []
    monkeypatch.setattr(layout_model, "find_refusal", lambda *_, **__: None)
    monkeypatch.setattr(torch, "compile", lambda forward, **_: compiled.append(forward) or forward)
    model = LayoutModel(make_model("mistral"), device=CUDA)
    with torch._dynamo.config.patch(optimize_ddp=True, suppress_errors=False):  # which are the process's
        model.compile_layers()
        assert get_optimize_ddp_mode() == "no_optimization"
    assert len(compiled) == model.model.config.num_hidden_layers


def test_a_kernel_that_one_rank_cannot_compile_is_left_to_none(make_model, monkeypatch):
    monkeypatch.setattr(layout_model, "find_refusal", lambda *_, **__: None)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", lambda box, **_: box)
    monkeypatch.setattr(
        torch.distributed, "all_gather_object", lambda said, ours: said.__setitem__(slice(None), [ours, "not here"])
    )
    lm = make_model("mistral")
    assert LayoutModel(lm, device=CUDA).rows_only == "not here"
    assert lm.config._attn_implementation == "sdpa"


def test_without_a_gpu_there_is_no_kernel_to_try(make_model, monkeypatch):
    monkeypatch.setattr(layout_model, "find_refusal", refused)
    assert LayoutModel(make_model("mistral")).rows_only is None
