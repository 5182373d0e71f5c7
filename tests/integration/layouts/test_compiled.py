import pytest
import torch

from support.forks import make_group, make_model
from swarmq.learner.tree import LayoutModel, Placed
from swarmq.timeline import PrefixTree, row_layouts

CPU = torch.device("cpu")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of compilers
@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_flex_attention_computes_what_plain_attention_computes(name):
    """On a CPU the compiler knows the forward pass only; tests/gpu holds the backward pass too."""
    model = LayoutModel(make_model(name).eval())
    group = make_group(seed=1, episodes=5, turns=30)
    for layouts in (PrefixTree(group).layouts(1000), row_layouts(group, 1000)):
        for layout in layouts[:2]:
            with torch.no_grad():
                plain, compiled = (model(Placed.of(layout, CPU, compiled=c)).logprobs for c in (False, True))
            assert (plain - compiled).abs().max() < 1e-5
