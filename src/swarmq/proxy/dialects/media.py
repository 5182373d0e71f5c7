"""Images and other media that a request names by url: an engine would fetch them with its own rights, from inside. Pure."""

from __future__ import annotations

from typing import Any

from swarmq.proxy.refusals import RefusedError

Json = dict[str, Any]


def check_media(chat: Json, *, remote: bool) -> None:
    """Raise RefusedError for a url that is not the content itself (`data:`), nor https where that is `remote`."""
    served = ("data:", "https:") if remote else ("data:",)
    for at, message in enumerate(chat.get("messages") or ()):
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            for url in _urls(part) if isinstance(part, dict) else ():
                if not url.lower().startswith(served):
                    raise RefusedError(
                        f"messages[{at}]: the url {url!r:.100} is not served, only {' and '.join(served)} urls: send the "
                        "content itself, in base64",
                        code="unsupported_parameter", param="messages",
                    )  # fmt: skip


def _urls(part: Json) -> list[str]:
    named = [value for key, value in part.items() if key == "url" or key.endswith("_url")]
    found = [value.get("url") if isinstance(value, dict) else value for value in named]
    return [url for url in found if isinstance(url, str)]
