"""Fixtures of the fault runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.faults.nursery import Nursery

from support.episodes import make_qwen


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen(tmp_path_factory.mktemp("models") / "tiny-qwen")


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    with Nursery.open() as nursery:
        yield nursery
