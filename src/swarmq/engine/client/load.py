"""The load of a vLLM server, read from its `/metrics`: running and waiting requests, and KV cache use.

Only the standard library is needed, because the process that records a run may have no other HTTP client.
"""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from collections import defaultdict

import msgspec

from swarmq.engine.auth import make_auth_headers
from swarmq.errors import EngineError

READ_S = 3.0
MAX_BYTES = 8 * 1024 * 1024
SAMPLE = re.compile(
    r"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc)(?:\{.*\})? (\S+)", re.MULTILINE
)
NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opener that ignores $http_proxy, as all other requests to engines do."""


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The load of one engine, summed over its replicas."""

    running: int
    """Number of requests that are being sampled."""
    waiting: int
    """Number of requests in the engine's queue."""
    kv: float | None
    """Share of the KV cache in use, 0 to 1, averaged over the replicas; None if the engine does not report it."""


def read_load(url: str, secret: str) -> EngineLoad:
    """Return the load of the engine at `url`. Blocks up to READ_S. Raises EngineError."""
    page = f"{url.rstrip('/')}/metrics"
    request = urllib.request.Request(page, headers=dict(make_auth_headers(secret)))  # noqa: S310 - as configured
    try:
        with NO_PROXY.open(request, timeout=READ_S) as answer:
            return parse_load(answer.read(MAX_BYTES).decode(errors="replace"))
    except (OSError, ValueError, urllib.error.URLError) as error:
        raise EngineError(f"{page}: cannot be read ({error})") from error


def parse_load(text: str) -> EngineLoad:
    """Parse the text of a `/metrics` page. Raises ValueError if it has no metrics of vLLM."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for name, value in SAMPLE.findall(text):
        found[name].append(float(value))
    if "num_requests_running" not in found:
        raise ValueError("no metrics of vLLM")
    shares = found["kv_cache_usage_perc"]
    return EngineLoad(
        running=round(sum(found["num_requests_running"])),
        waiting=round(sum(found["num_requests_waiting"])),
        kv=sum(shares) / len(shares) if shares else None,
    )
