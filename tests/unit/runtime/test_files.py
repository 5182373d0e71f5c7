"""Files of lines that others append to, too, and that a full disk has cut."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarmq.runtime.files import LineFile


def test_a_line_that_was_cut_costs_that_line_alone(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"first\ncut he")
    lines = LineFile(path)
    lines.append(b"second")
    lines.append(b"third")
    assert path.read_bytes() == b"first\ncut he\nsecond\nthird\n"


def test_a_disk_without_room_is_an_error_and_the_next_line_is_whole() -> None:
    with pytest.raises(OSError, match="No space left"):
        LineFile(Path("/dev/full")).append(b"line")
