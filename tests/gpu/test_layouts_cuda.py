"""The compiled layers, attention and head on a GPU against the untouched model, turn by turn."""

import itertools

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, Gemma2Config, GptOssConfig, MistralConfig, Qwen3Config

from swarmq.learner.model.activation_checkpointing import ActivationCheckpointing
from swarmq.learner.model.layout_attention import list_padded_lengths
from swarmq.learner.model.layout_model import LayoutModel, PlacedLayout
from swarmq.learner.model.logprob_head import LmHead, LogitForm, score_hidden
from swarmq.timeline import PrefixTree, make_resolved_turn, plan_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),  # compilers warn about many things
]

SHAPE = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.1,
}
CONFIGS = {
    "qwen3": Qwen3Config(**SHAPE),
    "mistral": MistralConfig(**SHAPE, sliding_window=100),
    "gemma2": Gemma2Config(**SHAPE, sliding_window=100, query_pre_attn_scalar=32),
    "gpt-oss": GptOssConfig(**SHAPE, sliding_window=100, num_local_experts=4, num_experts_per_tok=2),  # attention sinks
}


def build(name, dtype=torch.float32, device="cuda"):
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(
            CONFIGS[name], dtype=dtype, attn_implementation="eager", experts_implementation="eager"
        ).train()


def group(branches=3, depth=4, size=40):
    """An agent that talks for a while, then forks; twice, with the same prompt. `size`: tokens of a turn."""
    generator = torch.Generator().manual_seed(0)

    def tokens():
        return torch.randint(512, (size,), generator=generator).tolist()

    def talk(history):
        turns = []
        for _ in range(depth):
            turns.append(make_resolved_turn(history, tokens(), [-1.0] * size))
            history = [*turns[-1].token_ids.tolist(), *tokens()]
        return turns, history

    prompt = tokens()
    episodes = []
    for _ in range(2):
        trunk, history = talk(prompt)
        episodes.append([*trunk, *itertools.chain(*(talk([*history, *tokens()])[0] for _ in range(branches)))])
    return episodes


def oracle(model, episodes):
    logprobs = []
    for turn in itertools.chain(*episodes):
        ids = torch.tensor(turn.token_ids.tolist(), device="cuda")
        logits = model(input_ids=ids[None], use_cache=False).logits[0, turn.prompt_length - 1 : -1].float()
        logprobs.append(logits.log_softmax(-1).gather(1, ids[turn.prompt_length :, None])[:, 0])
    return in_turn(torch.cat(logprobs), model)


def computed(model, layouts):
    parts = [model(PlacedLayout.of(layout, torch.device("cuda"))).logprobs for layout in layouts]
    keys = [
        key
        for layout in layouts
        for key in zip(layout.episodes.tolist(), layout.turns.tolist(), layout.offsets.tolist(), strict=True)
    ]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    return in_turn(torch.cat(parts)[order], model.model)


def in_turn(logprobs, model):
    (logprobs * torch.arange(len(logprobs), device="cuda").sin()).sum().backward()
    return logprobs.detach(), torch.cat([p.grad.float().flatten() for p in model.parameters()])


@pytest.mark.parametrize("way", ["rows", "tree"])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("others_kept", [0, 1])
def test_log_probabilities_and_gradient_are_the_oracles(name, way, others_kept, monkeypatch):
    episodes = group()
    logprobs, gradient = oracle(build(name), episodes)
    layouts = PrefixTree(episodes).layouts(2000) if way == "tree" else plan_rows(episodes, 2000)
    assert len(layouts) > 1
    model = LayoutModel(build(name))
    assert model.rows_only is None
    model.compile_layers()
    monkeypatch.setattr(ActivationCheckpointing, "_count_layers_to_keep", lambda *_: others_kept)
    ActivationCheckpointing.enable(model.model)
    ours, our_gradient = computed(model, layouts)
    assert (our_gradient - gradient).norm() / gradient.norm() < 1e-5
    exact, _ = oracle(build(name).double(), episodes)
    assert (ours - exact).abs().max() < 2 * (logprobs - exact).abs().max()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_is_still_on_the_cpu_is_checked_with_the_kernels_that_will_train_it(name, dtype):
    assert LayoutModel(build(name, device="cpu"), device=torch.device("cuda"), dtype=dtype).rows_only is None


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("autocast", [False, True])
def test_attention_is_compiled_before_the_first_pass(name, autocast):
    torch.compiler.reset()
    episodes = [PrefixTree(group(size=size)).layouts(4000) for size in (10, 40, 90)]
    assert {len(list_padded_lengths(layout.num_tokens)) for layouts in episodes for layout in layouts} == {1, 2}
    model = LayoutModel(build(name), dtype=torch.bfloat16 if autocast else torch.float32, pass_tokens=4000)
    compiled = counters["stats"]["unique_graphs"]
    assert compiled
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        for layout in itertools.chain(*episodes):
            model(PlacedLayout.of(layout, torch.device("cuda"))).logprobs.sum().backward()
    assert counters["stats"]["unique_graphs"] == compiled


