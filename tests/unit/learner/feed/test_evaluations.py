"""Results of evaluations wait on disk, are known when they come again, and survive a damaged file."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarmq.errors import LearnerError
from swarmq.learner.feed.evaluations import MAX_KNOWN, WaitingEvaluations
from swarmq.messages import Evaluation


def evaluation(number: int) -> Evaluation:
    return Evaluation(run="r", version=number, began_at=float(number), results={"kinds": {}})


def test_results_wait_in_order_and_are_known_after_they_are_logged(tmp_path: Path) -> None:
    path = tmp_path / "evaluations"
    waiting = WaitingEvaluations(path)
    for number in (1, 2, 1):
        waiting.add(evaluation(number))
    assert waiting.first == evaluation(1)
    waiting = WaitingEvaluations(path)
    waiting.mark_logged(1.0)
    waiting.add(evaluation(1))
    assert WaitingEvaluations(path).first == evaluation(2)
    waiting.mark_logged(7.0)
    assert WaitingEvaluations(path).first == evaluation(2), "nobody waits for this one"


def test_the_file_stays_small(tmp_path: Path) -> None:
    waiting = WaitingEvaluations(tmp_path / "evaluations")
    for number in range(MAX_KNOWN + 5):
        waiting.add(evaluation(number))
        waiting.mark_logged(float(number))
    assert len(waiting._kept.logged) == MAX_KNOWN
    assert waiting._kept.logged[-1] == MAX_KNOWN + 4


def test_a_damaged_file_is_set_aside_and_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    path = tmp_path / "evaluations"
    path.write_bytes(b"\xc1")
    waiting = WaitingEvaluations(path)
    assert waiting.first is None
    assert path.with_name("evaluations.damaged").exists()
    gone = WaitingEvaluations(tmp_path / "none" / "evaluations")
    with pytest.raises(LearnerError, match="none/evaluations"):
        gone.add(evaluation(1))
