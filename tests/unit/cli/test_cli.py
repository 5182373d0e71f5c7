"""What a person types wrongly is answered with one line that says where and what to do, and status 1."""

import contextlib
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from swarmq import cli
from swarmq.cli import common
from swarmq.cli.common import EXTRAS, HOST, require_extras
from swarmq.config import SwarmJob
from swarmq.errors import BrokerError, ConfigError, EngineError, MissingExtraError
from swarmq.testing import MemoryBroker

JOB = 'run = "r"\nfolder = "{folder}"\n[policies.main]\nmodel = "{model}"\n'


def swarmq(*arguments, **environment):
    return CliRunner().invoke(cli.main, [str(a) for a in arguments], env=environment)


def write_job(folder: Path, model: Path | str = "nowhere", extra: str = "") -> Path:
    path = folder / "job.toml"
    path.write_text(JOB.format(folder=folder / "runs", model=model) + extra)
    return path


def folder_of_model(folder: Path, config: dict, *, template: str | None = "{{ messages }}") -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")  # none, and whole
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template} if template else {}))
    return folder


CAUSAL = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
ENCODER = {"architectures": ["BertModel"], "model_type": "bert"}


def commands(group, *path):
    """The words of every command, of those inside groups too."""
    for name, command in group.commands.items():
        yield (*path, name)
        if isinstance(command, click.Group):
            yield from commands(command, *path, name)


@pytest.mark.parametrize("words", list(commands(cli.main)), ids=" ".join)
def test_help_of_every_command_says_how_to_use_it(words):
    shown = swarmq(*words, "--help")
    assert shown.exit_code == 0
    _usage, _, text = shown.output.partition("\n")
    assert f"  swarmq {' '.join(words)} " in text


@pytest.mark.parametrize(
    "group", [(), *((name,) for name, one in cli.main.commands.items() if isinstance(one, click.Group))], ids=" ".join
)
def test_at_80_columns_no_command_s_description_is_cut(group):
    shown = CliRunner().invoke(cli.main, [*group, "--help"], terminal_width=80)
    _options, _, listed = shown.output.partition("Commands:\n")
    assert listed
    assert "..." not in listed


def test_a_feed_that_is_refused_prints_no_bar(tmp_path, monkeypatch):
    @contextlib.asynccontextmanager
    async def broker_of(_job, _name):
        yield MemoryBroker()

    monkeypatch.setattr("swarmq.observe.feeding.open_broker", broker_of)
    folder = tmp_path / "runs" / "r"
    folder.mkdir(parents=True)
    (folder / "resolved.toml").write_text(write_job(tmp_path).read_text())
    (tmp_path / "rows.jsonl").write_text('{"id": "a"}\n{"id": "a"}\n')
    refused = swarmq("feed", folder, tmp_path / "rows.jsonl")
    assert refused.exit_code == 1
    assert refused.output.startswith(f"swarmq: {tmp_path}/rows.jsonl line 2: the id 'a' is"), refused.output


def test_a_policy_that_is_not_there_or_not_trained_is_said_to_be_so():
    policies = {"planner": {"model": "m"}, "executor": {"model": "m"}, "judge": {"model": "m", "trained": False}}
    job = SwarmJob.build({"run": "r", "policies": policies})
    for policy, says in {
        None: "--policy is required; choose one of planner, executor",
        "planer": "--policy planer: no such policy; choose one of planner, executor",
        "judge": "--policy judge: is not trained; choose one of planner, executor",
    }.items():
        with pytest.raises(ConfigError, match=f"^{re.escape(says)}$"):
            common.choose_policy(job, policy)


def test_the_commands_that_people_are_told_of_are_there():
    names = "up demo status watch feed worker inspect replay doctor set pause drain resume checkpoint stop token warm"
    assert set(names.split()) <= set(cli.main.commands)
    assert {("dead", "list"), ("engine", "start"), ("client", "add")} <= set(commands(cli.main))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["list"], "not the folder of a run"),
        (["show", "ID"], "not the folder of a run"),
        (["requeue"], "not the folder of a run"),
        (["purge", "--all"], "not the folder of a run"),
        (["purge"], "name the dead letters to delete by id, or use --all"),
        (["purge", "ID", "--all"], "name the dead letters to delete by id, or use --all"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_dead_letters_are_those_of_a_run_and_only_chosen_ones_are_forgotten(tmp_path, arguments, says):
    [name, *more] = arguments
    result = swarmq("dead", name, tmp_path, *more)
    assert (result.exit_code, says in result.output) == (1, True)


def test_show_prints_every_resolved_setting_as_a_job_file(tmp_path):
    shown = swarmq("up", write_job(tmp_path), "--set", "groups.group_size=3", "--show")
    (tmp_path / "again.toml").write_text(shown.output)
    assert SwarmJob.load(tmp_path / "again.toml").groups.group_size == 3
    assert "learning_rate" in shown.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "policies.main.train.lr=1"], ["policies.main.train.lr: unknown field; did you mean learning_rate?"]),
        (["--set", "groups.group_size=0"], ["groups.group_size"]),
        (["--set", "nonsense"], ["section.key=value"]),
    ],
)
def test_a_wrong_setting_is_named_by_its_path(tmp_path, arguments, words):
    result = swarmq("up", write_job(tmp_path), *arguments)
    assert result.exit_code == 1
    for word in words:
        assert word in result.output
    assert not (tmp_path / "runs").exists(), "nothing is made before the settings are right"


