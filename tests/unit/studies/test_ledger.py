"""The ledger keeps every line that it has confirmed, removes what a crash or a full disk left of one, and notices changes."""

import os
import sys
from pathlib import Path

import pytest

from support.disk import Disk
from swarmq.errors import StudyError
from swarmq.studies.ledger import LedgerFile, hash_ledger, read_ledger, redact
from swarmq.studies.records import NoteWritten


def note(text):
    return NoteWritten(by="me", text=text)


def texts(path):
    return [entry.fact.text for entry in read_ledger(path)]


def test_lines_are_durable_before_append_returns_and_are_read_again(tmp_path, monkeypatch):
    disk, path = Disk(monkeypatch), tmp_path / "ledger.jsonl"
    ledger = LedgerFile(path)
    ledger.append([note("one"), note("two")])
    assert disk.keeps(path)
    again = LedgerFile(path)
    again.append([note("three")])
    assert texts(path) == ["one", "two", "three"]
    assert [entry.number for entry in again.entries] == [1, 2, 3]


def test_a_torn_last_line_is_left_out_and_overwritten(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = LedgerFile(path)
    ledger.append([note("one")])
    ledger.append([note("two")])
    path.write_bytes(path.read_bytes()[:-5])
    assert texts(path) == ["one"]
    LedgerFile(path).append([note("three")])
    assert texts(path) == ["one", "three"]


@pytest.mark.parametrize("lost", [1, 2])
def test_lines_that_were_written_together_count_together_or_not_at_all(tmp_path, lost):
    path = tmp_path / "ledger.jsonl"
    ledger = LedgerFile(path)
    ledger.append([note("one")])
    whole = hash_ledger(path)
    ledger.append([note("two"), note("three"), note("four")])
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-lost]))
    assert texts(path) == ["one"]
    assert hash_ledger(path) == whole
    LedgerFile(path).append([note("five")])
    assert texts(path) == ["one", "five"]


def test_a_full_disk_changes_nothing_and_the_line_can_be_written_later(tmp_path, monkeypatch):
    path = tmp_path / "ledger.jsonl"
    ledger = LedgerFile(path)
    ledger.append([note("one")])
    real = os.pwrite
    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", lambda file, data, at: real(file, data[:7], at))
        with pytest.raises(OSError, match="No space left"):
            ledger.append([note("two")])
    assert texts(path) == ["one"]
    ledger.append([note("two")])
    assert texts(path) == ["one", "two"]


@pytest.mark.parametrize("spoil", [lambda lines: lines[1:], lambda lines: [lines[0].replace("one", "ten"), *lines[1:]]])
def test_a_changed_or_removed_line_is_noticed(tmp_path, spoil):
    path = tmp_path / "ledger.jsonl"
    LedgerFile(path).append([note("one"), note("two"), note("three")])
    path.write_text("".join(spoil(path.read_text().splitlines(keepends=True))))
    with pytest.raises(StudyError, match="does not follow the line before"):
        read_ledger(path)


def test_the_time_of_leaders_goes_on_whatever_the_wall_clock_does(tmp_path, monkeypatch):
    path = tmp_path / "ledger.jsonl"
    ledger = LedgerFile(path)
    for wall in (2e9, 1e9, 3e9):
        monkeypatch.setattr("swarmq.studies.ledger.time.time", lambda wall=wall: wall)
        ledger.append([note(str(wall))])
    elapsed = [entry.elapsed_s for entry in read_ledger(path)]
    assert elapsed == sorted(elapsed)
    assert elapsed[-1] < 60


def test_the_time_of_a_leader_that_is_killed_between_two_entries_counts(tmp_path, monkeypatch):
    path, now = tmp_path / "ledger.jsonl", [100.0]
    monkeypatch.setattr("swarmq.studies.ledger.time.monotonic", lambda: now[0])
    ledger = LedgerFile(path)
    ledger.append([note("one")])
    now[0] += 3600
    ledger.keep_time()
    ledger.close()
    now[0] = 5.0  # the host has started again
    assert LedgerFile(path).elapsed_s == 3600
    path.unlink()
    assert LedgerFile(path).elapsed_s == 0, "another study in this folder"


STUDY = Path("/srv/ada/project/studies/lake")


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        (f'File "{STUDY}/work.py", line 3', 'File "STUDY/work.py", line 3'),
        (f"{STUDY}: no space left", "STUDY: no space left"),
        (f"{STUDY}.toml is no file in {STUDY}.", f"STUDY/../{STUDY.name}.toml is no file in STUDY."),
        ("/srv/ada/project/models/tiny is no folder", "STUDY/../../models/tiny is no folder"),
        ("/home/ada/.cache/x", "~/.cache/x"),
        ("in /tmp/run-1/log, /tmp.", "in TMP/run-1/log, TMP."),
        (f'File "{sys.prefix}/lib/torch/nn.py"', 'File "PYTHON/lib/torch/nn.py"'),
        (f'File "{redact.__code__.co_filename}"', 'File "SOURCE/swarmq/studies/ledger.py"'),
        (f"{STUDY}-2/work.py, /data{STUDY}/x, 1 / 2", f"STUDY/../lake-2/work.py, /data{STUDY}/x, 1 / 2"),
    ],
)
def test_texts_for_the_ledger_name_no_path_of_this_machine(text, redacted, monkeypatch):
    monkeypatch.delenv("TMPDIR", raising=False)
    monkeypatch.setenv("HOME", "/home/ada")
    assert redact(text, STUDY) == redacted
