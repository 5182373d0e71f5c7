"""`swarmq slurm` writes a script that bash understands, and refuses what Slurm could not run."""

import os
import re
import subprocess
import time

import pytest
from click.testing import CliRunner

from swarmq import cli
from swarmq.cli.slurm import LAUNCHER

JOB = (
    'run = "r"\nfolder = "runs of $me"\n[policies.main]\nmodel = "m"\n[policies.judge]\nmodel = "m"\ntrained = false\n'
)

PROGRAMS = {
    "srun": """
while [ "$1" != bash ]; do shift; done
setsid "$@" &
trap 'kill -USR1 -- -$!' USR1
wait $! || wait $!
""",
    "torchrun": """
trap 'echo TERM >> told; exit 3' TERM
echo "$@" > new; mv new started
while :; do sleep 0.01; done
""",
}
"""Stand-ins: an `srun` that signals all processes of a step, as some clusters do, and a `torchrun` that notes how it was stopped."""


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
    assert "srun --overlap --relative=1 --nodes=2" in script


def test_a_learner_on_several_nodes_has_ranks_on_them_and_no_engines_but_the_first_ones(slurm):
    words = ["--nodes", "4", "--learner-nodes", "2", "--policy", "main", "--gpus-per-node", "8"]
    script = slurm(*words).output
    assert "--set 'policies.main.train.launcher=[" in script
    assert "srun --overlap --relative=0 --nodes=2 --ntasks=2 " in script
    assert "torchrun --nnodes=2 --nproc-per-node=${#each[@]} " in script
    assert 'if [ "$SLURM_NODEID" -ge 1 ]; then' in script
    assert "engine start" not in slurm("--nodes", "2", "--learner-nodes", "2", "--policy", "main").output


def test_ranks_are_asked_to_stop_by_sigterm_whatever_else_gets_slurms_signal(slurm, tmp_path):
    script = slurm("--nodes", "2", "--learner-nodes", "2", "--policy", "main").output
    functions = re.search(r"^ranks\(\) .*?^export -f ranks rank$", script, re.MULTILINE | re.DOTALL)[0]
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}")
        (tmp_path / name).chmod(0o755)
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "host": "n1", "SLURM_JOB_ID": "1", "SLURM_PROCID": "0"}
    command = [*LAUNCHER, "-m", "swarmq", "learner"]
    with subprocess.Popen(["bash", "-c", f'{functions}\nexec "$@"', "up", *command], env=variables, cwd=tmp_path) as up:
        while not (tmp_path / "started").exists():
            assert up.poll() is None
            time.sleep(0.01)
        up.terminate()
    assert (tmp_path / "told").read_text() == "TERM\n"
    assert up.returncode == 3
    assert (tmp_path / "started").read_text().endswith(" -m swarmq learner\n")


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
        (["--nodes", "2", "--policy", "main", "--learner-nodes", "3"], "--learner-nodes 3: the job has only --nodes 2"),
        (["--nodes", "2", "--policy", "judge", "--learner-nodes", "2"], "policies.judge is not trained"),
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
