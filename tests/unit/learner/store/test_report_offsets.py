"""The number of the last report that is confirmed."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarmq.errors import LearnerError
from swarmq.learner.store.batch_log import BatchLog
from swarmq.learner.store.records import RunIdentity
from swarmq.learner.store.report_offsets import ReportOffsets


def test_a_disk_that_refuses_the_number_is_an_error_for_people(tmp_path: Path) -> None:
    """Not a bare OSError, which would be taken for a crash of the batch feeder and tried again without end."""
    log = BatchLog(tmp_path, RunIdentity(run="r", policy="main", model="m"))
    reports = ReportOffsets(tmp_path / "gone" / "reported", log)
    with pytest.raises(LearnerError, match="gone/reported"):
        reports.confirm(1)
    log.close()
