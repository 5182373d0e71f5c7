"""A proxy in this process between a real vLLM and a real RabbitMQ."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support.real_proxy import RealStage, real_stage
from support.steered import SteeredEngine


@pytest.fixture
async def stage(engine_url: str, amqp_url: str, run_name: str, tiny_model: Path) -> AsyncIterator[RealStage]:
    async with real_stage(run_name, tiny_model, engine_url=engine_url, amqp_url=amqp_url, max_tokens=24) as made:
        yield made


@pytest.fixture
async def steered(engine_url: str, amqp_url: str, run_name: str, tiny_model: Path) -> AsyncIterator[RealStage]:
    """The same, whose model makes tool calls and ends (`support.steered`)."""
    urls = {"engine_url": engine_url, "amqp_url": amqp_url}
    async with real_stage(run_name, tiny_model, **urls, max_tokens=200, engine=SteeredEngine) as made:
        yield made
