"""The examples of docs/how-to/rewards.md run."""

import re
from pathlib import Path

import pytest

from swarmq.rewards.helper import close_helpers
from swarmq.rewards.sandbox import find_working

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "rewards.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
EXAMPLES = [block for block in BLOCKS if "assert " in block]  # the other asks a model


def test_the_page_has_examples():
    assert len(EXAMPLES) == 2


@pytest.mark.parametrize("example", EXAMPLES, ids=["texts", "programs"])
def test_examples_run(example):
    if "Sandbox" in example and not find_working(("bubblewrap", "landlock"))[0]:
        pytest.skip("this host has no sandbox")
    exec(compile(example, str(PAGE), "exec"), {"__name__": "example"})
    close_helpers()
