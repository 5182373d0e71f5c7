"""The secret that every caller of a run's engines must send.

The ASGI middleware that checks the secret runs inside vLLM (`swarmq.weights.vllm_plugin.middleware`). Only the standard
library is imported here, so that the middleware can import this module without the rest of swarmq.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping

SECRET_ENV = "SWARMQ_ENGINE_SECRET"  # noqa: S105 - the name of an environment variable, read by vLLM and by its callers


def make_auth_headers(secret: str) -> Mapping[str, str]:
    """Return the headers that authenticate a caller with `secret`; no headers if it is empty."""
    return {"authorization": format_bearer(secret)} if secret else {}


def carries_secret(authorization: bytes, secret: str) -> bool:
    """Return whether a request's `Authorization` header authenticates its caller; takes the same time for every wrong header."""
    return hmac.compare_digest(authorization, format_bearer(secret).encode())


def format_bearer(secret: str) -> str:
    """Return the value of the `Authorization` header for `secret`."""
    return f"Bearer {secret}"
