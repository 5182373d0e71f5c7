"""`swarmq.open_run`: a run's steps, episodes, turns, tokens, evaluations, drops and clients in Python."""

import shutil

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest

from support.run_folder import MadeRun, make_whole_run
from support.stored import unpack_run
from swarmq.errors import ConfigError, EpisodeError
from swarmq.observe.run import Run


@pytest.fixture
def opened(tmp_path):
    run, ids = make_whole_run(tmp_path / "runs")
    run.write_transcripts()
    run.emit("collector", "evaluated", version=1, seconds=2.0, missing=1, given_up=0, kinds={"math": {
        "tasks": 1, "episodes": 1, "reward": 0.25, "pass": {"1": {"value": 1.0, "low": 0.2, "high": 1.0, "tasks": 1}}}})  # fmt: skip
    yield run, ids, Run(run.folder.path, cache=tmp_path / "cache")
    run.close()


def test_a_run_shows_what_happened(opened):
    _run, ids, seen = opened
    assert seen.policies == ["main"]
    assert [(row.policy, row.step, row.values["reward"]) for row in seen.steps()] == [("main", 1, 0.5)]
    assert len(seen.episodes()) == 15
    assert [row.id for row in seen.episodes(state="failed", reason="failed")] == [ids["failed"]]
    assert seen.episode(ids["open"]).row.state == "open"
    assert seen.group("taught/0").mean_reward == 0.5
    assert seen.ledger().is_balanced
    assert {(row.reason, row.kind): row.episodes for row in seen.drops()} == {
        ("equal_rewards", "code"): 2, ("no_turns", "math"): 1, ("failed", "math"): 1, ("aborted", "math"): 1, ("silent", "math"): 1,
    }  # fmt: skip
    (client,) = seen.clients()
    assert (client.client, client.trained, client.failed) == ("client-a", 2, 3)
    (evaluated,) = seen.evaluations()
    assert (evaluated.kind, evaluated.reward, evaluated.values["pass"]["1"]["low"]) == ("math", 0.25, 0.2)
    assert seen.notes == []


def test_turns_and_tokens_are_complete(opened):
    run, ids, seen = opened
    _, _, turns = run.parts[ids["failed"]]
    assert [row.values.call_id for row in seen.turns(state="failed", reason="failed")] == [
        turn.call_id for turn in turns
    ]
    tokens = list(seen.tokens(ids["failed"]))
    assert sum(token.cause == "not_trained" for token in tokens) == sum(turn.num_sampled for turn in turns)
    assert all(token.text for token in tokens if token.id < 100)
    assert [token.position for token in tokens if token.timeline == 0] == list(
        range(sum(t.timeline == 0 for t in tokens))
    )


def test_tables_become_data_frames(opened):
    _, ids, seen = opened
    steps = seen.steps().to_pandas()
    assert steps.loc[0, "reward_by_kind/math"] == 0.5
    assert seen.evaluations().to_pandas().loc[0, "pass/1/high"] == 1.0
    episodes = seen.episodes().to_pandas()
    assert len(episodes) == 15
    assert set(episodes[episodes.state == "eval"].id) >= {ids["eval"]}
    assert len(seen.tokens(ids["trained"]).to_pandas()) > 4


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_every_table_becomes_a_data_frame_of_the_same_rows(opened, library):
    _, ids, seen = opened
    tables = [seen.steps(), seen.episodes(), seen.turns(state="failed"), seen.tokens(ids["trained"])]
    for table in [*tables, seen.evaluations(), seen.drops(), seen.clients()]:
        frame = getattr(table, f"to_{library}")()
        assert len(frame) == len(table) > 0
        assert set(table.to_dicts()[0]) <= set(frame.columns)


def test_the_plot_of_the_docs_is_drawn_before_the_first_step(tmp_path):
    made = MadeRun(tmp_path / "runs")
    seen = Run(made.folder.path, cache=tmp_path / "cache")
    steps = seen.steps().to_pandas()
    assert (len(steps), steps.reward.dtype, steps.step.dtype) == (0, "float64", "int64")
    mpl.use("agg")
    steps.plot(x="step", y="reward")
    plt.close("all")
    assert list(seen.episodes().to_pandas().columns) == list(seen.episodes().to_polars().columns)
    assert "reward" in seen.episodes().to_polars().columns
    made.close()


def test_of_an_event_file_that_grows_only_the_new_part_is_read(opened):
    run, _, seen = opened
    run.step()
    assert [row.step for row in seen.steps()] == [1, 2]
    before = run.folder.events.stat().st_size
    assert seen._events.bytes_read == before
    run.finish("more")
    run.step()
    assert [row.step for row in seen.steps()] == [1, 2, 3]
    assert len(seen.evaluations()) == 1
    assert seen._events.bytes_read == run.folder.events.stat().st_size > before


def test_a_table_of_a_live_run_grows(opened, monkeypatch):
    run, _, seen = opened
    episodes = seen.episodes(state="open")
    assert len(episodes) == 1
    run.begin("another")
    seen._read_at = float("-inf")
    assert len(episodes) == 2


def test_a_copied_folder_is_read_where_it_lies(opened, tmp_path):
    run, ids, _ = opened
    run.close()
    copy = tmp_path / "laptop" / "r"
    shutil.copytree(run.folder.path, copy)
    shutil.rmtree(tmp_path / "runs")
    seen = Run(copy, cache=tmp_path / "cache")
    assert len(seen.episodes()) == 15
    assert next(token.text for token in seen.tokens(ids["trained"])) == "", "the tokenizer stayed behind"


def test_a_run_of_the_first_version_can_be_read(tmp_path):
    _, folder = unpack_run(tmp_path)
    seen = Run(folder.path, cache=tmp_path / "cache")
    assert seen.ledger().is_balanced
    assert seen.notes == []
    assert len(seen.episodes(state="trained")) > 100
    detail = seen.episode(next(iter(seen.episodes(state="trained"))).id)
    assert detail.turns
    assert detail.timelines


def test_wrong_names_are_answered_with_the_right_ones(opened, tmp_path):
    _, _, seen = opened
    with pytest.raises(ConfigError, match="filters are state, reason"):
        seen.episodes(stat="failed")
    with pytest.raises(ConfigError, match="reason: 'stal' is unknown in this run; it has stale"):
        len(seen.episodes(reason="stal"))
    assert len(seen.episodes(reason="stale")) == 0, "known to swarmq"
    with pytest.raises(ConfigError, match="it has main"):
        seen.steps("critic")
    with pytest.raises(EpisodeError, match="no episode"):
        seen.episode("zzz")
    with pytest.raises(ConfigError, match=r"no resolved\.toml"):
        Run(tmp_path)


def test_a_step_that_no_run_can_reach_is_refused(opened):
    _, _, seen = opened
    with pytest.raises(ConfigError, match="step: 1000.* is not a step number"):
        seen.episodes(step=10**30)
    with pytest.raises(ConfigError, match="reward_min: nan is not a number"):
        seen.episodes(reward_min=float("nan"))
    with pytest.raises(ConfigError, match="kind: 3 is not text"):
        seen.episodes(kind=3)
