import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig

from swarmq.learner.memory.outline import build_outline
from swarmq.learner.model import logprob_head
from swarmq.learner.model.logprob_head import (
    CPU_CHUNK,
    LmHead,
    LogitForm,
    find_top,
    get_head,
    score_candidates,
    score_hidden,
    score_logits,
)

TOKENS, WIDTH, VOCAB = 11, 6, 37
SO_LARGE_THAT_CHUNKS_HOLD_EIGHT_TOKENS = CPU_CHUNK // 8


def make_inputs(vocab=VOCAB):
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, requires_grad=True)
    weight = torch.randn(vocab, WIDTH, requires_grad=True)
    bias = torch.randn(vocab, requires_grad=True)
    return hidden, weight, bias, torch.randint(vocab, (TOKENS,)), torch.rand(TOKENS) + 0.5


@pytest.fixture
def inputs():
    return make_inputs()


def plainly(hidden, weight, bias, form, targets, temperatures):
    logits = (hidden @ weight.t() + bias) * form.multiplier
    if form.softcap is not None:
        logits = form.softcap * torch.tanh(logits / form.softcap)
    distribution = (logits / temperatures[:, None]).log_softmax(-1)
    entropy = -(distribution.exp() * distribution).sum(-1)
    return distribution.gather(1, targets[:, None])[:, 0], entropy


@pytest.mark.parametrize("vocab", [VOCAB, SO_LARGE_THAT_CHUNKS_HOLD_EIGHT_TOKENS])
@pytest.mark.parametrize("form", [LogitForm(), LogitForm(0.3, None), LogitForm(1.0, 2.0), LogitForm(0.5, 3.0)])
def test_chunks_give_the_plain_computation_and_its_gradient(form, vocab):
    hidden, weight, bias, targets, temperatures = make_inputs(vocab)
    scored = score_hidden(hidden, LmHead(weight, bias, form), targets, temperatures)
    expected, entropy = plainly(hidden, weight, bias, form, targets, temperatures)
    assert torch.allclose(scored.logprobs, expected, atol=1e-5)
    assert torch.allclose(scored.entropies, entropy, rtol=1e-4, atol=1e-5)
    upstream = torch.randn(TOKENS)
    ours = torch.autograd.grad((scored.logprobs * upstream).sum(), (hidden, weight, bias))
    theirs = torch.autograd.grad((expected * upstream).sum(), (hidden, weight, bias))
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).norm() < 2e-4 * b.norm()


@pytest.mark.parametrize("vocab", [VOCAB, SO_LARGE_THAT_CHUNKS_HOLD_EIGHT_TOKENS])
@pytest.mark.parametrize("form", [LogitForm(), LogitForm(0.5, 3.0)])
def test_several_candidates_of_a_position_have_the_plain_log_probabilities_and_gradient(form, vocab):
    hidden, weight, bias, _, temperatures = make_inputs(vocab)
    candidates = torch.randint(vocab, (TOKENS, 5))
    scored = score_candidates(hidden, LmHead(weight, bias, form), candidates, temperatures)
    expected = torch.stack(
        [plainly(hidden, weight, bias, form, of_rank, temperatures)[0] for of_rank in candidates.t()], dim=1
    )
    assert torch.allclose(scored, expected, atol=1e-5)
    upstream = torch.randn(TOKENS, 5)
    ours = torch.autograd.grad((scored * upstream).sum(), (hidden, weight, bias))
    theirs = torch.autograd.grad((expected * upstream).sum(), (hidden, weight, bias))
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).norm() < 2e-4 * b.norm()


@pytest.mark.parametrize("vocab", [VOCAB, SO_LARGE_THAT_CHUNKS_HOLD_EIGHT_TOKENS])
def test_the_likeliest_tokens_are_those_of_all_logits(vocab):
    hidden, weight, bias, _, temperatures = make_inputs(vocab)
    top = find_top(hidden, LmHead(weight, bias), temperatures, 4)
    every = ((hidden @ weight.t() + bias) / temperatures[:, None]).log_softmax(-1)
    assert torch.equal(top.ids, every.topk(4).indices)
    assert torch.allclose(top.logprobs, every.topk(4).values, atol=1e-5)


class LiveLogits(TorchDispatchMode):
    """Counts the numbers in all tensors of [tokens, vocab] that are alive at once."""

    def __init__(self, vocab):
        super().__init__()
        self.vocab, self.alive, self.peak = vocab, {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **kwargs or {})
        for each in made if isinstance(made, tuple | list) else [made]:
            if (
                isinstance(each, torch.Tensor)
                and each.ndim == 2
                and each.shape[0] != WIDTH
                and each.shape[1] == self.vocab
            ):
                storage = each.untyped_storage()
                if storage.data_ptr() not in self.alive:
                    self.alive[storage.data_ptr()] = each.numel()
                    weakref.finalize(storage, self.alive.pop, storage.data_ptr(), None)
        self.peak = max(self.peak, sum(self.alive.values()))
        return made


