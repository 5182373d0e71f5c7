"""A job that cannot run on a host is refused with the path of the setting, and nothing is made."""

from __future__ import annotations

import json

import pytest

from support.host import job
from swarmq.engine.server.gpus import GpuCapacity
from swarmq.errors import SwarmqError
from swarmq.host_daemon.check import JobCheck, find_setting

CONFIG = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "max_position_embeddings": 4096}


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    return str(folder)


def test_a_job_gets_the_host_s_folder_and_address(tmp_path, model):
    check = JobCheck(tmp_path, [], address="gpu-box")
    checked = check.check(job("math", policies={"main": {"model": model}}), gpus=None, is_admin=False)
    assert checked.job.folder == str(tmp_path)
    assert checked.job.proxy.host == "gpu-box"
    assert any(line.startswith("context of main: 4,096 tokens") for line in checked.lines), checked.lines
    own = job("math", policies={"main": {"model": model}}, proxy={"host": "10.0.0.1"})
    assert check.check(own, gpus=None, is_admin=False).job.proxy.host == "10.0.0.1"


def test_what_this_host_lacks_or_may_not_do_is_named_by_its_path(tmp_path, model):
    main = {"model": model}
    tls = {"certificate": "/nowhere/cert.pem", "key": "/nowhere/key.pem"}
    reference = {"train": {"reference": "/nowhere/model", "loss": {"kl": 0.1}}}
    critic = {"train": {"advantage": "gae", "critic": {"model": "/nowhere/model"}}}
    refused = {
        "policies.main.train.critic.model": {"policies": {"main": main | critic}},
        "policies.main.model": {"policies": {"main": {"model": "/nowhere/model"}}},
        "policies.main.train.reference": {"policies": {"main": main | reference}},
        "proxy.certificate": {"policies": {"main": main}, "proxy": tls},
        "folder": {"policies": {"main": main}, "folder": "/elsewhere"},
        "methods_folder": {"policies": {"main": main}, "methods_folder": "/"},
        "alerts.command": {"policies": {"main": main}, "alerts": {"command": "rm -r /"}},
        "policies.main.engine.arguments": {
            "policies": {"main": main | {"engine": {"arguments": ["--trust-remote-code"]}}}
        },
        "policies.main.train.launcher": {"policies": {"main": main | {"train": {"launcher": ["sh", "-c", "true"]}}}},
        "policies.main.train.max_steps": {"policies": {"main": main | {"train": {"max_steps": -1}}}},
    }
    check = JobCheck(tmp_path / "runs", [])
    for path, settings in refused.items():
        with pytest.raises(SwarmqError) as caught:
            check.check(job("math", **settings), gpus=None, is_admin=False)
        assert find_setting(str(caught.value)) == path, caught.value
    assert not (tmp_path / "runs").exists()


def test_an_admin_s_job_may_run_programs(tmp_path, model):
    tree = job("math", policies={"main": {"model": model}}, alerts={"command": "true"})
    assert JobCheck(tmp_path, []).check(tree, gpus=None, is_admin=True).job.alerts.command == "true"


def test_more_gpus_than_the_host_has_are_refused(tmp_path, model):
    gpu = GpuCapacity(total=80 << 30, free=1 << 30)
    tree = job("math", policies={"main": {"model": model}})
    with pytest.raises(SwarmqError, match="gpus: this host has 2, 3 are wanted"):
        JobCheck(tmp_path, [gpu, gpu]).check(tree, gpus=3, is_admin=False)
    assert JobCheck(tmp_path, [gpu, gpu]).check(tree, gpus=None, is_admin=False).num_gpus == 2


@pytest.mark.parametrize(
    ("message", "path"),
    [
        ("job: groups.group_size: Expected `int` >= 1", "groups.group_size"),
        ("set: policies.my-main.train.betas[0]: Expected", "policies.my-main.train.betas[0]"),
        ("broker: nodes must be odd", "broker"),
        ("cannot be reached", None),
        ("model folder x does not exist", None),
    ],
)
def test_the_path_of_a_setting_is_found_in_a_message(message, path):
    assert find_setting(message) == path
