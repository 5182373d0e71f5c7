"""The reference that the site makes of the code is complete: nothing public is missing, and nothing lacks a description."""

from __future__ import annotations

import re

import click
import msgspec
import pytest
from docs.generator.reference import GENERATED, python_api
from docs.generator.reference.source import field_docs
from prometheus_client.parser import text_string_to_metric_families

import swarmq
from swarmq import cli, errors, rewards
from swarmq.broker import topology
from swarmq.config import Settings
from swarmq.learner.feed.metrics import LearnerMetrics


def classes(base=Settings):
    return {sub for one in base.__subclasses__() for sub in {one, *classes(one)}}


@pytest.fixture(scope="module")
def generated():
    return {name: make() for name, make in GENERATED.items()}


@pytest.mark.parametrize("owner", sorted(classes(), key=lambda kind: kind.__name__), ids=lambda kind: kind.__name__)
def test_every_setting_has_a_description(owner):
    described = field_docs(owner)
    assert [field.name for field in msgspec.structs.fields(owner) if not described.get(field.name)] == []
    assert owner.__doc__


def test_every_setting_is_listed_with_type_and_default(generated):
    page = generated["settings"]
    listed = re.findall(r"^```\{confval\} (\S+)\n:type: (.+)\n:default: (.+)\n\n\S", page, re.MULTILINE)
    names = {path.rpartition(".")[2] for path, _, _ in listed}
    sections = set(re.findall(r"^## `\[+(?:[\w.]+\.)?([a-z_]+)(?:\.[A-Z]+)?\]+`$", page, re.MULTILINE))
    for owner in classes():
        assert {field.encode_name for field in msgspec.structs.fields(owner)} <= names | sections
    assert ("policies.POLICY.train.loss.ratio_cap", "number, > 0", "`20.0`") in listed
    assert ("groups.group_size", "whole number, ≥ 1", "`8`") in listed


def test_public_names_methods_and_errors_have_docstrings_and_are_listed(generated):
    assert python_api.missing_docstrings() == []
    for name in set(swarmq.__all__) - {"__version__", "SwarmqError"}:
        assert re.search(rf"swarmq\.{name}\b", generated["names"])
    for name in rewards.__all__:
        assert f"swarmq.rewards.{name}" in generated["rewards"]
    for one in vars(errors).values():
        if isinstance(one, type) and issubclass(one, errors.SwarmqError):
            assert one.__doc__
            assert f"{{py:exception}} swarmq.errors.{one.__name__}\n" in generated["errors"]
    for name in ("Run", "EpisodeRow", "EpisodeDetail", "StepRow", "LedgerView"):
        assert re.search(rf"{{py:class}} swarmq\.observe\.\w+\.{name}\b", generated["run-records"])


def test_every_command_and_option_is_listed(generated):
    def walk(command, path):
        yield command, path
        for name, sub in getattr(command, "commands", {}).items():
            yield from walk(sub, f"{path} {name}")

    for command, path in walk(cli.main, "swarmq"):
        part = generated["commands"].partition(f"## {path}\n")[2].partition("\n## ")[0]
        assert part, path
        for option in command.params:
            if isinstance(option, click.Option) and not option.hidden:
                assert option.help, f"{path}: {option.opts} has no help"
                assert option.opts[0] in part


def test_every_queue_is_listed(generated):
    for name in topology.run_queues("<run>", policies=["<policy>"], kinds=["<kind>"]):
        assert f"| `{name}` |" in generated["queues"]


def test_metrics_are_listed_with_their_labels(generated):
    for family in text_string_to_metric_families(LearnerMetrics("main").page().decode()):
        assert family.documentation in generated["metrics"]
    assert "| `swarmq_branches_total` | counter | `reason` |" in generated["metrics"]
    assert "| `swarmq_engine_up` | gauge | `engine`, `policy` |" in generated["metrics"]


def test_routes_are_listed_with_role_and_fields(generated):
    begin = generated["proxy-routes"].partition("## POST /v1/control/episodes\n")[2].partition("\n## ")[0]
    assert "with the role `rollout`" in begin
    assert "429" in begin
    for line in ("| `task_id` | text | required |", "| `wait_s` | number | `30.0` | Seconds to wait for a ticket. |"):
        assert line in generated["proxy-routes"]
    launch = generated["host-routes"].partition("## POST /v1/runs\n")[2].partition("\n## ")[0]
    assert "with the role `operate`" in launch
    assert "| `request_id` | text | required | Id of this launch, chosen by the client. |" in generated["host-routes"]
    without = re.findall(r"^\| `[A-Z]+ (/\S+)` \|  \|$", generated["dashboard-routes"], re.MULTILINE)
    assert without == [], "these handlers of the dashboard have no docstring"
