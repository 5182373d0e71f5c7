"""Versions of vLLM that swarmq's client and weight control support."""

from __future__ import annotations

import re
from typing import Any

from swarmq.errors import EngineError

SUPPORTED_VERSIONS = ((0, 30), (0, 34))
"""Oldest supported version of vLLM, and the first later version that is not supported."""
SUPPORT_HINT = "0.30 to 0.33 are supported: pip install 'vllm>=0.30,<0.34'"


def check_installed_version(version: str) -> None:
    """Raise EngineError if the installed vLLM is not supported."""
    if not _is_supported(version):
        raise EngineError(f"vLLM {version} is installed; {SUPPORT_HINT}")


def check_server_version(url: str, reply: Any) -> None:
    """Raise EngineError if the server is not supported. `reply`: its answer to `GET /version`; an answer without a version
    number passes."""
    version = reply.get("version") if isinstance(reply, dict) else None
    if isinstance(version, str) and re.match(r"\d+\.\d+", version) and not _is_supported(version):
        raise EngineError(f"the engine at {url} runs vLLM {version}; {SUPPORT_HINT} on its host, then restart it")


def strip_local_part(version: str) -> str:
    """Return a version without its local part: `0.32.0` for `0.32.0+cpu`."""
    return version.partition("+")[0]


def _is_supported(version: str) -> bool:
    return SUPPORTED_VERSIONS[0] <= tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < SUPPORTED_VERSIONS[1]
