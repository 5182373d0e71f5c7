"""The tables of README.md, made from `results/*.json`: `python -m benchmarks.tables` writes them, a test compares."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS

README = Path(__file__).parent.parent / "README.md"
BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)


def render(text: str, results: Path = RESULTS) -> str:
    """`text` with every figures block made anew."""
    known = {path.stem: json.loads(path.read_text()) for path in sorted(results.glob("*.json"))}
    blocks = {"demo": demo_block, "all": all_block}
    return BLOCK.sub(lambda found: found[1] + "".join(blocks[found[2]](known)) + found[3], text)


def demo_block(known: dict[str, Any]) -> Iterator[str]:
    """Reward and accounts of the demo, a row for each seed."""
    if "demo" not in known:
        return
    record = known["demo"]
    yield f"\nThree seeds on {record['hardware']} (`{record['command']}`):\n\n"
    yield "| seed | held-out reward before | after | steps | training | episodes begun | trained | lost | trained twice |\n"
    yield "|---|---|---|---|---|---|---|---|---|\n"
    for run in record["detail"]["runs"]:
        held_out = {int(version): reward for version, reward in run["held_out"].items()}
        account = run["account"]
        cells = (
            run["seed"],
            f"{held_out[min(held_out)]:.3f}",
            f"{held_out[max(held_out)]:.3f}",
            run["steps"],
            f"{run['train_s']:.0f} s",
            account["begun"],
            account["trained"],
            len(account["lost"]),
            len(account["twice"]),
        )
        yield f"| {' | '.join(map(str, cells))} |\n"
    yield "\n"


def all_block(known: dict[str, Any]) -> Iterator[str]:
    """Every figure of every result, with its hardware and command."""
    for name, record in known.items():
        yield f"\n**{name}** on {record['hardware']}: `{record['command']}`\n\n| figure | value |\n|---|---|\n"
        for figure, value in record["figures"].items():
            yield f"| `{figure}` | {value:.4g} |\n"
    if known:
        yield "\n"


if __name__ == "__main__":
    README.write_text(render(README.read_text()))
