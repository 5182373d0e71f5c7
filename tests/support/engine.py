"""A real vLLM on the CPU for as long as a test or a session wants it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

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


def tiny_policy(model: Path, *arguments: str, max_model_len: int = 2048, trained: bool = True) -> Policy:
    """`arguments`: of vLLM's server."""
    engine = EngineSettings(max_model_len=max_model_len, start_timeout_s=600.0, arguments=arguments)
    return Policy(model=str(model), engine=engine, trained=trained)


@contextlib.contextmanager
def running_engine(
    model: Path, log_path: Path, *arguments: str, sees: bool = False, environment: Mapping[str, str] | None = None
) -> Iterator[EngineProcess]:
    """The server, kept by a loop in a thread of its own: tests have loops of their own. `sees`: the model takes images."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="vllm")
    thread.start()
    engine = EngineProcess(
        tiny_policy(model, *arguments, trained=not sees),
        port=reserve_port(),
        log_path=log_path,
        secret=SECRET,
        environment=environment,
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
