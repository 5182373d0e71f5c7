"""What the OpenAPI document says is what the proxy does, for requests that schemathesis makes up from it, good and bad."""

import asyncio

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.config import SchemathesisConfig
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from support.proxy import token
from swarmq.testing.scripted_engine import END, ScriptedAnswer, encode

pytestmark = pytest.mark.slow

CHECKS = (
    not_a_server_error,
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
    negative_data_rejection,
)
KEYED = SchemathesisConfig.from_dict({"generation": {"with-security-parameters": False}})
"""What is wrong is never the key alone, which we send."""
AGENT = {
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"),
}
OPERATOR = {
    ("GET", "/metrics"),
    ("GET", "/v1/control/status"),
    ("GET", "/v1/control/episodes"),
    ("GET", "/v1/control/episodes/{episode_id}"),
    ("POST", "/v1/control/episodes"),
    ("POST", "/v1/control/episodes/{episode_id}/end"),
    ("POST", "/v1/control/episodes/{episode_id}/abort"),
    ("POST", "/v1/control/engines/add"),
    ("POST", "/v1/control/engines/remove"),
}
OPERATIONS = {*AGENT, *OPERATOR, ("GET", "/health")}
EXAMPLES = {GenerationMode.POSITIVE: 8, GenerationMode.NEGATIVE: 5}
SOON = 0.02


class Endless:
    """Lines of a scripted engine that never end."""

    def popleft(self) -> ScriptedAnswer:
        return ScriptedAnswer(token_ids=[*encode("so it is"), END])


def meant(case, mode) -> None:
    """The policies that there are, a reward for each, and no waiting for tickets that nobody issues."""
    if isinstance(case.body, dict) and case.body.get("model") and isinstance(case.body["model"], str):
        case.body["model"] = "main"
    if isinstance(case.body, dict) and "task_id" in case.body and isinstance(case.body.get("wait_s", 1), (int, float)):
        case.body["wait_s"] = SOON
    if mode is GenerationMode.POSITIVE and case.operation.path in ("/v1/chat/completions", "/v1/completions"):
        case.body["stream"] = (
            case.body["stream"] or bool(case.body.get("stream_options")) if "stream" in case.body else True
        )
        for message in case.body.get("messages", ()):
            if message["role"] in ("tool", "function") or message["content"] is None:  # they answer others
                message |= {"role": "user", "content": message["content"] or "hi"}
    if mode is GenerationMode.POSITIVE and case.operation.path.endswith("/end"):
        case.body |= {"reward": None, "rewards": {"main": 1.0, "other": 0.5}, "agent_rewards": {}, "policies": None}


@pytest.mark.parametrize("mode", EXAMPLES, ids=lambda mode: mode.value)
async def test_what_is_documented_is_what_happens(stages, tmp_path, mode):
    async with stages(folder=str(tmp_path)) as stage:
        stage.engine.lines = Endless()
        agent = {"authorization": f"Bearer {stage.key(mode='eval')}"}
        operator = {"authorization": f"Bearer {token('admin')}"}
        statuses: dict[str, set[int]] = {}

        def conform() -> None:
            document = schemathesis.openapi.from_url(f"{stage.url}/schema/openapi.json", timeout=120, config=KEYED)
            found = set()
            for each in document.get_all_operations():
                operation = each.ok()
                name = (operation.method.upper(), operation.path)
                found.add(name)
                if mode is GenerationMode.NEGATIVE and not (operation.body or operation.query):
                    continue  # nothing in it can be wrong

                @settings(
                    max_examples=EXAMPLES[mode],
                    phases=[Phase.generate],
                    deadline=None,
                    database=None,
                    derandomize=True,
                    suppress_health_check=list(HealthCheck),
                )
                @given(case=operation.as_strategy(generation_mode=mode))
                def holds(case) -> None:
                    meant(case, mode)
                    who = operator if (case.method.upper(), case.operation.path) in OPERATOR else agent
                    response = case.call(headers=who, timeout=120)
                    statuses.setdefault(case.operation.path, set()).add(response.status_code)
                    case.validate_response(response, checks=CHECKS)

                holds()
            assert found == OPERATIONS

        await asyncio.to_thread(conform)
    for path, seen in statuses.items():
        if mode is GenerationMode.POSITIVE and "engines" not in path:
            assert seen & {200, 201, 404, 409, 429}, f"{path}: nothing was answered, only {seen}"
        if mode is GenerationMode.NEGATIVE:
            assert seen & {400, 404, 405, 422}, f"{path}: nothing was refused, only {seen}"


async def test_methods_keys_and_bodies_are_asked_for_as_documented(stages, tmp_path):
    async with stages(folder=str(tmp_path)) as stage:
        async with stage.http.get(f"{stage.url}/schema/openapi.json") as response:
            paths = (await response.json())["paths"]
        for path, operations in paths.items():
            url = stage.url + path.format(episode_id="e", model="m") if "{" in path else stage.url + path
            documented = {method.upper() for method in operations}
            async with stage.http.options(url) as response:
                assert set(response.headers["allow"].split(", ")) == documented | {"OPTIONS"}, path
            for method in {"GET", "POST", "PUT", "PATCH", "DELETE"} - documented:
                async with stage.http.request(method, url) as response:
                    assert (response.status, set(response.headers["allow"].split(", "))) == (
                        405,
                        documented | {"OPTIONS"},
                    ), path
            for method, operation in operations.items():
                async with stage.http.request(method, url, json={} if method == "post" else None) as response:
                    is_open = not operation.get("security")
                    assert (response.status != 401) == is_open, path
                    assert is_open or "401" in operation["responses"], path
                lacks = {"authorization": f"Bearer {token('admin')}"}
                if method == "post" and "/control/" in path:
                    async with stage.http.post(url, headers=lacks) as response:
                        assert (response.status == 400) == operation["requestBody"]["required"], path
