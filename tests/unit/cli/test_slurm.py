"""`swarmq slurm` writes a script that bash understands, and refuses what Slurm could not run."""

import re
import subprocess

import pytest
from click.testing import CliRunner

from swarmq import cli

JOB = (
    'run = "r"\nfolder = "runs of $me"\n[policies.main]\nmodel = "m"\n[policies.judge]\nmodel = "m"\ntrained = false\n'
)


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(JOB)
    return lambda *words: CliRunner().invoke(cli.main, ["slurm", "job.toml", *words])


def directives(script):
    return dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", script, re.MULTILINE))


def test_one_node_runs_the_job_and_nothing_joins(slurm):
    script = slurm("--nodes", "1").output
    assert {"nodes": "1", "requeue": "", "signal": "B:USR1@300"}.items() <= directives(script).items()
    assert not {"time", "partition", "account", "gpus-per-node"} & directives(script).keys()
    assert "srun" not in script


def test_other_nodes_start_a_proxy_and_an_engine_for_every_group_of_gpus(slurm):
    words = ["--nodes", "3", "--policy", "judge", "--gpus-per-node", "4", "--gpus-per-engine", "2", "--time", "1:00:00"]
    script = slurm(*words, "--set", "groups.group_size = 4").output
    assert {"nodes": "3", "gpus-per-node": "4", "time": "1:00:00"}.items() <= directives(script).items()
    assert re.findall(r"engine start .* --policy \"\$policy\" (.*) &", script) == ["--gpu 0 --gpu 1", "--gpu 2 --gpu 3"]
    assert "policy=judge" in script
    assert "--set 'groups.group_size = 4'" in script
    assert "srun --relative=1 --nodes=2" in script


def test_bash_understands_the_script_also_with_odd_paths(slurm, tmp_path):
    script = slurm("--nodes", "2", "--policy", "main").output
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    [line] = re.findall(r"^export job=.*", script, re.MULTILINE)
    shown = subprocess.run(["bash", "-c", f'{line}; echo "$run"'], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == str(tmp_path / "runs of $me/r")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nodes", "2"], "--policy is required; choose one of main, judge"),
        (["--nodes", "2", "--policy", "main", "--gpus-per-node", "4", "--gpus-per-engine", "3"], "does not divide"),
        (["--nodes", "1", "--set", "broker.url=amqp://h/"], "broker.url: leave it out"),
    ],
)
def test_what_cannot_run_is_refused(slurm, words, said):
    done = slurm(*words)
    assert done.exit_code == 1
    assert said in done.output


def test_without_slurm_submitting_is_refused_before_anything_is_written(slurm, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    done = slurm("--nodes", "1", "--submit")
    assert done.exit_code == 1
    assert "sbatch: not found on this host" in done.output
    assert not (tmp_path / "runs of $me").exists()
