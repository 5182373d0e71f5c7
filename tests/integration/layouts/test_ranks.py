import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from swarmq.timeline import PrefixTree, lay_rows, unfold

SCRIPT = Path(__file__).with_name("on_ranks.py")


@pytest.mark.slow
def test_two_ranks_make_the_gradient_of_one_and_of_the_oracle(tmp_path):
    spec = importlib.util.spec_from_file_location("on_ranks", SCRIPT)
    on_ranks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(on_ranks)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run(
        [*launch, str(SCRIPT), str(tmp_path / "gradient")],
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=280,
    )
    together = torch.load(tmp_path / "gradient")
    batch = on_ranks.batch()
    oracle = on_ranks.alone([lay_rows([(e, row)]) for e, turns in enumerate(batch) for row in unfold(turns)])
    single = on_ranks.alone(PrefixTree(batch).layouts(on_ranks.BUDGET))
    for other in (oracle, single):
        assert (together - other).norm() < 1e-5 * other.norm()
