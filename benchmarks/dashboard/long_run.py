"""Time and memory of the index of a run with ten million sampled tokens, and time until a page of tokens is read.

The run is made by the parts that make real ones; the index is built in a process of its own. Example:

    python -m benchmarks.dashboard.long_run --episodes 5000 --turns 10 --tokens 200
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import report
from benchmarks.dashboard.large_run import make_run

READER = """
import json, resource, sys, time
from pathlib import Path
from swarmq.config import RunFolder
from swarmq.observe.episodes import read_tokens
from swarmq.observe.index import EpisodeFilter, RunIndex

index = RunIndex(RunFolder(Path(sys.argv[1])), cache=Path(sys.argv[2]))
began = time.perf_counter()
index.update()
index_s = time.perf_counter() - began
index_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
ledger = index.ledger()
assert ledger.is_balanced
[row] = index.page(EpisodeFilter(state="trained"), limit=1).rows
began = time.perf_counter()
page = read_tokens(index, row.id, limit=2000)
page_s = time.perf_counter() - began
sampled = index.query("SELECT sum(sampled_tokens) FROM episodes")[0][0]
print(json.dumps({"sampled_tokens": sampled, "begun": ledger.begun, "index_s": index_s, "index_rss_mb": index_mb,
                  "tokens_page_s": page_s, "index_mb": index.path.stat().st_size / 1e6}))
"""


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--episodes", type=int, default=5000)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=200, help="sampled tokens of a turn; as many are given")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        began = time.perf_counter()
        folder = make_run(Path(scratch), episodes=arguments.episodes, turns=arguments.turns, tokens=arguments.tokens)
        print(f"made in {time.perf_counter() - began:.0f} s", flush=True)
        command = [sys.executable, "-c", READER, str(folder.path), f"{scratch}/cache"]
        figures = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        run_mb = sum(path.stat().st_size for path in folder.path.rglob("*") if path.is_file()) / 1e6
    figures |= {"run_mb": run_mb}
    print(report.table(["figure", "value"], list(figures.items())))
    report.save("dashboard_tokens", figures, out=arguments.out)


if __name__ == "__main__":
    main()
