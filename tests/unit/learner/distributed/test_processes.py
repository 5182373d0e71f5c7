"""The ranks of a learner: which of them failed first is said, whoever is heard of first."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from swarmq.config import Policy, SwarmJob
from swarmq.errors import LearnerError
from swarmq.learner.distributed import processes


@pytest.mark.parametrize(
    ("scripts", "says"),
    [
        (["exit 3", "sleep 0.2; kill -9 $$"], "rank 1 of 2 was killed by SIGKILL"),
        (["exit 3", "exec sleep 600"], "rank 0 of 2 ended with status 3"),
    ],
)
def test_a_rank_that_was_killed_is_named_and_not_those_that_it_took_along(
    monkeypatch: pytest.MonkeyPatch, scripts: list[str], says: str
) -> None:
    def started(_argv: Sequence[str], environment: Mapping[str, str], *_: object) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["sh", "-c", scripts[int(environment["RANK"])]])

    monkeypatch.setattr(processes, "_start", started)
    with pytest.raises(LearnerError, match=says):
        processes.run_ranks([], 2, cause_wait_s=60.0 if "kill -9" in scripts[1] else 0.1)


def test_a_job_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    job = SwarmJob(run="r", folder=str(tmp_path), policies={"main": Policy(model="m")})
    (tmp_path / "r" / "main" / "job.toml").mkdir(parents=True)
    with pytest.raises(LearnerError, match=r"r/main/job\.toml: Is a directory: check"):
        processes.write_job_file(job, "main")