@pytest.mark.parametrize("way", ["rows", "tree"])
def test_half_precision_differs_by_rounding_alone(way):
    episodes = group()
    exact, _ = oracle(build("qwen3"), episodes)
    model = LayoutModel(build("qwen3", torch.bfloat16))
    logprobs, _ = computed(model, PrefixTree(episodes).layouts(4000) if way == "tree" else plan_rows(episodes, 4000))
    plain, _ = oracle(build("qwen3", torch.bfloat16), episodes)
    assert (logprobs - exact).abs().mean() < 1.5 * (plain - exact).abs().mean()


@pytest.mark.parametrize("name", ["qwen3", "mistral"])
def test_kept_and_recomputed_layers_of_packed_rows_give_the_same_gradient_in_half_precision(name, monkeypatch):
    """FlashAttention computes these rows, if it is installed."""
    layouts, outcomes = plan_rows(group(), 2000), []
    for others_kept in (0, 1):
        model = LayoutModel(build(name, torch.bfloat16))
        model.compile_layers()
        with monkeypatch.context() as patch:
            patch.setattr(ActivationCheckpointing, "_count_layers_to_keep", lambda *_, kept=others_kept: kept)
            ActivationCheckpointing.enable(model.model)
            outcomes.append(computed(model, layouts))
    (recomputed, gradient_recomputed), (kept, gradient_kept) = outcomes
    assert (recomputed - kept).abs().max() < 1e-3
    assert (gradient_recomputed - gradient_kept).norm() < 0.02 * gradient_kept.norm()


@pytest.mark.parametrize("chunk", [1, 4, None], ids=["one gradient kept", "some kept", "all kept"])
@pytest.mark.parametrize("form", [LogitForm(), LogitForm(0.3, None), LogitForm(1.0, 2.0)])
def test_the_heads_kernels_give_the_plain_computation_and_its_gradient(form, chunk):
    tokens, width, vocab = 301, 16, 5003
    torch.manual_seed(0)
    exact = [
        torch.randn(size, device="cuda", dtype=torch.float64) / 2 for size in ((tokens, width), (vocab, width), vocab)
    ]
    targets, temperatures = torch.randint(vocab, (tokens,), device="cuda"), torch.rand(tokens, device="cuda") + 0.5
    upstream = torch.randn(tokens, device="cuda")

    hidden, weight, bias = (x.clone().requires_grad_() for x in exact)
    logits = (hidden @ weight.t() + bias) * form.multiplier
    if form.softcap is not None:
        logits = form.softcap * torch.tanh(logits / form.softcap)
    distribution = (logits / temperatures[:, None]).log_softmax(-1)
    expected = distribution.gather(1, targets[:, None])[:, 0]
    entropy = -(distribution.exp() * distribution).sum(-1)
    gradient = torch.autograd.grad((expected * upstream).sum(), (hidden, weight, bias))

    hidden, weight, bias = (x.float().requires_grad_() for x in exact)
    scored = score_hidden(hidden, LmHead(weight, bias, form), targets, temperatures, chunk=chunk)
    ours = torch.autograd.grad((scored.logprobs * upstream).sum(), (hidden, weight, bias))
    assert (scored.logprobs - expected).abs().max() < 1e-5
    assert (scored.entropies - entropy).abs().max() < 1e-5
    for a, b in zip(ours, gradient, strict=True):
        assert (a - b).norm() < 1e-5 * b.norm()
