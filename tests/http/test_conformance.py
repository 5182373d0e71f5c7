"""What the OpenAPI document says is what the proxy does, for requests that schemathesis makes up from it."""

import asyncio

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from swarmq.testing.scripted_engine import END, Line, encode

pytestmark = pytest.mark.slow

CHECKS = (not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance)
OPERATIONS = {
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"),
}


EXAMPLES = 8


class Endless:
    """Lines of a scripted engine that never end."""

    def popleft(self) -> Line:
        return Line(token_ids=[*encode("so it is"), END])


async def test_what_is_documented_is_what_happens(stage):
    stage.engine.lines = Endless()
    headers = {"authorization": f"Bearer {stage.key(mode='eval')}"}
    statuses: dict[str, set[int]] = {}

    def conform() -> None:
        document = schemathesis.openapi.from_url(f"{stage.url}/schema/openapi.json")
        found = set()
        for each in document.get_all_operations():
            operation = each.ok()
            name = (operation.method.upper(), operation.path)
            if name not in OPERATIONS:
                continue
            found.add(name)

            @settings(
                max_examples=EXAMPLES,
                phases=[Phase.generate],
                deadline=None,
                database=None,
                derandomize=True,
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy())
            def holds(case) -> None:
                if isinstance(case.body, dict) and case.body.get("model"):
                    case.body["model"] = "main"
                response = case.call(headers=headers)
                statuses.setdefault(case.operation.path, set()).add(response.status_code)
                case.validate_response(response, checks=CHECKS)

            holds()
        assert found == OPERATIONS

    await asyncio.to_thread(conform)
    for path, seen in statuses.items():
        assert seen & {200, 404}, f"{path}: nothing was answered, only {seen}"
