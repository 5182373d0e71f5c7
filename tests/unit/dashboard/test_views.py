"""Views of a run that are computed from its files."""

import contextlib
import sqlite3

import msgspec
import pytest

from swarmq.config import RunFolder, SwarmJob
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
