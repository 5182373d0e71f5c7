"""Fixtures of the tests that need a real engine: a tiny model, and one vLLM server for the whole session."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.engine import running_engine
from support.tiny_model import tiny_model as make_tiny_model
from swarmq.engine.server.launch import EngineProcess


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """Folder of a random Qwen3 of 3 million parameters with tokenizer and chat template."""
    return make_tiny_model()


@pytest.fixture(scope="session")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """A vLLM server of `tiny_model` to share. A test that changes its weights puts the first ones back."""
    with running_engine(tiny_model, tmp_path_factory.mktemp("vllm") / "engine.log") as engine:
        yield engine


@pytest.fixture(scope="session")
def engine_url(request: pytest.FixtureRequest) -> str:
    """The shared server's URL: $SWARMQ_TEST_ENGINE_URL if set."""
    return os.environ.get("SWARMQ_TEST_ENGINE_URL") or request.getfixturevalue("engine").url
