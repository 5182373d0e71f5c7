"""What people watch: every figure of every step reaches the tracker, and a missing package is said by name."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from support.episodes import make_group
from swarmq.config import Policy, SwarmJob, Train
from swarmq.errors import LearnerError
from swarmq.learner.feed.batch_summary import batch_metrics, sum_episodes
from swarmq.learner.feed.ipc import StopSignal
from swarmq.learner.store.records import BatchIndex, BatchReady, BatchRecord, EvaluationLogged, encode_record
from swarmq.learner.train.loop import Learner
from swarmq.learner.train.tracker_packages import check_trackers
from swarmq.learner.train.trackers import Trackers, evaluation_figures, flatten, tracker_folders
from swarmq.learner.train.trainer import Trainer
from swarmq.messages import Evaluation
from swarmq.weights.push.pusher import PushReport

TRAIN = Train(gradient_checkpointing=False, ratio_band=(0.9, 1.1), token_log=False)
LOGGED_EVERY_STEP = {
    "reward", "reward_by_kind/default", "success_by_kind/default", "kl_k3", "gap_p99", "effective_samples",
    "masked_positive", "masked_negative", "clipped_positive", "clipped_negative", "filtered_positive",
    "filtered_negative", "kl_reference", "entropy", "grad_norm", "staleness/0", "truncated", "equal_groups", "partial_groups", "length_penalised", "tokens_sampled",
    "tokens_computed", "drifted", "branches/history_edited", "tokens_per_s", "mfu", "train_s", "loss", "learning_rate",
}  # fmt: skip
"""Of a step."""
LOGGED_BY_THE_LOOP = {
    "folding",
    "wait_s",
    "push_s",
    "pause_s",
    "pauses/engine_0",
    "pauses/engine_1",
    "step_s",
    "replayed",
}
NAME = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*")
"""What every tracker takes."""


class OneBatch:
    """In the place of the batch feeder: hands out one batch, then says that it was the last."""

    def __init__(self, record: BatchRecord) -> None:
        self.left: list[BatchReady] = [
            BatchReady(record=encode_record(record), replayed=False, figures=batch_metrics(record, []))
        ]
        self.told: list[object] = []

    def next(self, **_: object) -> BatchReady | None:
        return self.left.pop() if self.left else None

    def send(self, message: object) -> None:
        self.told.append(message)

    def finish(self) -> None:
        pass


class TwoEngines:
    failing: Mapping[str, str] = {}

    def repair(self, named_tensors: Iterable[Any], version: int) -> None:
        pass

    def push(self, named_tensors: Iterable[Any], version: int) -> PushReport:
        list(named_tensors)
        return PushReport(version=version, pause_s=0.2, pauses={"engine_0": 0.1, "engine_1": 0.2})


def test_every_figure_of_the_loop_reaches_a_tracker_under_a_name_that_all_trackers_take(
    tiny_qwen: Path, tmp_path: Path
) -> None:
    train = msgspec.structs.replace(TRAIN, trackers=("tensorboard",))
    episodes = tuple(
        msgspec.structs.replace(e, kind="maths: 10 % (hard)//..", code_version="v1 (dirty) http://host:80")
        for e in make_group("a", (0.0, 1.0), success=True)
    )
    record = BatchRecord(
        index=BatchIndex(record=1, version=1, tally=sum_episodes(episodes)), episodes=episodes, settings=train
    )
    job = SwarmJob(run="r", folder=str(tmp_path), policies={"main": Policy(model=str(tiny_qwen), train=train)})
    learner = Learner(job, "main", pusher=TwoEngines(), stop=StopSignal())
    with capture_logs() as logs:
        learner.run(OneBatch(record))
    assert logs[-1] == {"event": "ended", "version": 1, "reason": "train.max_steps", "log_level": "info"}
    tags = set(EventAccumulator(str(job.run_folder.trackers("main") / "r.main")).Reload().Tags()["scalars"])
    assert tags >= LOGGED_BY_THE_LOOP
    assert [name for name in tags if not NAME.fullmatch(name)] == []
    assert any(name.startswith("reward_by_kind/maths") for name in tags)


def test_an_evaluation_that_comes_twice_is_logged_once_and_confirmed_twice(tiny_qwen: Path, tmp_path: Path) -> None:
    """The second one is from a batch feeder that died before it noted the confirmation."""

    class Evaluated(OneBatch):
        def next(self, *, evaluated: Callable[[Evaluation], None], **_: object) -> BatchReady | None:
            for began_at in (1.0, 1.0, 2.0):
                evaluated(Evaluation(run="r", version=int(began_at), began_at=began_at, results=ROUND))
            self.left.clear()
            return super().next()

    train = msgspec.structs.replace(TRAIN, trackers=("tensorboard",))
    record = BatchRecord(index=BatchIndex(record=1, version=1), settings=train)
    job = SwarmJob(run="r", folder=str(tmp_path), policies={"main": Policy(model=str(tiny_qwen), train=train)})
    link = Evaluated(record)
    Learner(job, "main", pusher=None, stop=StopSignal()).run(link)
    confirmed = [message.began_at for message in link.told if isinstance(message, EvaluationLogged)]
    assert confirmed == [1.0, 1.0, 2.0]
    read = EventAccumulator(str(job.run_folder.trackers("main") / "r.main")).Reload()
    assert [(point.step, point.value) for point in read.Scalars("eval/reward")] == [(1, 0.625), (2, 0.625)]


def test_trackers_write_into_the_run_folder_unless_the_user_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are told by their own environment variables: W&B and SwanLab would write into the current directory."""
    folder = tmp_path / "trackers"
    for name in tracker_folders(folder):
        monkeypatch.setenv(name, "")  # so that it is put back in the end
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_DIR", "/mine")
    Trackers(Accelerator(), Train(trackers=("tensorboard",)), run="r", policy="main", folder=folder).close()
    told = {name: os.environ[name] for name in tracker_folders(folder)}
    assert told == tracker_folders(folder) | {"WANDB_DIR": "/mine"}
    assert all(str(folder) in place for place in tracker_folders(folder).values())


