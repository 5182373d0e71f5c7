"""Programs on several ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def launch(count: int, *program: str) -> None:
    """A program of tests/support and its arguments, on `count` ranks that share one machine; raises when one of them fails."""
    ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"] if count > 1 else []
    subprocess.run(
        [sys.executable, *ranks, *program],
        check=True,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{Path(__file__).parents[1]}:{os.environ.get('PYTHONPATH', '')}",
        },
        timeout=600,
    )
