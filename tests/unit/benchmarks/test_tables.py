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


def test_the_matrix_has_a_row_for_every_version(tmp_path):
    text = "<!-- figures: matrix -->\n<!-- end of figures -->\n"
    assert "Not measured" in render(text, tmp_path)
    figures = {"injections": 3, "episodes_ended": 40, "lost": 0, "twice": 0, "hangs": 0, "longest_stall_s": 2.25}
    runs = [{"rabbitmq": version, "figures": figures, "passed": 9, "failed": 1} for version in ("3.10.8", "4.0.5")]
    record = {
        "hardware": "h",
        "command": "c",
        "commit": "abc",
        "date": "2026-01-02T",
        "figures": {},
        "detail": {"runs": runs},
    }
    (tmp_path / "faults_matrix.json").write_text(json.dumps(record))
    assert "| 4.0.5 | 3 | 40 | 0 | 0 | 0 | 2.2 s | 9 | 1 |" in render(text, tmp_path)


def test_parsing_has_a_row_for_every_answer_and_way(tmp_path):
    text = "<!-- figures: derender -->\n<!-- end of figures -->\n"
    assert render(text, tmp_path) == text
    told = {"portions": 9, "parsing_s": 0.5, "longest_gap_s": 0.25, "wait_p50_ms": 3.0}
    figures = {f"{key}_both_{way}": value for key, value in told.items() for way in ("eager", "paced")}
    detail = {"tokens": 10, "rate": 5.0, "answers": ["both"]}
    record = {"hardware": "h", "command": "c", "figures": figures, "detail": detail}
    (tmp_path / "derender.json").write_text(json.dumps(record))
    assert "| both | as the proxy does | 9 | 0.50 s | 0.25 s | 3.0 ms |" in render(text, tmp_path)
