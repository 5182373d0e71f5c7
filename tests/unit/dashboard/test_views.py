"""Views of a run that are computed from its files."""

import contextlib
import sqlite3

import msgspec
import pytest

from support.run_folder import MadeRun, make_whole_run
from swarmq.config import RunFolder, SwarmJob
from swarmq.dashboard import views
from swarmq.dashboard.overview import view_overview
from swarmq.dashboard.views import UnknownLogError, list_logs, read_log, view_settings
from swarmq.messages import Change, Control, Event
from swarmq.observe.run import Run

RATE = "policies.main.train.learning_rate"


def test_the_history_of_settings_says_who_changed_what_from_which_step(tmp_path):
    job = SwarmJob.build({"run": "r", "folder": str(tmp_path), "policies": {"main": {"model": "x"}}})
    folder = RunFolder(tmp_path / "r")
    folder.path.mkdir()
    folder.resolved.write_text(job.to_toml())
    before = job.policies["main"].train.learning_rate
    change = Change(number=3, path=RATE, before=before, value=0.5, base=before)
    with contextlib.closing(sqlite3.connect(folder.inbox)) as db:
        db.execute("CREATE TABLE control (one INTEGER PRIMARY KEY, body BLOB NOT NULL)")
        body = msgspec.msgpack.encode(Control(run="r", number=3, changes=(change,)))
        db.execute("INSERT INTO control VALUES (1, ?)", (body,))
        db.commit()
    told = [
        ("collector", 10.0, {"state": "accepted", "number": 3, "sender": "ann"}),
        ("collector", 15.0, {"state": "accepted", "number": 3, "sender": "ann"}),  # repeated
        ("learner.main", 16.0, {"state": "applied", "number": 3, "changes": [{"path": RATE, "from_step": 8}]}),
    ]
    events = [Event(run="r", source=source, name="control", at=at, fields=fields) for source, at, fields in told]
    folder.events.write_bytes(b"\n".join(map(msgspec.json.encode, events)))
    found = view_settings(Run(folder.path, cache=tmp_path))
    assert found["history"] == [
        {"number": 3, "path": RATE, "before": before, "value": 0.5, "from_step": 8, "at": 10.0, "sender": "ann"}
    ]
    [row] = [one for one in found["settings"] if one["path"] == RATE]
    assert (row["value"], row["default"], row["is_set"]) == (0.5, before, True)


def test_a_link_among_the_logs_of_a_copied_folder_leads_nowhere(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.logs.mkdir(parents=True)
    (folder.logs / "proxy.log").write_text("listening\n")
    (tmp_path / "secret").write_text("not for readers")
    (folder.logs / "collector.log").symlink_to(tmp_path / "secret")
    assert [one["name"] for one in list_logs(folder)] == ["proxy.log"]
    assert read_log(folder, "proxy.log", lines=10)["text"] == "listening"
    with pytest.raises(UnknownLogError):
        read_log(folder, "collector.log", lines=10)


@pytest.fixture
def whole(tmp_path):
    made, _ = make_whole_run(tmp_path / "runs")
    yield made, Run(made.folder.path, cache=tmp_path / "cache")
    made.close()


def test_nothing_is_counted_before_the_index_is_done(whole):
    _made, run = whole
    run.index.update(is_cancelled=lambda: True)  # stops after the first portion
    assert run.index.progress.episodes > 0
    for view in (views.view_ledger, views.view_clients, views.view_mix, views.view_evaluations):
        assert view(run)["index"]["is_done"] is False
    assert views.view_ledger(run).keys() == {"index"}
    assert views.view_clients(run)["clients"] == []
    assert views.view_mix(run)["flat"] == {}
    assert view_overview(run, {}, run.job)["ledger"] is None
    run.index.update()
    ledger = views.view_ledger(run)
    assert (ledger["index"]["is_done"], ledger["begun"], ledger["is_balanced"]) == (True, 12, True)
    assert [one.client for one in views.view_clients(run)["clients"]] == ["client-a"]
    assert view_overview(run, {}, run.job)["ledger"].begun == 12


def test_an_engine_counts_as_up_only_while_its_state_is_recorded(whole):
    made, run = whole
    board = {
        "at": 1000.0,
        "recorder": {"is_recording": True},
        "engines": {"http://e": {"state": "up", "running": 3, "waiting": 1, "kv": 0.5, "version": 7}},
    }
    made.folder.board.write_bytes(msgspec.json.encode(board))
    live = views.view_engines(run, now=1005.0)
    assert (live["is_live"], live["at"]) == (True, 1000.0)
    assert [(one["state"], one["running"], one["version"]) for one in live["engines"]] == [("up", 3, 7)]
    later = views.view_engines(run, now=2000.0)
    assert later["is_live"] is False
    assert [(one["state"], one["running"], one["kv"], one["version"]) for one in later["engines"]] == [
        ("not recorded", None, None, 7)
    ]


def test_a_run_without_a_recorded_state_was_last_heard_of_at_its_newest_event(whole, tmp_path):
    _made, run = whole
    newest = max(event.at for event in run.events())
    assert view_overview(run, {}, run.job)["at"] == newest
    assert view_overview(run, {"at": 5.0}, run.job)["at"] == 5.0
    silent = MadeRun(tmp_path / "silent")
    assert view_overview(Run(silent.folder.path, cache=tmp_path / "cache"), {}, silent.job)["at"] is None
    silent.close()
