"""What readers of a dashboard do not see of a run's settings."""

from __future__ import annotations

import pytest

from swarmq.config import SwarmJob
from swarmq.dashboard.views import list_settings


@pytest.mark.parametrize(
    ("section", "field", "value", "shown"),
    [
        ("alerts", "url", "https://hooks.example.org/services/T0/key", "https://hooks.example.org/…"),
        ("alerts", "url", "https://example.org?token=key", "https://example.org/…"),
        ("alerts", "command", "/usr/bin/page --key abc", "/usr/bin/page …"),
        ("alerts", "command", "page", "page"),
        ("broker", "url", "amqp://swarmq:key@host:5672/", "amqp://…@host:5672/"),
    ],
)
def test_keys_and_passwords_are_left_out(section: str, field: str, value: str, shown: str) -> None:
    job = SwarmJob.build({"run": "r", "policies": {"main": {"model": "m"}}, section: {field: value}})
    assert list_settings(job)[f"{section}.{field}"] == shown
