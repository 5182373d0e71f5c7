"""`swarmq dashboard FOLDER`: a folder that is not there is refused, and one without runs is said to have none."""

import subprocess
import sys

import pytest

COMMAND = [sys.executable, "-m", "swarmq", "dashboard", "--port", "0"]


@pytest.mark.parametrize(("name", "text"), [("no", "there is no such folder"), ("file", "is a file")])
def test_a_folder_that_is_none_is_refused(tmp_path, name, text):
    (tmp_path / "file").write_text("x")
    done = subprocess.run([*COMMAND, tmp_path / name], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"{tmp_path / name}: {text}; give the folder of a run" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("folders", [["empty"], []])
def test_a_folder_without_runs_is_said_to_have_none_and_is_watched(tmp_path, folders):
    (tmp_path / "empty").mkdir()
    with subprocess.Popen(
        [*COMMAND, *folders], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    ) as process:
        try:
            assert process.stderr.readline().startswith(f"note: {(folders or ['runs'])[0]}: no run is there yet")
            assert process.stdout.readline().startswith("http://")
        finally:
            process.terminate()


def test_a_folder_of_studies_is_not_said_to_lack_runs(tmp_path):
    (tmp_path / "studies" / "first").mkdir(parents=True)
    (tmp_path / "studies" / "first" / "ledger.jsonl").write_text("")
    with subprocess.Popen(
        [*COMMAND, tmp_path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    ) as process:
        try:
            assert process.stdout.readline().startswith("http://")
        finally:
            process.terminate()
        assert "no run" not in process.stderr.read()
