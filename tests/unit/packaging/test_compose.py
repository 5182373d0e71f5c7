"""docker-compose.yml: what it must never publish, and that it agrees with the code."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from swarmq import cli
from swarmq.broker.node.files import ACK_TIMEOUT_MS
from swarmq.cli.common import SETS_ENV
from swarmq.config import SwarmJob

yaml = pytest.importorskip("yaml", reason="PyYAML comes with the learner's packages")
ROOT = Path(__file__).parents[3]


@pytest.fixture
def compose() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "docker-compose.yml").read_text())


def test_the_services_are_there_and_each_says_whether_it_is_healthy(compose: dict[str, Any]) -> None:
    profiles = {name: service.get("profiles") for name, service in compose["services"].items()}
    always = {"rabbitmq": None, "proxy": None, "collector": None, "recorder": None}
    assert profiles == {
        **always, "engine": ["cpu"], "learner": ["cpu"], "engine-gpu": ["gpu"], "learner-gpu": ["gpu"], "swarmq": ["commands"],
    }  # fmt: skip
    assert all("healthcheck" in service for name, service in compose["services"].items() if name != "swarmq")
    assert all("restart" in service for service in compose["services"].values())


def test_base_images_are_those_that_a_script_can_make(compose: dict[str, Any]) -> None:
    made = runpy.run_path(str(ROOT / "scripts/base_images.py"))["IMAGES"]
    stages = re.findall(r"^FROM (\S+?)(?: AS (\S+))?$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    named = {stage for _, stage in stages} | {"scratch", "packages-${VLLM}"}
    assert {image for image, _ in stages} - named | {compose["services"]["rabbitmq"]["image"]} == set(made)


def test_no_service_runs_as_root(compose: dict[str, Any]) -> None:
    assert compose["services"]["rabbitmq"]["user"] == "rabbitmq"
    last = re.split(r"^FROM ", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)[-1]
    assert re.findall(r"^USER (.*)", last, re.MULTILINE) == ["swarmq"]
    assert {service.get("user") for name, service in compose["services"].items() if name != "rabbitmq"} == {None}


def test_every_port_is_published_on_loopback_alone(compose: dict[str, Any]) -> None:
    ports = [port for service in compose["services"].values() for port in service.get("ports", [])]
    assert len(ports) == 3
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_no_password_is_written_down(compose: dict[str, Any]) -> None:
    assert compose["services"]["rabbitmq"]["environment"]["RABBITMQ_DEFAULT_PASS"].startswith(
        "${SWARMQ_BROKER_PASSWORD:?"
    )
    for url in re.findall(r"amqp://\S+", (ROOT / "docker-compose.yml").read_text()):
        assert re.match(r"amqp://swarmq:(<the|\$\{SWARMQ_BROKER_PASSWORD\}@)", url), url


def test_every_volume_config_and_dependency_exists(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        assert {volume.split(":")[0] for volume in service["volumes"]} - {"${SWARMQ_MODELS"} <= set(compose["volumes"])
        assert {config["source"] for config in service.get("configs", [])} <= set(compose["configs"])
        assert set(service.get("depends_on", {})) <= set(compose["services"])


def test_the_commands_are_ours(compose: dict[str, Any]) -> None:
    scripts = (ROOT / "pyproject.toml").read_text()
    for name in ("proxy", "collector", "learner"):
        assert f'\n{compose["services"][name]["command"][0]} = "swarmq.__main__:' in scripts
    for name in ("engine", "recorder"):
        group: Any = cli.main
        words = compose["services"][name]["command"][1:]
        for word in words[: words.index("/etc/swarmq/job.toml")]:
            group = group.commands[word]


def test_commands_see_the_run_that_the_daemons_work_on(compose: dict[str, Any]) -> None:
    tool, learner = compose["services"]["swarmq"], compose["services"]["learner"]
    assert (tool["entrypoint"], tool["profiles"]) == (["swarmq"], ["commands"])
    for what in ("image", "configs", "volumes"):
        assert tool[what] == learner[what]
    assert tool["environment"].items() >= learner["environment"].items()
    options = {parameter.envvar for parameter in cli.main.commands["invite"].params}
    assert set(tool["environment"]) - set(learner["environment"]) <= options


def test_every_setting_that_compose_adds_exists(compose: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text('run = "toy"\n[policies.main]\nmodel = "none"\n')
    said = re.sub(r"\$\{\w+:-(\w+)\}", r"\1", compose["services"]["proxy"]["environment"][SETS_ENV])
    job = SwarmJob.load(tmp_path / "job.toml", sets=shlex.split(said))
    assert job.folder == "/runs"
    [url] = job.policies["main"].engine.urls
    aliases = compose["services"]["engine"]["networks"]["default"]["aliases"]
    assert aliases == compose["services"]["engine-gpu"]["networks"]["default"]["aliases"] == [urlsplit(url).hostname]


def test_clients_are_invited_to_the_ports_that_are_published(compose: dict[str, Any]) -> None:
    said = compose["services"]["swarmq"]["environment"]
    for name, service, inside in (("AMQP", "rabbitmq", "5672"), ("PROXY", "proxy", "8000")):
        [port] = [
            p.removesuffix(f":{inside}") for p in compose["services"][service]["ports"] if p.endswith(f":{inside}")
        ]
        assert port in said[f"SWARMQ_CLIENTS_{name}_URL"]


def test_the_broker_is_as_patient_as_the_private_node(compose: dict[str, Any]) -> None:
    assert f"consumer_timeout = {ACK_TIMEOUT_MS}\n" in compose["configs"]["rabbitmq"]["content"]
