"""Fixtures of the layouts' tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from support import forks
from swarmq.timeline import ResolvedTurn


@pytest.fixture(scope="session")
def make_model() -> Callable[..., PreTrainedModel]:
    return forks.make_model


@pytest.fixture(scope="session")
def make_group() -> Callable[..., list[list[ResolvedTurn]]]:
    return forks.make_group


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
