from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from structlog.testing import capture_logs
from torch._dynamo import callback

from swarmq.learner.model import compilations


@pytest.fixture(autouse=True)
def _registered_here_only() -> Iterator[None]:
    yield
    callback.callback_handler.clear()
    compilations.log_compilations.cache_clear()


def double(value: torch.Tensor) -> torch.Tensor:
    return value * 2


@pytest.mark.parametrize(("least", "logged"), [(0.0, ["compiled"]), (3600.0, [])])
def test_a_long_compilation_is_logged_once_and_a_later_call_of_what_is_compiled_is_not(
    least: float, logged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilations, "LOGGED_S", least)
    compilations.log_compilations()
    compilations.log_compilations()
    compiled = torch.compile(double, backend="eager")
    with capture_logs() as told:
        for _ in range(2):
            compiled(torch.ones(3))
    assert [entry["event"] for entry in told] == logged
    assert all(entry["part"] == "forward" and entry["seconds"] >= 0 for entry in told)