def test_tensorboard_gets_every_figure_of_a_step(tiny_qwen: Path, tmp_path: Path) -> None:
    group = make_group("a", (0.0, 1.0), success=True)
    first, *rest = group[0].turns
    turns = (first, *(msgspec.structs.replace(turn, branch="history_edited") for turn in rest))
    episodes = (msgspec.structs.replace(group[0], turns=turns), group[1])
    record = BatchRecord(
        index=BatchIndex(record=1, version=1, tally=sum_episodes(episodes)), episodes=episodes, settings=TRAIN
    )
    trainer = Trainer(str(tiny_qwen), TRAIN)
    trackers = Trackers(trainer.accelerator, TRAIN, run="r", policy="main", folder=tmp_path)
    trackers.log(1, batch_metrics(record, []) | trainer.step(record))
    trackers.close()
    read = EventAccumulator(str(tmp_path / "r.main")).Reload()
    assert set(read.Tags()["scalars"]) >= LOGGED_EVERY_STEP
    (point,) = read.Scalars("reward")
    assert (point.step, point.value) == (1, 0.5)


def test_a_tracker_is_installed_where_accelerate_finds_it_and_an_error_names_what_is_not() -> None:
    every = get_args(get_args(get_type_hints(Train)["trackers"])[0])
    missing = [name for name in every if name not in set(map(str, get_available_trackers()))]
    check_trackers([name for name in every if name not in missing])
    for name in missing:
        with pytest.raises(LearnerError, match=rf"train.trackers: not installed: {name}; pip install {name}"):
            check_trackers(("tensorboard", name))


