"""Check that a served teacher answers. Without torch."""

from __future__ import annotations

import http.client
import os
import urllib.error
import urllib.request

from swarmq.engine.auth import make_auth_headers

ANSWER_S = 10.0
KEY_ENV = "SWARMQ_TEACHER_KEY"


def teacher_key() -> str:
    """Return the API key of the teacher's server, which may be the engine secret of another run; empty if the server requires
    none."""
    return os.environ.get(KEY_ENV, "")


def server_base_url(url: str) -> str:
    """Return the base URL of a server, without an OpenAI base URL's `/v1`."""
    return url.rstrip("/").removesuffix("/v1")


def find_teacher_trouble(url: str) -> str:
    """Return why the teacher at `url` does not answer, or "" if it does. A refusal counts as an answer."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        opener.addheaders = list(make_auth_headers(teacher_key()).items())
        opener.open(f"{server_base_url(url)}/v1/models", timeout=ANSWER_S).close()
    except urllib.error.HTTPError as error:
        with error:
            return f"answers {error.code}" if error.code >= 500 else ""
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        return f"does not answer ({reason})"
    return ""
