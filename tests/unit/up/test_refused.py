"""What cannot be trained from is refused before anything is started."""

import asyncio
from pathlib import Path

import pytest

from swarmq.config import Engine, Policy, SwarmJob
from swarmq.errors import ConfigError
from swarmq.up import deploy


def test_an_engine_that_would_not_report_what_it_samples(tmp_path: Path) -> None:
    engine = Engine(arguments=("--max-num-seqs", "8", "--logprobs_mode", "raw_logprobs"))
    job = SwarmJob(run="r", folder=str(tmp_path / "run"), policies={"main": Policy(model="m", engine=engine)})

    async def up() -> None:
        async with deploy(job, report=pytest.fail):
            pass

    with pytest.raises(ConfigError, match="--logprobs_mode would"):
        asyncio.run(up())
    assert list(tmp_path.iterdir()) == []
