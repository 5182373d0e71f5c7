"""Which vLLM swarmq's client and its control of weights were written for."""

from __future__ import annotations

import re
from typing import Any

from swarmq.errors import EngineError

SUPPORTED_VERSIONS = ((0, 30), (0, 34))
"""vLLM from the first version, before the second."""
SUPPORT_HINT = "0.30 to 0.33 are supported: pip install 'vllm>=0.30,<0.34'"


def check_installed_version(version: str) -> None:
    """Raises EngineError for a vLLM installed here that is not of the range."""
    if not _is_supported(version):
        raise EngineError(f"vLLM {version} is installed, {SUPPORT_HINT}")


def check_server_version(url: str, told: Any) -> None:
    """Raises EngineError for a server out of the range. `told`: its answer to `GET /version`; one without a number passes."""
    version = told.get("version") if isinstance(told, dict) else None
    if isinstance(version, str) and re.match(r"\d+\.\d+", version) and not _is_supported(version):
        raise EngineError(f"the engine at {url} is vLLM {version}, {SUPPORT_HINT} where it runs, and start it again")


def _is_supported(version: str) -> bool:
    return SUPPORTED_VERSIONS[0] <= tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < SUPPORTED_VERSIONS[1]