@pytest.mark.parametrize("form", [LogitForm(), LogitForm(0.5, 3.0)])
def test_candidates_and_the_likeliest_tokens_take_no_more_room_than_one_chunk_of_logits(form):
    hidden, weight, bias, _, temperatures = make_inputs(CPU_CHUNK // 8)
    candidates = torch.randint(len(weight), (TOKENS, 5))
    with LiveLogits(len(weight)) as live:
        score_candidates(hidden, LmHead(weight, bias, form), candidates, temperatures).sum().backward()
        find_top(hidden, LmHead(weight, bias, form), temperatures, 4)
    assert 0 < live.peak <= CPU_CHUNK


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("gemma2", "final_logit_softcapping"),
        ("vaultgemma", "final_logit_softcapping"),
        ("recurrent_gemma", "logits_soft_cap"),
        ("xlstm", "output_logit_soft_cap"),
    ],
)
def test_a_cap_of_the_logits_is_found_by_the_name_that_its_family_has_for_it(family, name):
    config = AutoConfig.for_model(family, num_hidden_layers=3, vocab_size=VOCAB, **{name: 7.0})
    assert get_head(build_outline(family, config)).form.softcap == 7.0


def test_a_rank_without_tokens_has_a_gradient_of_zeros(inputs):
    """A rank without work still takes part in the exchange of gradients."""
    hidden, weight, bias, _, _ = inputs
    none = torch.empty(0, dtype=torch.long)
    scored = score_hidden(hidden[:0], LmHead(weight, bias), none, torch.empty(0))
    scored.logprobs.sum().backward()
    assert not weight.grad.any()
    assert not bias.grad.any()


@pytest.mark.parametrize("vocab", [VOCAB, SO_LARGE_THAT_CHUNKS_HOLD_EIGHT_TOKENS])
def test_a_head_that_is_not_trained_costs_no_gradient_and_passes_the_same_on(vocab):
    hidden, weight, bias, targets, temperatures = make_inputs(vocab)

    def gradient(*head):
        asked = (hidden, *(each for each in head if each.requires_grad))
        logprobs = score_hidden(hidden, LmHead(*head), targets, temperatures).logprobs
        with FlopCounterMode(display=False) as counted:
            above, *_ = torch.autograd.grad(logprobs.sum(), asked)
        return above, counted.get_total_flops()

    trained, whole = gradient(weight, bias)
    frozen, part = gradient(weight.detach(), bias.detach())
    assert torch.equal(frozen, trained)
    assert whole - part == 2 * TOKENS * WIDTH * vocab


def test_entropies_carry_no_gradient(inputs):
    hidden, weight, bias, targets, temperatures = inputs
    assert not score_hidden(hidden, LmHead(weight, bias), targets, temperatures).entropies.requires_grad
    assert not score_logits(hidden @ weight.t(), targets, temperatures).entropies.requires_grad


def kept_for_backward(compute):
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        compute()
    return kept


def test_logits_never_exist_at_once():
    """Of so large a vocabulary the gradients of one chunk are kept, and those of no more."""
    hidden, weight, bias, targets, temperatures = make_inputs(SO_LARGE_THAT_CHUNKS_HOLD_EIGHT_TOKENS)
    kept = kept_for_backward(lambda: score_hidden(hidden, LmHead(weight, bias), targets, temperatures))
    made = sum(x.numel() for x in kept) - sum(x.numel() for x in (hidden, weight, bias, targets, temperatures))
    assert CPU_CHUNK <= made < CPU_CHUNK + 2 * TOKENS


def test_without_a_gradient_nothing_is_kept(inputs, monkeypatch):
    hidden, weight, bias, targets, temperatures = inputs
    asked = []
    monkeypatch.setattr(logprob_head, "_write_gradient", lambda *_: asked.append(1))
    with torch.no_grad():
        score_hidden(hidden, LmHead(weight, bias), targets, temperatures)
    assert not asked


@pytest.mark.parametrize("exact", [True, False])
def test_what_comes_out_the_same_to_the_bit_is_cut_alike_whatever_else_a_gpu_holds(exact, monkeypatch):
    gpu, sizes = torch.device("cuda"), []
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: exact)
    for free in (100 << 30, 10 << 30):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free, 139 << 30))
        monkeypatch.setattr(logprob_head, "get_free_bytes", lambda _, free=free: free)
        sizes.append((logprob_head._get_max_logits(gpu), logprob_head._get_max_kept_gradients(gpu, torch.bfloat16)))
    assert (sizes[0] == sizes[1]) is exact
