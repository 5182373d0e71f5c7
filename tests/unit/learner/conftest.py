"""Fixtures of the learner's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.episodes import make_qwen


@pytest.fixture(autouse=True)
def logs_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entry points that run here leave them to the other tests."""
    monkeypatch.setattr("swarmq.runtime.logs.configure", lambda **_: None)


@pytest.fixture(scope="session")
def tiny_qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random Qwen3 with two layers and 128 tokens."""
    return make_qwen(tmp_path_factory.mktemp("models") / "tiny-qwen")


@pytest.fixture(scope="session")
def other_qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another random Qwen3 of the same shape."""
    return make_qwen(tmp_path_factory.mktemp("models") / "other-qwen", seed=1)
