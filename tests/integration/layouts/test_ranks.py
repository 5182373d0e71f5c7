"""Two ranks make the gradient of one and of the oracle, for several architectures and random groups that fork."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.forks import make_group
from swarmq.timeline import PrefixTree, lay_rows, unfold

SCRIPT = Path(__file__).with_name("on_ranks.py")


@pytest.mark.slow
def test_two_ranks_make_the_gradient_of_one_and_of_the_oracle(tmp_path):
    spec = importlib.util.spec_from_file_location("on_ranks", SCRIPT)
    on_ranks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(on_ranks)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    tests = str(SCRIPT.parents[2])
    subprocess.run(
        [*launch, str(SCRIPT), str(tmp_path / "gradients")],
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{tests}:{os.environ.get('PYTHONPATH', '')}"},
        timeout=800,
    )
    together = torch.load(tmp_path / "gradients")
    for name, seed in on_ranks.CASES:
        group = make_group(seed)
        unfolded = [lay_rows([(e, row)]) for e, turns in enumerate(group) for row in unfold(turns)]
        for layouts in (unfolded, PrefixTree(group).layouts(on_ranks.BUDGET)):
            other = on_ranks.alone(name, layouts)
            assert (together[name] - other).norm() < 1e-5 * other.norm(), name
