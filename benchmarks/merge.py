"""One result of the parts that several GPUs or hosts have measured: `python -m benchmarks.merge NAME FOLDER...`

Reads NAME.json in each folder, and writes their figures and details together. Lists of runs are joined; a figure that two parts have must be
made again from the runs, and is left out. The parts must be of one commit.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import report


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("name")
    parser.add_argument("folders", type=Path, nargs="+")
    options = parser.parse_args()
    parts = [json.loads((folder / f"{options.name}.json").read_text()) for folder in options.folders]
    path: Path = (options.out or report.RESULTS) / f"{options.name}.json"
    path.write_text(json.dumps(merge(parts), indent=1) + "\n")
    print(path)


def merge(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the parts' records as one. Raises ValueError for parts of different commits or versions."""
    for key in ("commit", "versions"):
        if any(part[key] != parts[0][key] for part in parts):
            raise ValueError(f"the parts differ in {key}: {[part[key] for part in parts]}")
    names = [name for part in parts for name in part["figures"]]
    figures = {name: value for part in parts for name, value in part["figures"].items() if names.count(name) == 1}
    detail: dict[str, Any] = {}
    for part in parts:
        for key, value in part["detail"].items():
            detail[key] = detail[key] + value if isinstance(value, list) and key in detail else value
    told = {key: "; ".join(dict.fromkeys(part[key] for part in parts)) for key in ("command", "hardware")}
    return parts[0] | told | {"date": max(part["date"] for part in parts), "figures": figures, "detail": detail}


if __name__ == "__main__":
    main()
