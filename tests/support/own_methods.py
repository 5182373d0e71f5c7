"""The methods that docs/how-to/own-methods.md tells to write."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "own-methods.md"
LOSS, ADVANTAGE = "my_methods:topr", "my_methods:above_median"
SCHEDULE, OPTIMIZER = "my_methods:inverse_root", "my_methods:sgd"
GROUPING = "my_methods:of_a_task"
FILTER, REWARD = "my_methods:surprising", "my_methods:cost_of_calls"


def write_own_methods(folder: Path) -> Path:
    """Write `my_methods.py` with all that the page has."""
    parts = re.findall(r"```python\n# my_methods.py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(parts) == 5
    path = folder / "my_methods.py"
    path.write_text("\n\n".join(parts))
    return path
