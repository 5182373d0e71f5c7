"""One learner at a time, and one that was replaced while it stood still finds out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from swarmq.errors import LearnerError
from swarmq.learner.store.writer_lock import Fence, hold_lock


def test_a_second_holder_is_refused_and_told_who_has_it(tmp_path: Path) -> None:
    held, wanted = hold_lock(tmp_path / "lock"), hold_lock(tmp_path / "lock")
    with held, pytest.raises(LearnerError, match=f"process {os.getpid()} on "), wanted:
        pass
    with hold_lock(tmp_path / "lock"):
        pass


def test_a_lock_is_waited_for_when_asked(tmp_path: Path) -> None:
    with hold_lock(tmp_path / "lock"), pytest.raises(LearnerError), hold_lock(tmp_path / "lock", wait_s=0.01):
        pass


def test_a_lock_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "lock").mkdir()
    with pytest.raises(LearnerError, match="lock: Is a directory: check"), hold_lock(tmp_path / "lock"):
        pass


@pytest.mark.parametrize("lapse", ["the file was removed", "the file system forgot the lock"])
def test_a_holder_that_was_replaced_is_stopped_by_its_fence(tmp_path: Path, lapse: str) -> None:
    path = tmp_path / "lock"
    with hold_lock(path):
        fence = Fence(path)
        fence.check()
        path.rename(tmp_path / "lapsed")
        if lapse == "the file system forgot the lock":
            path.write_bytes((tmp_path / "lapsed").read_bytes())
        with (
            hold_lock(path),
            pytest.raises(
                LearnerError,
                match=f"{tmp_path} was taken over by process {os.getpid()} on .* without changing anything",
            ),
        ):
            fence.check()
