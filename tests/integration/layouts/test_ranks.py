"""Two ranks make the gradient of one and of the oracle, for several architectures and random groups that fork."""

from pathlib import Path

import pytest
import torch

from support import layout_ranks
from support.forks import make_group
from support.launch import launch
from swarmq.timeline import PrefixTree, lay_rows, unfold


@pytest.mark.slow
def test_two_ranks_make_the_gradient_of_one_and_of_the_oracle(tmp_path: Path) -> None:
    launch(2, layout_ranks.__file__, str(tmp_path / "gradients"))
    together = torch.load(tmp_path / "gradients")
    for name, seed in layout_ranks.CASES:
        group = make_group(seed)
        unfolded = [lay_rows([(e, row)]) for e, turns in enumerate(group) for row in unfold(turns)]
        for layouts in (unfolded, PrefixTree(group).layouts(layout_ranks.BUDGET)):
            other = layout_ranks.alone(name, layouts)
            assert (together[name] - other).norm() < 1e-5 * other.norm(), name
