"""docker-compose.yml: what it must never publish, and that it agrees with the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from swarmq import cli
from swarmq.broker.node.files import ACK_TIMEOUT_MS

yaml = pytest.importorskip("yaml", reason="PyYAML comes with the learner's packages")
ROOT = Path(__file__).parents[3]


@pytest.fixture
def compose() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "docker-compose.yml").read_text())


def test_the_services_are_there_and_each_says_whether_it_is_healthy(compose: dict[str, Any]) -> None:
    daemons = {name for name, service in compose["services"].items() if "profiles" not in service}
    assert daemons == {"rabbitmq", "proxy", "learner", "recorder"}
    assert all("healthcheck" in compose["services"][name] for name in daemons)
    assert compose["services"]["rabbitmq"]["image"] == "rabbitmq:4-management"


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
        assert {volume.split(":")[0] for volume in service["volumes"]} <= set(compose["volumes"])
        assert {config["source"] for config in service.get("configs", [])} <= set(compose["configs"])
        assert set(service.get("depends_on", {})) <= set(compose["services"])


def test_the_commands_are_ours(compose: dict[str, Any]) -> None:
    scripts = (ROOT / "pyproject.toml").read_text()
    for name in ("proxy", "learner"):
        assert f'\n{compose["services"][name]["command"][0]} = "swarmq.cli:' in scripts


def test_commands_see_the_run_that_the_daemons_work_on(compose: dict[str, Any]) -> None:
    tool, learner = compose["services"]["swarmq"], compose["services"]["learner"]
    assert (tool["entrypoint"], tool["profiles"]) == (["swarmq"], ["commands"])
    for what in ("build", "configs", "volumes"):
        assert tool[what] == learner[what]
    assert tool["environment"].items() >= learner["environment"].items()
    options = {parameter.envvar for parameter in cli.main.commands["invite"].params}
    assert set(tool["environment"]) - set(learner["environment"]) <= options


def test_clients_are_invited_to_the_ports_that_are_published(compose: dict[str, Any]) -> None:
    said = compose["services"]["swarmq"]["environment"]
    for name, service, inside in (("AMQP", "rabbitmq", "5672"), ("PROXY", "proxy", "8000")):
        [port] = [
            p.removesuffix(f":{inside}") for p in compose["services"][service]["ports"] if p.endswith(f":{inside}")
        ]
        assert port in said[f"SWARMQ_CLIENTS_{name}_URL"]


def test_the_broker_is_as_patient_as_the_private_node(compose: dict[str, Any]) -> None:
    assert f"consumer_timeout = {ACK_TIMEOUT_MS}\n" in compose["configs"]["rabbitmq"]["content"]
