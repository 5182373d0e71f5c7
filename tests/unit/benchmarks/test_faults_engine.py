"""The engine of fault runs takes weights as vLLM does, however it was left by whoever died."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch
from aiohttp import ClientSession
from aiohttp.test_utils import TestServer
from benchmarks.faults.engine import application

from swarmq.weights.push.pusher import WeightPusher

PAUSED = [("/pause", {})]
IN_DOUBT = [*PAUSED, ("/update_weight_version", {"new_version": "updating-1"}), ("/start_weight_update", {})]


@pytest.mark.parametrize("left", [[], PAUSED, IN_DOUBT], ids=["serving", "paused", "in an update"])
async def test_a_push_succeeds_however_the_engine_was_left(
    left: list[tuple[str, dict[str, str]]], tmp_path: Path
) -> None:
    async with TestServer(await application(tmp_path / "journal", token_s=0.0)) as server:
        url = str(server.make_url("")).rstrip("/")
        async with ClientSession() as http:
            for path, body in left:
                async with http.post(url + path, json=body) as response:
                    assert response.status == 200
        pusher = WeightPusher([url], tmp_path / "weights", patience_s=0)
        await asyncio.to_thread(pusher.push, [("w", torch.ones(4))], 2)
        async with ClientSession() as http, http.get(url + "/weight_info") as response:
            assert (await response.json())["weight_version"] == "2"
    events = [json.loads(line)["event"] for line in (tmp_path / "journal").read_text().splitlines()]
    assert events[-1] == "resume"
