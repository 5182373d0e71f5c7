"""The report of a study: the same to the byte, from the ledger alone, with an interval and n for every claim."""

import re

import msgspec
import numpy as np
import pytest
import tomli_w
from click.testing import CliRunner

from support.studies import FIRST, Story, make_trial, study_of
from swarmq.cli import main
from swarmq.errors import StudyError
from swarmq.studies.ledger import LedgerFile, StudyFolder
from swarmq.studies.records import (
    NoteWritten,
    Spending,
    StudyAmended,
    StudyResumed,
    StudyStopped,
    TrialFailed,
    TrialParked,
    TrialPlanned,
    TrialResult,
)
from swarmq.studies.report import compose, render_html, render_markdown, render_pdf, write_report
from swarmq.studies.report.blocks import Curves, Figure
from swarmq.studies.report.claims import find_unknown_numbers
from swarmq.studies.report.figures import draw

ARMS = {"a": {"settings": {"lr": 1}}, "b": {"settings": {"lr": 2}}, "bad | *arm*": {"settings": {"lr": 3}}}
SHIFTS = {"a": 0.0, "b": 1.0, "bad | *arm*": 0.0}


def finish(story, trial, shift, seconds=1.0):
    rng = np.random.default_rng([trial.seed, ord(trial.arm[-1])])
    scores = (1 + shift + rng.normal(0, 0.05, 4)).tolist()
    fence = story.start(trial)
    story.add(
        TrialResult(
            trial_id=trial.id,
            fence=fence,
            metrics={"score": sum(scores) / 4},
            scores=dict(zip("wxyz", scores, strict=True)),
            curves={"score": tuple(rng.normal(shift, 0.1, 5).tolist())},
            cost=Spending(gpu_seconds=seconds, calls=2),
        )
    )


def told(*, disturbed=False, seeds=range(6)):
    """A study of three arms whose third one loses a seed. `disturbed`: in another order, with starts that failed."""
    story = Story(study_of(arms=ARMS, seeds=list(seeds), question="Is <b> more\nthan a?"))
    order = [(arm, seed) for arm in ARMS for seed in seeds]
    for arm, seed in order[::-1] if disturbed else order:
        trial = story.plan(arm, seed)
        if disturbed and seed % 2:
            lost = TrialFailed(
                trial_id=trial.id, fence=story.start(trial), kind="lost", reason="silent", cost=Spending()
            )
            story.add(lost)
        if (arm, seed) == ("bad | *arm*", 4):
            story.add(TrialParked(trial_id=trial.id, reason="it broke", log="ValueError: ``` <nan>"))
        else:
            finish(story, trial, SHIFTS[arm], seconds=2.0 if disturbed else 1.0)
    story.add(StudyStopped(kind="complete", reason="all trials have ended"))
    return story


@pytest.fixture(scope="module")
def story():
    return told()


def test_kills_and_order_change_nothing_but_the_chapter_on_operation(story):
    disturbed = told(disturbed=True)
    assert render_markdown(compose(story.entries, operation=False)) == render_markdown(
        compose(disturbed.entries, operation=False)
    )
    assert "lost 9" in render_markdown(compose(disturbed.entries))


def test_costs_have_the_tokens_of_trainings(story):
    assert "trained tokens" not in render_markdown(compose(story.entries)), "functions train none"
    trained = Story(study_of(seeds=[0, 1]))
    for arm in ("a", "b"):
        for seed in (0, 1):
            trial = trained.plan(arm, seed)
            metrics = {"score": 1.0, "trained_calls": 20.0, "trained_tokens": 1500.0}
            trained.add(TrialResult(trial_id=trial.id, fence=trained.start(trial), metrics=metrics, cost=Spending()))
    text = render_markdown(compose(trained.entries))
    assert "| arm | results | calls | money | trained calls | trained tokens |" in text
    assert "| all | 4 | 0 | 0 | 80 | 6,000 |" in text
    assert "n = 2 seeds; p" in text, "a score of the whole trial is not one task"


def test_every_claim_has_its_interval_and_n(story):
    text = render_markdown(compose(story.entries))
    claim = re.search(r"- b: better\. Difference of score (.*)", text)[1]
    assert re.fullmatch(
        r"[\d.]+ \(95 % interval [\d.]+ to [\d.]+; n = 6 seeds, 4 tasks; p &lt; 0\.001 after Holm's correction\)\.",
        claim,
    )
    assert re.search(r"bad .* no effect of interest\. .* n = 5 seeds", text.split("## Negative results")[1])
    assert "1 planned trial without a result" in text
    assert all("Made by: swarmq study report" in line for line in text.splitlines() if line.startswith("!["))


def test_a_curve_of_one_seed_has_no_band():
    (curves,) = [
        block.chart
        for block in compose(told(seeds=range(1)).entries)
        if isinstance(block, Figure) and isinstance(block.chart, Curves)
    ]
    assert {(len(line.values), len(line.low), len(line.high)) for line in curves.lines} == {(5, 0, 0)}
    assert draw(Figure(name="x", caption="", chart=curves), "svg").startswith(b"<?xml")


def test_words_of_people_are_no_markup(story):
    blocks = compose(story.entries)
    text, html = render_markdown(blocks), render_html(blocks)
    assert "Is &lt;b> more than a?" in text
    assert "| bad \\| \\*arm\\* |" in text
    assert "````\nValueError: ``` <nan>\n````" in text
    assert "<b>" not in html
    assert "Is &lt;b&gt; more" in html