def test_what_a_tracker_left_in_a_folder_of_its_name_is_not_its_package(tmp_path: Path) -> None:
    """Python takes `./wandb` for a package, accelerate goes on without the tracker, and nobody hears of it."""
    (tmp_path / "trackio").mkdir()
    told = "from swarmq.learner.train.tracker_packages import check_trackers; check_trackers(('trackio',))"
    if "trackio" in map(str, get_available_trackers()):
        pytest.skip("it is installed")
    ran = subprocess.run([sys.executable, "-c", told], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "SetUpError: train.trackers: not installed: trackio" in ran.stderr


def test_a_tracker_that_fails_costs_a_warning_and_neither_a_step_nor_the_end_of_the_run() -> None:
    class Broken:
        name = "broken"

        def log(self, *_: object, **__: object) -> None:
            raise ConnectionError

        def finish(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    class Sound(Broken):
        def log(self, values: dict[str, float], *, step: int) -> None:
            heard.append((step, values))

        def finish(self) -> None:
            heard.append("finished")

    class Accelerator:
        trackers = (Broken(), Sound())

    heard: list[object] = []
    trackers = Trackers.__new__(Trackers)
    trackers._accelerator, trackers._on, trackers._failed = Accelerator(), True, Counter()
    trackers.log(1, {"loss": 1.0})
    assert heard == [(1, {"loss": 1.0})], "the others still get their figures"
    trackers.close()
    assert heard[1:] == ["finished"]


ROUND = {
    "version": 4, "seconds": 9.5, "missing": 1, "given_up": 0,
    "kinds": {
        "code": {"tasks": 1, "episodes": 1, "reward": 1.0, "metrics": {},
                 "pass": {"1": {"value": 1.0, "low": 0.2, "high": 1.0, "tasks": 1}}},
        "math": {"tasks": 3, "episodes": 3, "reward": 0.5, "metrics": {"tool calls": 2.5},
                 "pass": {"1": {"value": 0.5, "low": 0.1, "high": 0.9, "tasks": 3}}},
        "none": {"tasks": 0, "episodes": 0, "reward": None, "pass": {}, "metrics": {}},
    },
}  # fmt: skip
"""Fields of an `evaluated` event."""


def test_tensorboard_gets_an_evaluation_at_its_version_by_kind_and_over_all(tmp_path: Path) -> None:
    trackers = Trackers(Accelerator(cpu=True), TRAIN, run="r", policy="main", folder=tmp_path)
    trackers.log(7, {"loss": 1.0})
    trackers.log_evaluation(4, ROUND, now=7)
    trackers.close()
    read = EventAccumulator(str(tmp_path / "r.main")).Reload()
    points = {
        name: (point.step, round(point.value, 4)) for name in read.Tags()["scalars"] for point in read.Scalars(name)
    }
    (metric,) = (name for name in points if name.startswith("eval/by_kind/math/metrics/tool_calls-"))
    assert points == {
        "loss": (7, 1.0),
        "eval/version": (4, 4.0),
        "eval/seconds": (4, 9.5),
        "eval/missing": (4, 1.0),
        "eval/given_up": (4, 0.0),
        "eval/reward": (4, 0.625),
        "eval/pass_at_1": (4, 0.625),
        "eval/by_kind/code/tasks": (4, 1.0),
        "eval/by_kind/code/reward": (4, 1.0),
        "eval/by_kind/code/pass_at_1": (4, 1.0),
        "eval/by_kind/code/pass_at_1_low": (4, 0.2),
        "eval/by_kind/code/pass_at_1_high": (4, 1.0),
        "eval/by_kind/math/tasks": (4, 3.0),
        "eval/by_kind/math/reward": (4, 0.5),
        "eval/by_kind/math/pass_at_1": (4, 0.5),
        "eval/by_kind/math/pass_at_1_low": (4, 0.1),
        "eval/by_kind/math/pass_at_1_high": (4, 0.9),
        metric: (4, 2.5),
        "eval/by_kind/none/tasks": (4, 0.0),
    }


def test_an_evaluation_without_any_result_is_logged_as_such() -> None:
    kinds = {"math": {"tasks": 0, "episodes": 0, "reward": None, "pass": {}}}
    figures = dict(flatten(evaluation_figures(2, {"version": 2, "missing": 4, "kinds": kinds})))
    assert figures == {"version": 2.0, "missing": 4.0, "by_kind/math/tasks": 0.0}


def test_tables_of_samples_are_made_every_ten_steps_for_trackers_that_have_tables() -> None:
    class WithTables:
        name = "tables"

        def log_table(self, name: str, *, columns: list[str], data: list[list[object]], step: int) -> None:
            tables.append((name, step, len(data), len(columns) == len(data[0])))

    class WithoutTables:
        name = "plain"

    class Accelerator:
        trackers = (WithoutTables(), WithTables())

    tables: list[object] = []
    trackers = Trackers.__new__(Trackers)
    trackers._accelerator, trackers._on, trackers._failed, trackers._samples = Accelerator(), True, Counter(), 3
    for version in range(1, 21):
        trackers.log_samples(version, make_group("a", (0.0, 1.0, 0.5, 0.25)))
    assert tables == [("samples", 1, 3, True), ("samples", 10, 3, True), ("samples", 20, 3, True)]
    trackers._samples = 0
    trackers.log_samples(30, make_group("a"))
    assert len(tables) == 3


class ShortOfRoom:
    """As TensorBoard's: one that has failed once fails for ever, and one that is made anew works if there is room."""

    name = "tensorboard"

    def __init__(self, room: set[int]) -> None:
        self.room, self.at, self.works = room, 0, True
        self.starts: list[int] = []
        self.got: list[int] = []

    def start(self) -> None:
        self.starts.append(self.at)
        self.works = True

    def log(self, _values: object, *, step: int) -> None:
        self.works = self.works and step in self.room
        if not self.works:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.got.append(step)

    def finish(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def logged_to(tracker: Any, num_steps: int) -> list[Any]:
    """What the log says of so many steps."""

    class Accelerator:
        trackers = (tracker,)

    trackers = Trackers.__new__(Trackers)
    trackers._accelerator, trackers._on, trackers._failed = Accelerator(), True, Counter()
    with capture_logs() as said:
        for step in range(num_steps):
            tracker.at = step
            trackers.log(step, {"loss": 1.0})
    return [(line["event"], line["version"]) for line in said]


def test_a_moments_full_disk_costs_tensorboard_that_moment() -> None:
    tracker = ShortOfRoom({0, 1, 3, 4})
    assert logged_to(tracker, 5) == [("tracker_failed", 2), ("tracker_back", 3)]
    assert (tracker.got, tracker.starts) == ([0, 1, 3, 4], [3])


def test_a_disk_that_stays_full_is_said_once_and_tried_ever_less_often() -> None:
    tracker = ShortOfRoom(set(range(200, 300)))
    assert logged_to(tracker, 300) == [("tracker_failed", 0), ("tracker_back", 256)]
    assert tracker.starts == [1, 2, 4, 8, 16, 32, 64, 128, 192, 256]


def test_trackers_that_recover_by_themselves_are_not_begun_again() -> None:
    """A second start of theirs would be another run."""

    class Network(ShortOfRoom):
        name = "mlflow"

        def log(self, values: object, *, step: int) -> None:
            self.works = True
            super().log(values, step=step)

    tracker = Network({0, 3})
    assert logged_to(tracker, 4) == [("tracker_failed", 1), ("tracker_back", 3)]
    assert (tracker.got, tracker.starts) == ([0, 3], [])


def test_figures_after_a_failure_are_in_the_same_folder_of_tensorboard(tmp_path: Path) -> None:
    train = msgspec.structs.replace(TRAIN, trackers=("tensorboard",))
    accelerator = Accelerator(cpu=True)
    trackers = Trackers(accelerator, train, run="r", policy="main", folder=tmp_path)
    trackers.log(1, {"loss": 1.0})
    accelerator.trackers[0].writer.file_writer.event_writer._async_writer._worker.exception = OSError("full")
    for version in (2, 3, 4):
        trackers.log(version, {"loss": 1.0})
    trackers.close()
    read = EventAccumulator(str(tmp_path / "r.main")).Reload()
    assert sorted(point.step for point in read.Scalars("loss")) == [1, 3, 4], "in two files of the same second"


def test_a_folder_for_trackers_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "trackers").write_text("")
    with pytest.raises(LearnerError, match="trackers: File exists: check the folder"):
        Trackers(Accelerator(cpu=True), TRAIN, run="r", policy="main", folder=tmp_path / "trackers")


NAMES = st.text(max_size=12) | st.text(alphabet="./ _数", max_size=3) | st.text("ab", min_size=60, max_size=400)


@given(st.lists(NAMES, unique=True), NAMES)
def test_every_figure_arrives_whatever_users_call_their_kinds(kinds: list[str], text: str) -> None:
    """In trackers as strict as all of them together: MLflow refuses a whole step for one name, SwanLab cuts ends off."""
    names = [name for name, _ in flatten({"reward_by_kind": dict.fromkeys(kinds, 1.0), text: 1.0})]
    assert len(set(names)) == len(names) == len(kinds) + 1
    for name in names:
        assert NAME.fullmatch(name)
        assert len(name) <= 250
        assert name == name.rstrip(".")
        assert not any(set(part) == {"."} for part in name.split("/"))


def test_names_that_all_trackers_take_stay_as_they_are() -> None:
    fields = {
        "gap_p99": 1.0,
        "branches": {"history_edited": 2.0},
        "pauses": {"engine_0": 0.1},
        "model": {"v1.5-a": 1.0},
    }
    assert list(dict(flatten(fields))) == ["gap_p99", "branches/history_edited", "pauses/engine_0", "model/v1.5-a"]


def test_numbers_in_dictionaries_get_a_path_and_texts_are_left_out() -> None:
    assert dict(flatten({"a": 1, "b": {"c": 2.5, "d": "x"}, "e": "rows", "f": True})) == {"a": 1, "b/c": 2.5, "f": 1}
