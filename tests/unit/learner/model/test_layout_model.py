import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from support.forks import CONFIGS, MIXED, SHARED, VOCAB
from swarmq.errors import LearnerError
from swarmq.learner.model.layout_attention import NAME
from swarmq.learner.model.layout_model import LayoutModel, PlacedLayout
from swarmq.learner.model.loading import load_lm
from swarmq.timeline import Cost, PrefixTree, lay_rows, make_resolved_turn, plan_rows, unfold

CPU = torch.device("cpu")


def score(model, layout, **options):
    return model(PlacedLayout.of(layout, CPU), **options).logprobs


def neighbours(first_token):
    """Two episodes in one packed layout; the first one's prompt begins with `first_token`."""
    episodes = [
        [make_resolved_turn([first_token, 2, 3], [4, 5], [-1] * 2)],
        [make_resolved_turn([6, 7], [8, 9, 10], [-1] * 3)],
    ]
    (layout,) = plan_rows(episodes, budget=100)
    return layout


def test_changing_a_row_changes_nothing_for_its_neighbour(make_model):
    model = LayoutModel(make_model("mistral"))
    before, after = neighbours(1), neighbours(30)
    other = torch.from_numpy(before.episodes == 1)
    assert other.any()
    assert torch.equal(score(model, before)[other], score(model, after)[other])
    assert not torch.equal(score(model, before)[~other], score(model, after)[~other])


def test_no_gradient_flows_into_a_neighbour(make_model):
    model = LayoutModel(make_model("qwen3"))
    layout = neighbours(1)
    score(model, layout)[torch.from_numpy(layout.episodes == 1)].sum().backward()
    touched = model.model.get_input_embeddings().weight.grad.abs().sum(1) > 0
    ids = torch.from_numpy(layout.token_ids)
    mine = torch.isin(torch.arange(len(touched)), ids[:5] if layout.token_ids[0] == 6 else ids[5:])
    embedded = touched & torch.isin(torch.arange(len(touched)), ids)
    assert embedded.any()
    assert not (embedded & ~mine).any()


def test_changing_a_branch_changes_nothing_for_its_sibling(make_model):
    model = LayoutModel(make_model("gemma3"))
    scored = []
    for token in (20, 30):
        turns = [make_resolved_turn([1, 2, 3, token], [5, 6], [-1] * 2), make_resolved_turn([1, 2, 3, 7], [8], [-1])]
        (layout,) = PrefixTree([turns]).layouts(100)
        scored.append(score(model, layout)[torch.from_numpy(layout.turns == 1)])
    assert torch.equal(*scored)


def test_a_model_whose_state_runs_along_the_tokens_computes_rows_one_by_one_and_says_why(make_model):
    model = LayoutModel(make_model("qwen3-next"))
    assert model.rows_only == "it has layers of kind linear_attention"
    turns = [make_resolved_turn([1, 2, 3], [4, 5], [-1] * 2), make_resolved_turn([6, 7], [8, 9], [-1] * 2)]
    expected = torch.cat([score(model, lay_rows([(0, row)])) for row in unfold(turns)])
    (packed,) = plan_rows([turns], 100)
    assert torch.allclose(score(model, packed), expected, atol=1e-6)