@pytest.mark.parametrize(
    ("model", "word"),
    [
        (lambda f: f / "missing", "missing"),
        (lambda f: folder_of_model(f / "encoder", ENCODER), "causal"),
        (lambda f: folder_of_model(f / "plain", CAUSAL, template=None), "chat template"),
    ],
    ids=["no such folder", "not a causal LM", "no chat template"],
)
def test_a_model_that_cannot_be_served_is_refused_before_anything_starts(tmp_path, model, word):
    result = swarmq("up", write_job(tmp_path, model(tmp_path)))
    assert result.exit_code == 1
    assert word in result.output
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", ["up", "invite", "proxy", "learner", "collector", "demo"])
def test_a_run_folder_that_cannot_be_is_named_before_anything_starts(tmp_path, monkeypatch, command):
    monkeypatch.delattr("swarmq.demo.run.ensure_model")
    monkeypatch.setattr("swarmq.runtime.logs.configure", lambda **_: None)
    monkeypatch.chdir(tmp_path)
    extra = 'engine.urls = ["http://127.0.0.1:1"]\n[broker]\nurl = "amqp://u:p@127.0.0.1:1/"\n[proxy]\nport = 8000\n'
    job = write_job(tmp_path, folder_of_model(tmp_path / "model", CAUSAL), extra)
    folder = ["--folder", "job.toml"] if command == "demo" else [job, "--set", "folder=job.toml"]
    result = swarmq(command, *folder)
    assert (result.exit_code, "job.toml" in result.output) == (1, True), result.output
    assert "cannot be written to (" in result.output
    assert "choose another `folder`" in result.output


def test_what_is_wrong_with_a_demo_is_said_before_its_model_is_made(tmp_path, monkeypatch):
    monkeypatch.delattr("swarmq.demo.run.ensure_model")
    monkeypatch.chdir(tmp_path)
    for option, says in ((["--run", "A B"], "run: 'A B' must be"), (["--set", "nope=1"], "nope: unknown field")):
        result = swarmq("demo", *option)
        assert (result.exit_code, says in result.output) == (1, True), result.output
    assert not list(tmp_path.iterdir())


def test_a_job_file_that_does_not_exist_is_named():
    result = swarmq("up", "/nowhere/job.toml")
    assert result.exit_code == 1
    assert "/nowhere/job.toml" in result.output


@pytest.mark.parametrize("command", ["status", "watch", "inspect"])
def test_a_folder_that_is_no_run_is_said_to_be_none(tmp_path, command):
    result = swarmq(command, tmp_path)
    assert result.exit_code == 1
    assert "not the folder of a run" in result.output


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'run = "\xff"', "resolved.toml: not TOML: 'utf-8' codec can't decode"),
        (b"run = ", "resolved.toml: not TOML"),
        (b"", "resolved.toml: run: missing"),
        (None, "resolved.toml: cannot be read (Is a directory)"),
    ],
)
def test_settings_that_cannot_be_read_are_named(tmp_path, content, says):
    path = tmp_path / "resolved.toml"
    path.mkdir() if content is None else path.write_bytes(content)
    result = swarmq("status", tmp_path)
    assert (result.exit_code, says in result.output) == (1, True), result.output


@pytest.mark.parametrize("command", ["status", "inspect"])
def test_a_folder_that_cannot_be_looked_into_is_named_with_the_reason(tmp_path, command):
    result = swarmq(command, tmp_path / ("x" * 300))
    assert (result.exit_code, "resolved.toml: cannot be read (File name too long)" in result.output) == (1, True)


def test_a_worker_without_an_invite_is_told_where_to_get_one():
    result = swarmq("worker", "agent:attempt", SWARMQ_INVITE="")
    assert result.exit_code == 1
    assert "invite" in result.output.lower()


def test_what_means_nothing_beside_eval_is_refused(tmp_path):
    result = swarmq("feed", tmp_path, "data.jsonl", "--eval", "--epochs", 2, "--seed", 0, "--restart")
    assert result.exit_code == 1
    assert "--epochs, --seed, --restart: cannot be combined with --eval" in result.output


