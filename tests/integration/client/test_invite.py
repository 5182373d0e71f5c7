"""A run whose parts are started one by one, as under docker compose: opened, joined, fed, looked at, shared."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from swarmq import AsyncSwarmClient, keys
from swarmq.broker import topology
from swarmq.broker.amqp import AmqpBroker
from swarmq.keys import Invite
from swarmq.messages import EpisodeBegin
from swarmq.registries.clients import read_clients

pytestmark = pytest.mark.broker
JOB = 'run = "{run}"\n[policies.main]\nmodel = "none"\nengine.urls = ["http://127.0.0.1:9"]\n'


async def test_a_run_in_parts_is_opened_joined_fed_looked_at_and_shared(tmp_path: Path, run_name: str, amqp_url: str):
    """What `docker compose run --rm swarmq ...` does, with the variables that docker-compose.yml sets."""
    (tmp_path / "job.toml").write_text(JOB.format(run=run_name))
    (tmp_path / "data.jsonl").write_text('{"id": "a"}\n')
    folder = tmp_path / "runs" / run_name
    said = {
        "SWARMQ_AMQP_URL": amqp_url,
        "SWARMQ_CLIENTS_AMQP_URL": amqp_url.replace("127.0.0.1", "localhost"),
        "SWARMQ_CLIENTS_PROXY_URL": "http://127.0.0.1:9/v1",
        "COLUMNS": "200",
    }

    async def swarmq(*words: object) -> str:
        command = [sys.executable, "-m", "swarmq", *map(str, words)]
        done = await asyncio.to_thread(
            subprocess.run, command, env={**os.environ, **said}, text=True, stdout=-1, stderr=-2, check=False
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    line = await swarmq("invite", tmp_path / "job.toml", "--set", f"folder={tmp_path / 'runs'}")
    invite = Invite.decode(line.removeprefix("export SWARMQ_INVITE="))
    assert (invite.amqp_url, invite.base_url) == (said["SWARMQ_CLIENTS_AMQP_URL"], said["SWARMQ_CLIENTS_PROXY_URL"])
    assert (folder / "invite").read_text().strip() == invite.encode()
    assert all((folder / name).stat().st_mode & 0o77 == 0 for name in ("invite", "resolved.toml", "secret"))
    async with AmqpBroker.open(amqp_url, name="test", deadline_s=120.0) as broker:
        await broker.declare(run_name, policies=["main"], kinds=["default"])
        async with AsyncSwarmClient(invite, spool=tmp_path / "spool") as client:
            ep = await client.begin_episode("t", mode="eval")
            root = keys.load_root(folder / "secret")
            claims = keys.verify(root, ep.api_key, run=run_name, now=0.0)
            assert claims.episode_id == ep.episode_id, "the proxy of that folder takes its keys"
            await ep.end(1.0)
        async with broker.consume(topology.inbox(run_name), prefetch=9) as deliveries:
            assert isinstance((await anext(deliveries)).message, EpisodeBegin)
        assert "published 8 slots" in await swarmq("feed", folder, tmp_path / "data.jsonl")
        assert run_name in await swarmq("status", folder)
        alice = Invite.decode(
            (await swarmq("client", "add", "alice", "--run", folder, "--http")).removeprefix("export SWARMQ_INVITE=")
        )
        assert (alice.client, alice.base_url) == ("alice", invite.base_url)
    assert set(read_clients(folder / "clients.json")) == {"alice"}