def test_a_tree_given_to_such_a_model_is_refused(make_model):
    model = LayoutModel(make_model("qwen3-next"))
    (tree,) = PrefixTree([[make_resolved_turn([1, 2], [3], [-1]), make_resolved_turn([1, 2], [4], [-1])]]).layouts(100)
    with pytest.raises(LearnerError, match="only packed rows"):
        score(model, tree)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nemotron", "its layers do not hand the layout (visibility) on to their attention"),
        ("moshi", "its layers do not hand the layout (visibility) on to their attention"),
        (
            "doge",
            "a small example fails: the model passes its own mask, or several rows, to its attention in addition to the layout",
        ),
        ("phimoe", "its layers do not hand their sliding window (7 tokens) on to their attention"),
        ("llama4_text", "it has layers of kind chunked_attention"),
        ("electra", None),
    ],
)
def test_a_model_that_keeps_things_to_itself_is_computed_as_it_computes_itself(make_model, name, reason):
    model = LayoutModel(make_model(name).eval())
    assert model.rows_only == reason
    ids = list(range(1, 23))
    (layout,) = plan_rows(
        [[make_resolved_turn([7, 7], [8], [-1])], [make_resolved_turn(ids[:19], ids[19:], [-1] * 3)]], 100
    )
    logits = make_model(name).eval()(input_ids=torch.tensor([ids])).logits[0, 18:21]
    expected = logits.log_softmax(-1)[[0, 1, 2], ids[19:]]
    ours = score(model, layout)[torch.from_numpy(layout.episodes == 1)]
    assert torch.allclose(ours, expected, atol=1e-5)


def test_a_window_that_no_layer_uses_or_no_row_reaches_stands_in_no_ones_way(make_model):
    for beyond in ({"sliding_window": 256}, {"sliding_window": 7, "layer_types": ["full_attention"] * 3}):
        lm = make_model("phimoe")
        vars(lm.config).update(beyond)
        assert LayoutModel(lm).rows_only is None


def failing(error):
    def hook(*_):
        raise error

    return hook


def test_a_model_that_cannot_compute_an_example_is_refused(make_model):
    lm = make_model("llama")
    lm.model.layers[1].register_forward_hook(failing(IndexError("no such expert")))
    with pytest.raises(
        LearnerError, match="LlamaForCausalLM cannot compute a small example: IndexError: no such expert"
    ):
        LayoutModel(lm)


@pytest.mark.parametrize("error", [RuntimeError, KeyError, IndexError])
def test_whatever_goes_wrong_with_layouts_alone_leaves_the_model_its_rows(make_model, error):
    lm = make_model("llama")
    own = lm.model.layers[1].self_attn.forward
    config = lm.config

    def forward(*args, **kwargs):
        return failing(error("not so"))() if config._attn_implementation == NAME else own(*args, **kwargs)

    lm.model.layers[1].self_attn.forward = forward
    model = LayoutModel(lm)
    assert f"a small example fails: {error.__name__}: " in model.rows_only
    assert score(model, neighbours(1)).isfinite().all()


def test_a_gpu_that_is_full_says_nothing_about_the_model(make_model):
    lm = make_model("llama")
    lm.model.layers[1].register_forward_hook(failing(torch.OutOfMemoryError("full")))
    with pytest.raises(torch.OutOfMemoryError):
        LayoutModel(lm)


def test_a_model_that_mixes_tokens_behind_the_attentions_back_is_found_out(make_model):
    lm = make_model("llama")
    lm.model.layers[1].mlp.register_forward_hook(lambda _m, _i, out: out + out.cumsum(1))
    model = LayoutModel(lm)
    assert "a small example is off by" in model.rows_only
    assert lm.config._attn_implementation == "sdpa"


def test_a_head_that_does_something_of_its_own_is_found_out_and_still_computed(make_model):
    lm = make_model("llama")
    lm.lm_head.register_forward_hook(lambda _m, _i, out: out.sin())
    model = LayoutModel(lm)
    assert not model.head_apart
    assert model.rows_only is None
    (layout,) = plan_rows([[make_resolved_turn([1, 2, 3], [4, 5], [-1] * 2)]], 100)
    expected = make_model("llama")(input_ids=torch.tensor([[1, 2, 3, 4, 5]])).logits[0, 2:4].sin()
    expected = expected.log_softmax(-1)[[0, 1], [4, 5]]
    assert torch.allclose(score(model, layout), expected, atol=1e-5)


def test_a_model_prepared_for_layouts_refuses_to_be_called_without_one(make_model):
    model = LayoutModel(make_model("llama"))
    with pytest.raises(LearnerError, match="LayoutModel"):
        model.model(input_ids=torch.tensor([[1, 2, 3]]))


