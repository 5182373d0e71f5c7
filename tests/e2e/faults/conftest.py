"""Fixtures of the fault runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.episodes import make_qwen


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen(tmp_path_factory.mktemp("models") / "tiny-qwen")