def test_errors_of_several_tasks_are_all_said_once(capsys):
    group = ExceptionGroup("both", [BrokerError("no broker"), ExceptionGroup("deep", [EngineError("no engine")])])
    with pytest.raises(SystemExit), common.errors_as_lines():
        raise group
    assert capsys.readouterr().err == "swarmq: no broker\nswarmq: no engine\n"


def test_a_bug_keeps_its_traceback():
    with pytest.raises(ExceptionGroup), common.errors_as_lines():
        raise ExceptionGroup("mixed", [BrokerError("no broker"), KeyError("bug")])


def test_a_reader_that_has_gone_is_no_bug():
    with pytest.raises(BrokenPipeError), common.errors_as_lines():
        raise ExceptionGroup("tasks", [ExceptionGroup("inner", [BrokenPipeError(32, "Broken pipe")])])


def test_a_missing_extra_is_named(monkeypatch):
    for extra, command in {"learner": ["doctor", "/tmp"], "inspect": ["inspect", "/tmp"]}.items():
        monkeypatch.setitem(common.EXTRAS, extra, ("a_package_nobody_has",))
        result = swarmq(*command)
        assert result.exit_code == 1
        assert f"pip install 'swarmq[{extra}]'" in result.output


@pytest.mark.parametrize(
    ("command", "option"),
    [
        *(("demo", o) for o in ("--steps=-3", "--steps=0")),
        *(("feed", o) for o in ("--repeats=0", "--epochs=0", "--limit=-1")),
        *(("worker", o) for o in ("--concurrency=0", "--processes=0", "--max-attempts=0")),
        *(("proxy", o) for o in ("--port=70000", "--number=-1")),
        ("engine start", "--port=-1"),
        ("stop", "--after=0"),
        ("replay", "--until=-1"),
        ("doctor", "--batches=0"),
        ("token", "--days=0"),
        ("learner", "--num-gpus=0"),
    ],
)
def test_a_number_out_of_range_is_refused_before_anything_starts(command, option):
    result = swarmq(*command.split(), option)
    assert result.exit_code == 2
    assert "not in the range" in result.output
    assert option.split("=")[0] in result.output


def test_help_needs_nothing_heavy():
    script = "import sys; from swarmq import cli; heavy = {'torch', 'vllm', 'litestar', 'transformers'} & set(sys.modules); assert not heavy, heavy"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(
    ("there", "asked", "says"),
    [
        ((), ("proxy", "learner", "vllm"), "litestar, uvicorn, aiohttp, prometheus_client, uvloop, torch, "),
        (
            (),
            ("proxy", "learner", "vllm"),
            "pip install 'swarmq[host]' (for CUDA; without a GPU: make install in a checkout)",
        ),
        ((), ("proxy", "learner", "vllm", "demo"), "pip install 'swarmq[host,demo]'"),
        (
            ("vllm", *EXTRAS["learner"]),
            ("proxy", "learner", "vllm"),
            "prometheus_client, uvloop; pip install 'swarmq[proxy]'",
        ),
        (EXTRAS["proxy"], ("proxy", "learner"), "zstandard, safetensors, peft; pip install 'swarmq[learner]'"),
    ],
)
def test_everything_that_a_command_lacks_is_told_at_once_with_one_way_to_get_it(there, asked, says):
    with pytest.raises(MissingExtraError) as told:
        require_extras(*asked, installed=lambda name: name if name in there else None)
    assert says in str(told.value)


def test_one_extra_has_what_up_needs():
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert project["host"] == [f"swarmq[{','.join(HOST)}]"]
    for extra, modules in EXTRAS.items():
        names = {re.split(r"[<>=\[]", one)[0].replace("-", "_") for one in project[extra]}
        assert set(modules) <= names


def test_settings_of_the_environment_come_before_those_of_the_command_line(tmp_path):
    job = write_job(tmp_path)
    shown = swarmq("up", job, "--show", "--set", "run=c", SWARMQ_SET="run=b 'groups.group_size = 3'")
    assert tomllib.loads(shown.output)["run"] == "c"
    assert tomllib.loads(shown.output)["groups"]["group_size"] == 3
    refused = swarmq("up", job, "--show", SWARMQ_SET="run='b")
    assert refused.exit_code == 1
    assert "$SWARMQ_SET: No closing quotation" in refused.output


def test_an_engine_that_the_job_does_not_name_is_not_served(tmp_path):
    refused = swarmq("engine", "serve", write_job(tmp_path))
    assert refused.exit_code == 1
    assert "policies.main.engine.urls has 0 entries, none with number 0" in refused.output
    assert not (tmp_path / "runs").exists()
