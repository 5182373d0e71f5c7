"""Whether the server that has a teacher answers. No torch in here."""

from __future__ import annotations

import http.client
import os
import urllib.error
import urllib.request

from swarmq.engine.auth import authorized

ANSWER_S = 10.0
KEY_ENV = "SWARMQ_TEACHER_KEY"


def teacher_key() -> str:
    """What the teacher's server asks for: its api key, or the secret of an engine of another run; empty where it asks nobody."""
    return os.environ.get(KEY_ENV, "")


def base_of(url: str) -> str:
    """Of a server; an OpenAI base url ending in `/v1` will do as well."""
    return url.rstrip("/").removesuffix("/v1")


def trouble_of(url: str) -> str:
    """Why the teacher at `url` cannot be asked now, in words; empty where it answers, be it with a refusal."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        opener.addheaders = list(authorized(teacher_key()).items())
        opener.open(f"{base_of(url)}/v1/models", timeout=ANSWER_S).close()
    except urllib.error.HTTPError as error:
        with error:
            return f"answers {error.code}" if error.code >= 500 else ""
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        return f"does not answer ({reason})"
    return ""
