"""Checks of images and other media that a request names by URL, which would be fetched from inside the run's network. Pure."""

from __future__ import annotations

import binascii
from typing import Any

from swarmq.proxy.http_errors import RefusedError

Json = dict[str, Any]


def check_media(chat: Json, *, remote: bool) -> None:
    """Raise RefusedError for a URL that is neither the content itself (`data:`) nor an image's https URL (allowed with `remote`), for
    an image that is not base64, and for a name under which an engine would find content of other agents."""
    for at, message in enumerate(chat.get("messages") or ()):
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if not isinstance(part, dict):
                continue
            if part.get("uuid") is not None:
                raise RefusedError(
                    f"messages[{at}]: a uuid could name content of other episodes in the engine's cache: send the content without it",
                    code="unsupported_parameter", param="messages",
                )  # fmt: skip
            for kind, url in _urls(part):
                served = ("data:", "https:") if remote and kind == "image_url" else ("data:",)
                if not url.lower().startswith(served):
                    raise RefusedError(
                        f"messages[{at}]: the url {url!r:.100} is not served, only {' and '.join(served)} urls: send the "
                        "content itself, in base64",
                        code="unsupported_parameter", param="messages",
                    )  # fmt: skip
                _check_base64(url, at)


def _check_base64(url: str, at: int) -> None:
    head, _, data = url.partition(",")
    if head.startswith("data:image/") and head.endswith(";base64"):
        try:
            binascii.a2b_base64(data, strict_mode=True)
        except ValueError as error:
            raise RefusedError(f"messages[{at}]: the image is not base64 ({error})", param="messages") from error


def _urls(part: Json) -> list[tuple[str, str]]:
    """Return the URLs of a part, each with the name of its field."""
    named = [(key, value) for key, value in part.items() if key == "url" or key.endswith("_url")]
    found = [(key, value.get("url") if isinstance(value, dict) else value) for key, value in named]
    return [(key, url) for key, url in found if isinstance(url, str)]
