import pickle
import re
import sys

import pytest

from swarmq.client.runners.worker_processes import parse_targets, split_kind
from swarmq.environments import is_environment, load_agent, load_environment
from swarmq.environments.protocol import parse_target, read_payload
from swarmq.errors import MissingExtraError, TaskError


def test_targets_name_a_scheme_a_name_and_settings():
    target = parse_target("verifiers:owner/sums?size=3&split=test&env.agent.harness.id=bash&on=true")
    assert (str(target), target.settings) == (
        "verifiers:owner/sums", {"size": 3, "split": "test", "env.agent.harness.id": "bash", "on": True}
    )  # fmt: skip
    assert parse_target("openenv:http://host:8000").name == "http://host:8000"
    with pytest.raises(TaskError, match="behind `\\?` write key=value"):
        parse_target("gymnasium:X?nonsense")


def test_only_known_schemes_are_environments():
    assert is_environment("gymnasium:FrozenLake-v1")
    assert not any(map(is_environment, ("gymnasium:", "gymnasium", "agent:attempt", "hf:x", "tasks.jsonl", "")))
    with pytest.raises(TaskError, match="'tasks.jsonl' is no environment: write gymnasium:NAME"):
        load_environment("tasks.jsonl")


def test_a_kind_may_stand_before_a_target_whose_settings_have_equals_signs():
    assert split_kind("lake=gymnasium:X?size=3") == ("lake", "gymnasium:X?size=3")
    assert split_kind("gymnasium:X?size=3") == (None, "gymnasium:X?size=3")
    assert split_kind("agent:attempt") == (None, "agent:attempt")
    assert parse_targets(["gymnasium:X?size=3"], ["a", "b"]) == dict.fromkeys("ab", "gymnasium:X?size=3")
    assert parse_targets(["a=gymnasium:X?size=3", "b=my:f"], []) == {"a": "gymnasium:X?size=3", "b": "my:f"}
    with pytest.raises(TaskError, match="say which kind"):
        parse_targets(["gymnasium:X?size=3", "my:f"], [])


def test_a_missing_package_is_named_with_what_to_install(monkeypatch):
    for package in ("gymnasium", "reasoning_gym", "verifiers", "openenv"):
        monkeypatch.setitem(sys.modules, package, None)
    for target, package in (("gymnasium:FrozenLake-v1", "gymnasium"), ("reasoning-gym:chain_sum", "reasoning_gym")):
        with pytest.raises(MissingExtraError, match=rf"{target} needs {package}: pip install 'swarmq\[environments\]'"):
            load_environment(target)
    with pytest.raises(MissingExtraError, match="verifiers:x needs verifiers: pip install verifiers uv"):
        load_environment("verifiers:x")
    with pytest.raises(MissingExtraError, match="needs openenv: pip install openenv"):
        load_environment("openenv:http://127.0.0.1:1")


def test_a_task_of_another_data_set_is_refused_with_what_to_feed():
    target = parse_target("gymnasium:X")
    assert read_payload(target, {"environment": "gymnasium:X", "seed": 3}, {"seed": int}) == [3]
    for payload, made_by in (
        ({"environment": "gymnasium:Y"}, "gymnasium:Y"),
        ({"question": "?"}, "None"),
        ("a", "str"),
    ):
        with pytest.raises(TaskError, match=re.escape(f"not of gymnasium:X but of {made_by}: feed this kind with")):
            read_payload(target, payload, {"seed": int})
    with pytest.raises(TaskError, match="is damaged"):
        read_payload(target, {"environment": "gymnasium:X", "seed": "three"}, {"seed": int})


def test_an_agent_can_be_sent_to_another_process():
    pytest.importorskip("gymnasium")
    text = "gymnasium:FrozenLake-v1?tasks=2"
    agent = pickle.loads(pickle.dumps(load_agent(text)))
    assert agent.text == text
    assert len(list(agent.environment.tasks("train"))) == 2