def test_attention_dropout_is_refused(make_model):
    lm = make_model("llama")
    model = LayoutModel(lm)
    for layer in lm.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with pytest.raises(LearnerError, match="dropout"):
        score(model, neighbours(1))


def test_a_model_that_is_another_one_while_it_is_trained_is_refused(make_model):
    lm = make_model("llama")
    for layer in lm.model.layers:
        layer.self_attn.attention_dropout = 0.5
    with pytest.raises(LearnerError, match="LlamaForCausalLM computes a small example differently in training mode"):
        LayoutModel(lm)


def test_checking_leaves_the_model_as_it_was(make_model):
    lm = make_model("llama")
    before = {name: value.clone() for name, value in lm.state_dict().items()}
    LayoutModel(lm)
    assert lm.training
    assert all(parameter.grad is None for parameter in lm.parameters())
    assert all(torch.equal(before[name], value) for name, value in lm.state_dict().items())


def test_temperature_may_differ_by_token(make_model):
    model = LayoutModel(make_model("llama"))
    layout = neighbours(1)
    temperatures = torch.linspace(0.5, 1.5, layout.num_trained)
    each = [score(model, layout, temperatures=float(t))[i] for i, t in enumerate(temperatures)]
    assert torch.allclose(score(model, layout, temperatures=temperatures), torch.stack(each), atol=1e-6)


