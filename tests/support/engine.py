"""A real vLLM for as long as a test or a session wants it, on the CPU where there is no other."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from swarmq.config import EngineSettings, Policy
from swarmq.engine.auth import make_auth_headers
from swarmq.engine.server.launch import EngineProcess, is_cuda_build
from swarmq.runtime.processes import reserve_port

SECRET = "of the tests' engines"
"""What they ask every caller for."""
KNOWN = make_auth_headers(SECRET)
"""Headers with it."""
TORCHVISION = (Path(sys.prefix) / "torchvision", Path(__file__).parent / "torchvision_cpu")
"""Where `make install` puts it, and what lets it be imported there."""


def tiny_policy(
    model: Path, *arguments: str, max_model_len: int = 2048, trained: bool = True, **settings: Any
) -> Policy:
    """`arguments`: of vLLM's server. `settings`: further ones of the engine."""
    engine = EngineSettings(max_model_len=max_model_len, start_timeout_s=600.0, arguments=arguments, **settings)
    return Policy(model=str(model), engine=engine, trained=trained)


@contextlib.contextmanager
def running_engine(
    model: Path,
    log_path: Path,
    *arguments: str,
    sees: bool = False,
    environment: Mapping[str, str] | None = None,
    gpus: Sequence[int] | None = None,
    **settings: Any,
) -> Iterator[EngineProcess]:
    """The server, kept by a loop in a thread of its own: tests have loops of their own. `sees`: the model takes images."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="vllm")
    thread.start()
    engine = EngineProcess(
        tiny_policy(model, *arguments, trained=not sees, **settings),
        port=reserve_port(),
        log_path=log_path,
        secret=SECRET,
        environment=environment,
        gpus=gpus,
    )
    try:
        with pytest.MonkeyPatch.context() as patch:
            if sees and not is_cuda_build():  # a CUDA build has torchvision where everybody finds it
                assert TORCHVISION[0].is_dir(), f"there is no {TORCHVISION[0]}: `make install`"
                for folder in TORCHVISION:
                    patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
            asyncio.run_coroutine_threadsafe(engine.__aenter__(), loop).result()
        yield engine
        asyncio.run_coroutine_threadsafe(engine.__aexit__(None, None, None), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@dataclass
class Vllm:
    """Token ids in, token ids and log-probabilities out."""

    url: str
    model: Path
    session: aiohttp.ClientSession

    async def generate(
        self, prompt: Sequence[int], max_tokens: int, *, salt: str | None = None, **sampling: Any
    ) -> dict[str, Any]:
        return (await self.sample(prompt, max_tokens, salt=salt, **sampling))[0]

    async def sample(
        self, prompt: Sequence[int], max_tokens: int, *, salt: str | None = None, **sampling: Any
    ) -> list[dict[str, Any]]:
        """Return as many choices as `n` says."""
        body = {
            "cache_salt": salt,
            "model": str(self.model),
            "token_ids": list(prompt),
            "sampling_params": {"max_tokens": max_tokens, "logprobs": 0, "ignore_eos": True, **sampling},
        }
        async with self.session.post(f"{self.url}/inference/v1/generate", json=body) as response:
            assert response.status == 200, await response.text()
            return (await response.json())["choices"]

    async def metric(self, name: str) -> float:
        async with self.session.get(f"{self.url}/metrics") as response:
            lines = (await response.text()).splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((name + "{", name + " ")))


def logprobs_in(choice: dict[str, Any]) -> list[float]:
    return [entry["logprob"] for entry in choice["logprobs"]["content"]]
