"""Why an engine cannot be reached, in words for people."""

from __future__ import annotations

import os

import aiohttp

from swarmq.engine.guard import SECRET_ENV
from swarmq.errors import EngineError


def wrong_secret(url: str) -> EngineError:
    """Our error for an engine whose guard does not know the caller."""
    return EngineError(
        f"the engine at {url} asks for another secret than this run's: start it with ${SECRET_ENV} as "
        "`swarmq engine secret RUN` prints it"
    )


def unreached(url: str, error: aiohttp.ClientError | OSError) -> EngineError:
    """Our error for one of the driver's or the system's."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    why = str(cause) or type(cause).__name__
    if isinstance(cause, OSError) and cause.errno:
        why = os.strerror(cause.errno) if cause.errno > 0 else cause.strerror or why
    what = f"nothing answers there ({why})" if cause is not error else why
    return EngineError(f"the engine at {url} cannot be reached: {what}; is vLLM running, and is the url right?")