def test_the_gradient_of_forks_is_the_same_to_the_bit_whichever_thread_is_first(make_model):
    """Hundreds of answers to one prompt: as many gradients meet at its last token."""
    model = LayoutModel(make_model("llama"))
    turns = [make_resolved_turn([1, 2, 3], [i % 48, i // 48], [-1] * 2) for i in range(600)]
    (layout,) = PrefixTree([turns]).layouts(2000)
    weights = torch.linspace(-1, 1, layout.num_trained)
    torch.set_num_threads(4)
    gradients = set()
    for _ in range(8):
        model.zero_grad()
        (score(model, layout) * weights).sum().backward()
        gradients.add(b"".join(p.grad.numpy().tobytes() for p in model.parameters()))
    assert len(gradients) == 1


def test_half_precision_by_autocast_stays_close_and_keeps_full_gradients(make_model):
    model = LayoutModel(make_model("llama"))
    layout = neighbours(1)
    with torch.autocast("cpu", torch.bfloat16):
        half = score(model, layout)
    half.sum().backward()
    assert half.dtype == torch.float32
    assert (half - score(model, layout)).abs().max() < 0.2
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


def test_the_cost_model_counts_parameters_inside_and_pairs(make_model):
    model = LayoutModel(make_model("llama"))
    inner = sum(p.numel() for name, p in model.model.named_parameters() if "embed" not in name)
    assert model.cost == Cost(token=2 * inner, pair=4 * 32 * 3)


@pytest.mark.parametrize(("name", "full", "windowed"), [("mistral", 0, 3), ("gemma2", 1, 2), ("gpt-oss", 1, 2)])
def test_the_cost_model_knows_which_layers_have_a_window(make_model, name, full, windowed):
    cost = LayoutModel(make_model(name)).cost
    assert (cost.pair, cost.windowed) == (4 * 32 * full, {7: 4 * 32 * windowed})


def test_what_is_computed_by_blocks_on_a_gpu_is_what_the_definition_says(make_group):
    from swarmq.learner.model.layout_attention import BLOCK, Visibility
    from swarmq.timeline.layout import build_mask

    group = make_group(seed=5, episodes=6, turns=40)
    (layout,) = PrefixTree(group).layouts(10_000)
    visibility = Visibility(layout, CPU, compiled=True)
    size = visibility.padded_length
    for window in (None, 50):
        mask = visibility.block_mask(window)
        index = torch.arange(size)
        exact = mask.mask_mod(None, None, index[:, None], index[None, :])
        assert torch.equal(
            exact[: layout.num_tokens, : layout.num_tokens], torch.from_numpy(build_mask(layout, window))
        )
        blocks = exact.reshape(size // BLOCK, BLOCK, size // BLOCK, BLOCK)
        computed = mask.to_dense()[0, 0].bool()
        real = -(-layout.num_tokens // BLOCK)
        assert real < size // BLOCK
        assert not (blocks.any(3).any(1) & ~computed)[:real].any()
        assert not computed[real:].any(), "padding is computed"
        whole = torch.zeros_like(computed)
        for q, count in enumerate(mask.full_kv_num_blocks[0, 0].tolist()):
            whole[q, mask.full_kv_indices[0, 0, q, :count].long()] = True
        assert not (whole & ~blocks.all(3).all(1)).any()
        assert computed.sum() < np.tril(np.ones((size // BLOCK,) * 2)).sum()


@pytest.mark.parametrize("family", ["gemma2", "gpt-oss"])
def test_a_model_that_is_kept_in_bf16_is_checked_as_precisely_as_any(family):
    """Many layers, and logits as large as real ones: rounding alone comes to more than a flaw would."""
    config, special = CONFIGS[family]
    many = {"num_hidden_layers": 36, "layer_types": ["sliding_attention", "full_attention"] * 18}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(**SHARED | special | many), attn_implementation="eager")
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(10)
    model = model.bfloat16()
    model.get_decoder().layers[0].input_layernorm.float()  # some are kept in FP32
    before = {name: (tensor.dtype, tensor.clone()) for name, tensor in model.named_parameters()}
    assert LayoutModel(model).rows_only is None
    for name, tensor in model.named_parameters():
        dtype, values = before[name]
        assert tensor.dtype == dtype, name
        assert torch.equal(tensor, values), name


@pytest.mark.parametrize("sharpness", [1.0, 30.0], ids=["small logits", "logits of 100"])
@pytest.mark.parametrize("family", ["gemma2", "vaultgemma"])
def test_soft_capped_attention_is_capped_as_engines_cap_it(family, sharpness, tmp_path):
    """transformers' default attention leaves the cap out, which a small example of a fresh model would not show."""
    save_capped(tmp_path, family, sharpness)
    model = LayoutModel(load_lm(str(tmp_path), gradient_checkpointing=False))
    assert model.rows_only is None
    assert capped_error(model, tmp_path, NAME) < 1e-4


@pytest.mark.parametrize("sharpness", [1.0, 30.0], ids=["small logits", "logits of 100"])
def test_rows_one_after_another_are_capped_too(sharpness, tmp_path):
    save_capped(tmp_path, "gemma2", sharpness)
    lm = load_lm(str(tmp_path), gradient_checkpointing=False)
    mix_tokens(lm)
    model = LayoutModel(lm)
    assert model.rows_only
    assert capped_error(model, tmp_path, "eager") < 1e-4


def mix_tokens(lm):
    """So that it cannot compute layouts."""
    lm.model.layers[1].mlp.register_forward_hook(lambda _m, _i, out: out + out.cumsum(1))


def save_capped(folder, family, sharpness):
    """Logits of attention reach 100 where queries are 30 times as large."""
    torch.manual_seed(0)
    special = {"layer_types": MIXED, "sliding_window": 32, "attn_logit_softcapping": 20.0, "head_dim": 8}
    lm = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SHARED | special))
    with torch.no_grad():
        for layer in lm.model.layers:
            layer.self_attn.q_proj.weight.mul_(sharpness)
    lm.save_pretrained(folder)


def capped_error(model, folder, attention):
    """The largest difference from transformers' own capped attention. `attention`: what the model is to compute with."""
    assert model.model.config._attn_implementation == attention
    ids = torch.arange(40) % VOCAB
    (layout,) = plan_rows([[make_resolved_turn(ids[:10].tolist(), ids[10:].tolist(), [-1.0] * 30)]], 100)
    exact = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    if model.rows_only:
        mix_tokens(exact)
    with torch.no_grad():
        expected = exact(input_ids=ids[None]).logits[0].log_softmax(-1)[9:-1].gather(1, ids[10:, None])[:, 0]
        return float((score(model.eval(), layout) - expected).abs().max())
