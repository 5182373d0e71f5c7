"""`swarmq up --show` prints every setting there is, and what it prints is the same job."""

import re
import tomllib
from collections import defaultdict

import msgspec
import pytest
from click.testing import CliRunner

from swarmq.cli import main
from swarmq.cli.all_settings import all_settings
from swarmq.config import Settings, SwarmJob

LEAST = {"run": "r", "policies": {"main": {"model": "m"}}}
MOST = {
    "run": "r",
    "mix": {"math": 0.5, "a-b": 0.5},
    "mix_schedule": {"points": [{"step": step, "mix": {"math": 0.25, "a-b": 0.75}} for step in (5, 9)]},
    "kinds": {"math": {"group_size": 4}, "a-b": {"advantage": "grpo"}},
    "policies": {
        "main": {
            "model": "m",
            "train": {
                "lora": {"modules": ["q_proj"]},
                "advantages": {"math": "ema"},
                "length_penalty": {"free": 1, "full": 2},
                "sft": {"demonstrations": "chats.jsonl"},
                "ratio_band": [0.5, 2.0],
                "loss": {"clip_low": 0.25, "logratio_penalty": 0.0},
                "grad_clip": float("inf"),
            },
        },
        "judge": {"model": 'j "quoted"', "trained": False},
    },
}
JOBS = pytest.mark.parametrize("tree", [LEAST, MOST])


def classes(kind=Settings):
    return {sub for one in kind.__subclasses__() for sub in {one, *classes(one)}}


@JOBS
def test_what_is_shown_loads_to_the_same_job(tree):
    job = SwarmJob.build(tree)
    assert SwarmJob.build(tomllib.loads(all_settings(job))) == job


@JOBS
def test_every_field_of_every_class_of_settings_is_shown(tree):
    shown = sections(all_settings(SwarmJob.build(tree)))
    fields = {kind.__name__: {one.encode_name for one in msgspec.structs.fields(kind)} for kind in classes()}
    assert len(fields) == 21
    assert [name for name, names in fields.items() if not any(names <= there for there in shown.values())] == []


def sections(text):
    """Heading -> names of the settings and sections below it, those in comments too."""
    found, here = defaultdict(set), ""
    for line in text.splitlines():
        if heading := re.match(r"(?:# )?\[+([^]]+)\]", line):
            here = heading[1]
            steps = here.split(".")
            for depth, step in enumerate(steps):
                found[".".join(steps[:depth])].add(step)
        elif setting := re.match(r"(?:# )?(\w+) = ", line):
            found[here].add(setting[1])
    return found


def test_a_section_that_is_off_is_switched_on_by_taking_its_comment_away():
    shown = all_settings(SwarmJob.build(LEAST))
    for line in ("[policies.main.train.lora]  # off", "rank = 16", "[kinds.NAME]  # off"):
        assert f"\n# {line}\n" in shown
        shown = shown.replace(f"\n# {line}\n", f"\n{line}\n".replace("NAME", "math"))
    job = SwarmJob.build(tomllib.loads(shown))
    assert job.policies["main"].train.lora is not None
    assert "math" in job.kinds


def test_up_shows_settings_that_are_not_set(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text('run = "r"\n[policies.main]\nmodel = "m"\n')
    shown = CliRunner().invoke(main, ["up", str(path), "--show"]).output
    for line in ("# url = ...  # not set", "# sleep = ...  # not set", "# [mix_schedule]  # off", "seed = 0"):
        assert f"{line}\n" in shown
