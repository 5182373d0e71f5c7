"""What cannot be trained from is refused before anything is started."""

import asyncio
from pathlib import Path

import pytest

from swarmq.broker import node_files
from swarmq.config import Engine, Policy, SwarmJob
from swarmq.errors import BrokerError, ConfigError
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


def test_a_disk_on_which_its_rabbitmq_would_take_no_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SWARMQ_AMQP_URL", raising=False)
    monkeypatch.setattr(node_files, "DISK_LIMIT_BYTES", 10**18)
    engine = Engine(urls=("http://127.0.0.1:9",))
    job = SwarmJob(run="r", folder=str(tmp_path), policies={"main": Policy(model="m", engine=engine)})

    async def up() -> None:
        async with deploy(job, report=pytest.fail):
            pass

    with pytest.raises(
        BrokerError, match=r"GB free, and RabbitMQ takes no messages below .* set `folder` to another disk"
    ):
        asyncio.run(up())
    assert not job.run_folder.broker.exists()
