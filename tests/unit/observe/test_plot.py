"""`swarmq plot` draws what the events say, of one run in full and of several beside each other."""

import pytest
from click.testing import CliRunner
from matplotlib.image import imread

from support.run_folder import MadeRun
from swarmq.cli import main
from swarmq.errors import ConfigError
from swarmq.observe.plot import draw_runs, make_panels, place_marks, read_histories
from swarmq.observe.run import Run


@pytest.fixture
def runs(tmp_path):
    made = []
    for name, gain in (("a", 0.1), ("b", 0.05)):
        run = MadeRun(tmp_path / name, name=name)
        for step in range(1, 6):
            run.now += 10
            run.emit(
                "learner.main", "step", version=step, reward=None if step == 3 else gain * step, step_s=2.0, wait_s=1.0, train_s=0.5,
                reward_by_kind={"math": gain * step, "code": 0.5}, staleness={"0": 3, "2": 1}, entropy=1.0 / step, layout="tree",
                dropped={"stale": step} if step > 3 else {}, code_versions={"old$": 1} if step < 3 else {"new$x_{$": 1},
            )  # fmt: skip
        for version in (0, 5):
            passed = {
                "1": {"value": 0.5, "low": 0.3, "high": 0.7, "tasks": 10},
                "4": {"value": 0.9, "low": 0.6, "high": 1.0, "tasks": 10},
            }
            kinds = {
                "math": {"tasks": 10, "episodes": 10, "reward": 0.5, "pass": passed},
                "code": {"tasks": 1, "episodes": 1, "reward": 0.1, "pass": {}},
            }
            run.emit("collector", "evaluated", version=version, seconds=1.0, missing=0, given_up=0, kinds=kinds)
        run.close()
        made.append(Run(run.folder.path, cache=tmp_path / "cache"))
    return made


def panels_of(runs, *series):
    return {
        panel.title: {curve.label: curve for curve in panel.curves}
        for panel in make_panels([h for r in runs for h in read_histories(r)], series)
    }


def test_one_run_is_drawn_in_full(runs):
    panels = panels_of(runs[:1])
    assert list(panels) == [
        "training reward",
        "evaluation, 95 % intervals",
        "staleness in versions",
        "episodes dropped by the learner",
        "seconds of a step",
    ]
    reward = panels["training reward"]
    assert list(reward) == ["all kinds", "code", "math"]
    assert (reward["all kinds"].steps, reward["all kinds"].values) == (
        [1, 2, 4, 5],
        pytest.approx([0.1, 0.2, 0.4, 0.5]),
    )
    evaluation = panels["evaluation, 95 % intervals"]
    assert list(evaluation) == ["math pass@1", "code reward"]
    assert (evaluation["math pass@1"].steps, evaluation["math pass@1"].low, evaluation["math pass@1"].high) == (
        [0, 5],
        [0.3] * 2,
        [0.7] * 2,
    )
    staleness = panels["staleness in versions"]
    assert (staleness["mean"].values, staleness["oldest episode"].values) == ([0.5] * 5, [2.0] * 5)
    assert panels["episodes dropped by the learner"]["stale"].values == [0, 0, 0, 4, 5]
    assert list(panels["seconds of a step"]) == ["step", "wait", "train"]


def test_several_runs_have_one_line_each(runs):
    panels = panels_of(runs)
    assert list(panels["training reward"]) == ["a", "b"]
    assert panels["training reward"]["b"].values[-1] == pytest.approx(0.25)
    assert list(panels["seconds of a step"]) == ["a", "b"]
    assert panels["episodes dropped by the learner"]["a"].values[-1] == 5.0


def test_any_figure_of_a_step_can_be_drawn_and_a_wrong_name_is_answered(runs):
    panels = panels_of(runs[:1], "entropy", "reward_by_kind/code")
    assert panels["entropy"]["a"].values[0] == 1.0
    assert panels["reward_by_kind/code"]["a"].values == [0.5] * 5
    with pytest.raises(ConfigError, match="no run has such a series; there are reward, .*entropy"):
        panels_of(runs, "entorpy")
    with pytest.raises(ConfigError, match="--series layout"):
        panels_of(runs, "layout")


def test_changes_stand_where_they_took_effect(runs):
    (history,) = read_histories(runs[0])
    assert {step: [mark.text for mark in marks] for step, marks in place_marks(history).items()} == {
        3: ["client code new$x_{$"]
    }


@pytest.mark.parametrize(("name", "beginning"), [("out.png", b"\x89PNG"), ("out.svg", b"<?xml")])
def test_the_file_has_the_format_of_its_name(runs, tmp_path, name, beginning):
    path = tmp_path / name
    result = CliRunner().invoke(main, ["plot", *(str(run.folder.path) for run in runs), "--out", str(path)])
    assert (result.exit_code, result.output) == (0, f"written to {path}\n")
    assert path.read_bytes().startswith(beginning)
    if name.endswith("png"):
        assert imread(path).std() > 0.05, "there is something on it"
    draw_runs(runs[:1], path)
    assert path.read_bytes().startswith(beginning)


def test_what_cannot_be_drawn_is_said(runs, tmp_path):
    with pytest.raises(ConfigError, match=r"unknown format; name a file that ends in \.png, \.svg"):
        draw_runs(runs, tmp_path / "out.gif")
    with pytest.raises(ConfigError, match="cannot be written"):
        draw_runs(runs, tmp_path / "no" / "out.png")
    with pytest.raises(ConfigError, match="it has main"):
        draw_runs(runs, tmp_path / "out.png", policy="critic")
    runs[0].folder.events.unlink()
    with pytest.raises(ConfigError, match="nothing to draw"):
        draw_runs(runs[:1], tmp_path / "out.png")
