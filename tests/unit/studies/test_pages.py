"""What the dashboard shows of studies: those below its folders, from their ledgers and the trainings that run on this host."""

import msgspec
import pytest
from litestar.testing import TestClient

from support.run_folder import MadeRun
from support.studies import Story, make_trial, study_of
from swarmq.dashboard.access import LinkAccess
from swarmq.dashboard.app import create_app
from swarmq.dashboard.shelf import Shelf, UnknownRunError
from swarmq.studies.ledger import LedgerFile, StudyFolder, read_ledger
from swarmq.studies.pages import StudyShelf
from swarmq.studies.records import StudyAmended, StudyStopped, TrialParked, TrialPlanned
from swarmq.studies.state import StudyState
from swarmq.studies.trial import Attempt, Order, order_path


@pytest.fixture
def shelf(tmp_path):
    story = Story(study_of())
    for arm, seed, value in (("a", 0, 1.0), ("b", 0, 2.0), ("a", 1, 1.2), ("b", 1, 2.1)):
        story.finish(story.plan(arm, seed), value, seconds=10)
    story.start(story.plan("a", 2))
    lost = story.plan("b", 2)
    story.add(TrialParked(trial_id=lost.id, reason="<b>it broke</b>"), StudyStopped(kind="asked", reason="enough"))
    ledger = LedgerFile(tmp_path / "studies" / "first" / "ledger.jsonl")
    ledger.append([entry.fact for entry in story.entries])
    ledger.close()
    damaged = tmp_path / "studies" / "damaged" / "ledger.jsonl"
    damaged.parent.mkdir()
    damaged.write_text("not a line\n")
    return StudyShelf([tmp_path])


def test_all_studies_are_listed_also_those_that_cannot_be_read(shelf):
    first, damaged = shelf.rows()
    assert (first.name, first.state, first.results, first.trials) == ("first", "asked", 4, 6)
    assert damaged.state == "unreadable"
    assert "line 1 cannot be read" in damaged.error


def test_a_study_shows_comparisons_trials_and_budget(shelf):
    shown = shelf.show(shelf.rows()[0].id)
    assert [(one["arm"], one["seeds"]) for one in shown["comparisons"]] == [("b", 2)]
    assert shown["comparisons"][0]["mean"] == pytest.approx(0.95)
    assert [one["state"] for one in shown["trials"]] == ["done"] * 4 + ["running", "parked"]
    (gpu,) = [row for row in shown["budget"] if row["name"] == "GPU seconds"]
    assert (gpu["spent"], gpu["reserved"], gpu["cap"]) == (40, 10, 1000)
    with pytest.raises(UnknownRunError):
        shelf.show("../first")


def test_trials_from_before_an_amendment_are_marked_and_not_counted(tmp_path):
    story = Story(study_of(seeds=[0]))
    for arm in ("a", "b"):
        story.finish(story.plan(arm, 0), 1.0)
    amended = study_of(seeds=[0], arms=story.study.arms | {"b": {"settings": {"arm": 3}}})
    planned = TrialPlanned(trial=make_trial(amended)("b", amended.arms["b"], 0))
    story.add(StudyAmended(study=amended, digest="e", inputs="i", reason="2 was a mistake"), planned)
    ledger = LedgerFile(tmp_path / "studies" / "first" / "ledger.jsonl")
    ledger.append([entry.fact for entry in story.entries])
    ledger.close()
    shelf = StudyShelf([tmp_path])
    (row,) = shelf.rows()
    assert (row.results, row.trials) == (1, 2)
    trials = shelf.show(row.id)["trials"]
    assert [(one["arm"], one["is_newest"]) for one in trials] == [("a", True), ("b", False), ("b", True)]
    assert len({one["id"] for one in trials}) == 3


def test_the_curves_of_a_training_that_runs_on_this_host_are_shown(shelf, tmp_path):
    entries = read_ledger(tmp_path / "studies" / "first" / "ledger.jsonl")
    (running,) = StudyState(entries).leased
    folder = StudyFolder(tmp_path / "study.toml", "first").trial(running.trial.lineage)
    made = MadeRun(folder, name="trial")
    for step, reward in enumerate((0.25, 0.5), 1):
        made.emit("learner.main", "step", version=step, reward=reward, staleness={"0": 1})
    made.close()
    attempt = Attempt(settings={}, seed=2, folder=str(folder))

    def write_start(claim_id):
        order = Order(plan=study_of().trial, attempt=attempt, claim_id=claim_id)
        order_path(folder).write_bytes(msgspec.json.encode(order))

    def read_lines():
        curves = shelf.show(shelf.rows()[0].id)["curves"]
        return [
            (line["label"], line["values"]) for chart in curves if chart["y"] == "reward" for line in chart["lines"]
        ]

    write_start(running.lease.claim_id)
    (line,) = [
        line for chart in shelf.show(shelf.rows()[0].id)["curves"] for line in chart["lines"] if chart["y"] == "reward"
    ]
    assert (line["low"], line["high"]) == ((), ()), "one seed has no band"
    assert read_lines() == [("a, seed 2 (running)", (0.25, 0.5))]
    write_start("of a lease that was lost, before another host got the trial")
    assert read_lines() == []


def test_the_api_serves_them_to_readers_only(shelf, tmp_path):
    app = create_app(Shelf([tmp_path]), LinkAccess("secret", name="ann", cookie="c"), studies=shelf)
    with TestClient(app) as client:
        assert client.get("/api/studies").status_code == 401
        client.headers["authorization"] = "Bearer secret"
        first = client.get("/api/studies").json()["studies"][0]
        assert msgspec.convert(client.get(f"/api/studies/{first['id']}").json()["name"], str) == "first"
        assert client.get("/api/studies/none").status_code == 404
