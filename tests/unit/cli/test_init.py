"""What `swarmq init` writes is a job that loads, comments that are true, and nothing over what is there.

The agent is run in tests/integration/client/test_examples.py.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from swarmq import live_settings
from swarmq.cli import main
from swarmq.cli.init import STARTER
from swarmq.client.data.readers import read_tasks
from swarmq.config import SwarmJob


def written(folder: Path, *options: str) -> str:
    ran = CliRunner().invoke(main, ["init", str(folder), *options])
    assert ran.exit_code == 0, ran.output
    return ran.output


def test_a_job_an_agent_and_tasks_are_written_with_the_commands_that_use_them(tmp_path: Path) -> None:
    said = written(tmp_path / "My Math!", "--model", "Qwen/Qwen3-4B")
    job = SwarmJob.load(tmp_path / "My Math!" / "job.toml")
    assert (job.run, job.policies["main"].model) == ("my-math", "Qwen/Qwen3-4B")
    assert f"cd '{tmp_path}/My Math!'\nswarmq train job.toml\n" in said
    assert "swarmq feed runs/my-math tasks.jsonl" in said
    assert "SWARMQ_INVITE=runs/my-math swarmq worker agent:attempt" in said
    assert len(list(read_tasks(str(tmp_path / "My Math!" / "tasks.jsonl"), require=["question", "answer"]))) == 64


@pytest.mark.parametrize("name", STARTER)
def test_nothing_is_written_over_what_is_there(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    ran = CliRunner().invoke(main, ["init", str(tmp_path)])
    assert ran.exit_code == 1
    assert f"{name}: already exists, so nothing was written" in ran.output
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "mine")]


def test_every_commented_line_is_a_setting_and_its_default_unless_it_is_called_an_example(tmp_path: Path) -> None:
    written(tmp_path)
    lines = (tmp_path / "job.toml").read_text().splitlines()
    plain = SwarmJob(run="r", policies={"main": SwarmJob.load(tmp_path / "job.toml").policies["main"]})
    section, shown = "", 0
    for line in lines:
        if found := re.match(r"(?:# )?\[([a-z._]+)\]", line):
            section = found[1]
        if found := re.match(r"# ([a-z_]+) = ", line):
            value = tomllib.loads(line.removeprefix("# "))[found[1]]
            job = SwarmJob.load(
                tmp_path / "job.toml", sets=[f"{section}.{line.removeprefix('# ').partition('  #')[0]}"]
            )
            assert live_settings.value_at(job, f"{section}.{found[1]}") == value
            if "example" not in line and "lora" not in section:
                assert live_settings.value_at(plain, f"{section}.{found[1]}") == value, line
            shown += 1
    assert shown >= 8
