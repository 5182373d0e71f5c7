import pytest
import torch

from support.forks import make_group, make_model
from swarmq.learner.model.attention_check import attend_as_ranks
from swarmq.learner.model.batched_attention import AttentionForm
from swarmq.learner.model.context_parallel import ContextGroup, cut_for_rank
from swarmq.learner.model.layout_attention import BLOCK, Visibility
from swarmq.learner.model.layout_model import LayoutModel, PlacedLayout
from swarmq.timeline import PrefixTree, plan_rows

CPU = torch.device("cpu")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of compilers
@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_flex_attention_computes_what_plain_attention_computes(name):
    """On a CPU the compiler knows the forward pass only; tests/gpu holds the backward pass too."""
    model = LayoutModel(make_model(name).eval())
    group = make_group(seed=1, episodes=5, turns=30)
    for layouts in (PrefixTree(group).layouts(1000), plan_rows(group, 1000)):
        for layout in layouts[:2]:
            with torch.no_grad():
                plain, compiled = (model(PlacedLayout.of(layout, CPU, compiled=c)).logprobs for c in (False, True))
            assert (plain - compiled).abs().max() < 1e-5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("window", [None, 50])
def test_flex_attention_computes_for_ranks_that_share_a_pass_what_it_does_for_one(window):
    (layout, *_) = PrefixTree(make_group(seed=1, episodes=5, turns=30)).layouts(1000)
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, layout.num_tokens, 8) for heads in (4, 2, 2))
    form, contexts = AttentionForm(0.3, window, None, None), [ContextGroup(3, rank) for rank in range(3)]
    ranks = [
        Visibility(layout, CPU, compiled=True, part=cut_for_rank(layout, each, block=BLOCK), context=each)
        for each in contexts
    ]
    with torch.no_grad():
        plain = Visibility(layout, CPU, compiled=False).attend(None, query, key, value, form)
        assert (attend_as_ranks(query, key, value, form, ranks) - plain).abs().max() < 1e-5
