"""No figure in the README or the docs that no file holds."""

import json

import pytest
from benchmarks.tables import PAGES, render


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_pages_say_what_the_result_files_say(page):
    text = page.read_text()
    assert render(text) == text, "run `python -m benchmarks.tables`"


def test_a_changed_figure_changes_the_table(tmp_path):
    text = "before\n<!-- figures: all -->\nold\n<!-- end of figures -->\nafter"
    record = {"hardware": "h", "command": "c", "figures": {"speedup": 5.5}}
    (tmp_path / "wire.json").write_text(json.dumps(record))
    first = render(text, tmp_path)
    assert "`speedup` | 5.5" in first
    assert "old" not in first
    (tmp_path / "wire.json").write_text(json.dumps(record | {"figures": {"speedup": 6.5}}))
    assert render(first, tmp_path) != first
