"""The studies of docs/studies: each report is what its ledger says, to the byte, and each result was trained as the file says."""

from pathlib import Path

import pytest

from swarmq.studies.analysis import compare
from swarmq.studies.ledger import read_ledger
from swarmq.studies.report import write_report
from swarmq.studies.report.compose import sentence
from swarmq.studies.state import StudyState

STUDIES = Path(__file__).parents[3] / "docs" / "studies"
SHIPPED = sorted(STUDIES.glob("*/studies/*/ledger.jsonl"))


def test_there_is_a_shipped_study():
    assert SHIPPED


@pytest.mark.parametrize("ledger", SHIPPED, ids=lambda path: path.parent.name)
def test_a_shipped_report_is_made_from_its_ledger(ledger, tmp_path):
    study_file = f"{ledger.parent.name}.toml"
    write_report(read_ledger(ledger), tmp_path, ["md", "html"], study_file=study_file)
    assert (ledger.parents[2] / study_file).exists()
    shipped = ledger.parent / "report"
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in shipped.iterdir()}
    for made in tmp_path.iterdir():
        assert made.read_bytes() == (shipped / made.name).read_bytes(), made.name


@pytest.mark.parametrize("ledger", SHIPPED, ids=lambda path: path.parent.name)
def test_a_shipped_study_has_three_seeds_an_arm_or_more(ledger):
    state = StudyState(read_ledger(ledger))
    assert state.stopped.kind == "complete"
    assert len(state.study.seeds) >= 3
    assert all(one.result for one in state.newest), "those that an amendment has replaced need none"


@pytest.mark.parametrize("ledger", SHIPPED, ids=lambda path: path.parent.name)
def test_the_index_says_what_each_study_has_found(ledger):
    state = StudyState(read_ledger(ledger))
    index = " ".join((STUDIES / "index.md").read_text().split())
    assert state.study.question in index
    for found in compare(state.study, state.results):
        assert sentence(found, state.study) in index
