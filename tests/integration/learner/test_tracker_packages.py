"""W&B, MLflow and trackio as they are, without a network: each has every figure, read back from its own files.

They are installed on first use in a folder under `.cache`, because together they are 170 MB.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from support import trackers_process
from support.clients import install_into, install_once
from swarmq.learner.train.samples import COLUMNS, MAX_MESSAGE

REQUIREMENTS = Path(__file__).with_name("trackers.txt")
TESTS = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of the trackers, and what their own readers find in it."""
    install = [*install_into(sys.executable), "--no-deps", "-r", str(REQUIREMENTS)]
    version = f"{REQUIREMENTS.read_text()}{sys.version_info[:2]}"
    packages = install_once("trackers", version, lambda folder: [*install, "--target", str(folder)])
    folder = tmp_path_factory.mktemp("trackers")
    source = Path(sys.modules["swarmq"].__file__ or "").parents[1]
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("WANDB", "MLFLOW", "TRACKIO"))},
        "PYTHONPATH": os.pathsep.join(map(str, (source, TESTS, packages))),
        "HOME": str(folder),
    }
    command = [sys.executable, trackers_process.__file__, str(folder), str(folder / "read.json")]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder, msgspec.json.decode((folder / "read.json").read_bytes())


def evaluated(names: Any) -> dict[str, Any]:
    return {name: value for name, value in names.items() if name.startswith("eval/")}


EXPECTED = {"eval/version": 1, "eval/reward": 0.5, "eval/pass_at_1": 0.5, "eval/by_kind/math/pass_at_1_high": 0.9}


def test_wandb_draws_a_late_evaluation_at_the_version_that_was_evaluated(stored: tuple[Path, dict[str, Any]]) -> None:
    wandb = stored[1]["wandb"]
    assert wandb["axes"] == {"eval/*": "eval/version"}
    rows = [row for row in wandb["rows"] if "reward" in row]
    assert [(row["_step"], row["reward"]) for row in rows] == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)]
    ((step, evaluation),) = ((row["_step"], found) for row in wandb["rows"] if (found := evaluated(row)))
    assert step == 3, "W&B refuses values of steps before its newest one"
    assert evaluation.items() >= EXPECTED.items()
    assert [value for name, value in evaluation.items() if "/metrics/tool_calls-" in name] == [2.5]


def test_wandb_has_a_table_of_conversations_in_which_hostile_text_is_text_and_huge_text_is_cut(
    stored: tuple[Path, dict[str, Any]],
) -> None:
    (table,) = stored[1]["wandb"]["tables"]
    assert table["columns"] == COLUMNS
    assert [row[COLUMNS.index("reward")] for row in table["data"]] == [0.0, 1.0]
    for row in table["data"]:
        assert row[-1].startswith("[user] <script>␛[2Jxxx")
        assert len(row[-1]) < MAX_MESSAGE + 100


def test_mlflow_has_every_step_and_the_evaluation_at_its_version(stored: tuple[Path, dict[str, Any]]) -> None:
    mlflow = stored[1]["mlflow"]
    assert mlflow["reward"] == [[1, 0.25], [2, 0.5], [3, 0.75], [4, 1.0]]
    assert {name: mlflow[name] for name in EXPECTED} == {name: [[1, value]] for name, value in EXPECTED.items()}
    (means,) = (points for name, points in mlflow.items() if name.startswith("metrics_by_kind/math/tool_calls-"))
    assert means == [[1, 1.0], [2, 2.0], [3, 3.0]]


def test_trackio_has_every_step_and_the_evaluation_at_its_version(stored: tuple[Path, dict[str, Any]]) -> None:
    rows = stored[1]["trackio"]
    assert sorted((row["step"], row["reward"]) for row in rows if "reward" in row) == [
        (1, 0.25),
        (2, 0.5),
        (3, 0.75),
        (4, 1.0),
    ]
    ((step, evaluation),) = ((row["step"], found) for row in rows if (found := evaluated(row)))
    assert step == 1
    assert evaluation.items() >= EXPECTED.items()


def test_tensorboard_beside_the_others_has_the_evaluation_at_its_version(stored: tuple[Path, dict[str, Any]]) -> None:
    read = EventAccumulator(str(stored[0] / "r.main")).Reload()
    points = {name: [(one.step, one.value) for one in read.Scalars(name)] for name in EXPECTED}
    assert points == {name: [(1, pytest.approx(value))] for name, value in EXPECTED.items()}