@pytest.mark.slow
def test_the_same_ledger_gives_the_same_bytes(story, tmp_path):
    one, two = ({p.name: p.read_bytes() for p in _written(story, tmp_path / name)} for name in "xy")
    assert one == two
    assert {"report.md", "report.html", "report.pdf", "differences.svg", "curve-score.svg"} == one.keys()
    assert one["report.pdf"].startswith(b"%PDF")
    assert b"<script" not in one["report.html"]


def _written(story, folder):
    write_report(story.entries, folder)
    return folder.iterdir()


def test_amendments_and_what_they_changed_are_deviations(story):
    changed = study_of(arms=ARMS, seeds=list(range(6)), question="Is <b> more\nthan a?", smallest_effect=0.4)
    amendment = StudyAmended(study=changed, digest="e", inputs="i", reason="0.5 was too much")
    later = told()
    later.add(amendment)
    text = render_markdown(compose(later.entries))
    assert "- Amendment (smallest_effect from 0.5 to 0.4): 0.5 was too much" in text
    assert "amended after it had begun" in text
    assert "smallest effect of interest | 0.5 |" in text, "the design is as it was before the first trial"


def test_results_of_an_arm_that_was_amended_are_not_compared_with_those_of_the_new_one():
    story = told(seeds=range(2))
    amended = study_of(arms=ARMS | {"b": {"settings": {"lr": 9}}}, seeds=[0, 1])
    make = make_trial(amended)
    story.add(StudyAmended(study=amended, digest="e", inputs="i", reason="lr 2 was a mistake"))
    trials = [make("b", amended.arms["b"], seed) for seed in (0, 1)]
    story.add(*(TrialPlanned(trial=trial) for trial in trials))
    finish(story, trials[0], 5.0)
    text = render_markdown(compose(story.entries))
    assert re.search(r"- b: undecided\. Difference of score [\d.]+ .* n = 1 seed,", text)
    assert "1 planned trial without a result: b seed 1" in text
    assert len(story.state.trials) == 8


def test_a_study_that_was_resumed_says_so_and_forgives_what_was_parked():
    later = told()
    assert "1 trial given up" in render_markdown(compose(later.entries))
    later.add(StudyResumed(reason="the disk is larger now"))
    text = render_markdown(compose(later.entries))
    assert "- Resumed after a stop: the disk is larger now" in text
    assert "No trial was given up." in text


@pytest.mark.parametrize(
    ("facts", "is_over", "is_warned"),
    [
        ([], False, True),
        ([StudyStopped(kind="asked", reason="clear")], True, True),
        ([StudyStopped(kind="asked", reason="clear"), StudyResumed(reason="it was not")], False, True),
        ([StudyStopped(kind="complete", reason="done")], True, False),
    ],
)
def test_an_end_that_may_have_been_chosen_by_its_results_is_a_threat(facts, is_over, is_warned):
    story = told()
    story.add(StudyResumed(reason="so that it goes on"), *facts)
    text = render_markdown(compose(story.entries))
    assert ("The study is over" in text, "not for one that ends when its results please" in text) == (
        is_over,
        is_warned,
    )


def test_a_number_that_the_ledger_does_not_hold_is_marked(story):
    story = told()
    exact = story.state.trials[next(iter(story.state.trials))].result.metrics["score"]
    story.add(NoteWritten(by="planner", text=f"a has {exact:.3f} with 6 seeds, b 7.31 and 57 %, lr 2"))
    text = render_markdown(compose(story.entries))
    assert (
        f"a has {exact:.3f} with 6 seeds, b 7.31 \\[not in the ledger\\] and 57 % \\[not in the ledger\\], lr 2" in text
    )
    assert find_unknown_numbers("step-3 v1.2.3 at 10:30, 1e-9, 1e999", [], []) == ["1e-9", "1e999"]


def test_an_open_study_has_a_report_too():
    story = Story(study_of())
    text = render_markdown(compose(story.entries))
    assert "The study goes on" in text
    assert "b: undecided, since no seed has results of both arms." in text
    assert render_pdf(compose(story.entries)).startswith(b"%PDF")
    with pytest.raises(StudyError, match="holds no study"):
        compose([])


def test_the_command_writes_the_report_beside_the_ledger_and_names_the_study_file(tmp_path, story):
    file = tmp_path / "more seeds.toml"
    file.write_text(tomli_w.dumps(FIRST))
    folder = StudyFolder(file, "first")
    ledger = LedgerFile(folder.ledger)
    ledger.append([entry.fact for entry in told(seeds=range(2)).entries])
    ledger.close()
    result = CliRunner().invoke(main, ["study", "report", str(file)])
    assert result.exit_code == 0, result.output
    assert result.output.splitlines() == [
        str(folder.path / "report" / f"report.{kind}") for kind in ("md", "html", "pdf")
    ]
    assert msgspec.json.decode(folder.ledger.read_bytes().splitlines()[0])["number"] == 1
    text = (folder.path / "report" / "report.md").read_text()
    assert "swarmq study run 'more seeds.toml'\nswarmq study report 'more seeds.toml'\n" in text
    assert "study.toml" not in text


def test_the_status_is_that_of_the_study_in_the_ledger_whatever_its_file_says_now(tmp_path):
    file = tmp_path / "study.toml"
    file.write_text(tomli_w.dumps(FIRST | {"metric": {"name": "speed"}, "budget": {"gpu_seconds": 20}}))
    ledger = LedgerFile(StudyFolder(file, "first").ledger)
    ledger.append([entry.fact for entry in told(seeds=range(2)).entries])
    ledger.close()
    result = CliRunner().invoke(main, ["study", "status", str(file)])
    assert result.exit_code == 0, result.output
    assert "score" in result.output
    assert "of 1,000" in result.output
