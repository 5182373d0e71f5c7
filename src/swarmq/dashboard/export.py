"""One self-contained HTML file of an episode, a group or a run's report: the built front end with its data inlined.

    <style>app.css</style> ... <script type="application/json" id="data">{"answers": {path: answer}}</script>
    <script type="module">app.js</script>

The front end takes the answers of the API from the file (`web/src/embedded.ts`). A Content-Security-Policy in the file allows
exactly the inlined script and style, by their digests, and no network. Without litestar.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import msgspec

from swarmq.errors import EpisodeError
from swarmq.observe.episodes import MAX_TOKENS, read_detail, read_group, read_tokens
from swarmq.observe.index import STATES, EpisodeFilter, EpisodePage, EpisodeRow
from swarmq.observe.run import Run
from swarmq.version import __version__

Kind = Literal["episode", "group", "report"]

STATIC = Path(__file__).parent / "static"
MAX_EXPORT_BYTES = 64 * 1024 * 1024
"""Maximum size of an exported file in bytes; browsers open larger ones slowly, and mail servers refuse even smaller ones."""
MAX_SAMPLE_BYTES = 8 * 1024 * 1024
"""Maximum size of the sample episodes in a report, in bytes."""

VIEWS: dict[Kind, tuple[str, str]] = {
    "episode": ("episodes", "episode"),
    "group": ("groups", "group"),
    "report": ("overview", "overview"),
}
"""Kind -> part of the API's path after the run's id, and the view of the front end that shows it."""

SAFE = {
    b"<": b"\\u003c",
    b">": b"\\u003e",
    b"&": b"\\u0026",
    "\u2028".encode(): b"\\u2028",
    "\u2029".encode(): b"\\u2029",
}
"""Bytes that could end a script element or a line of JavaScript -> their escapes; in JSON they occur only inside of strings."""


def collect_run(run: Run, run_id: str) -> dict[str, Any]:
    """Return the name of a run as a payload of `export_html`, without its folder, which means nothing elsewhere."""
    entry: dict[str, Any] = {
        "id": run_id,
        "run": run.job.run,
        "folder": "",
        "state": "",
        "error": "",
        "at": None,
        "policies": {},
    }
    return {"runs": {"runs": [entry]}}


def collect_episode(run: Run, run_id: str, part: str, *, page_tokens: int = MAX_TOKENS) -> dict[str, Any]:
    """Return an episode with all of its tokens as payloads of `export_html`. Raises EpisodeError if there is no such episode."""
    detail = read_detail(run.index, part)
    path = f"runs/{run_id}/episodes/{detail.row.id}"
    payloads: dict[str, Any] = {path: detail}
    for timeline in range(detail.timelines):
        start, total = 0, 1
        while start < total:
            page = read_tokens(
                run.index, detail.row.id, timeline=timeline, start=start, limit=page_tokens, decoders=run.decoders
            )
            payloads[f"{path}/tokens?timeline={timeline}&from={start}"] = page
            start, total = page.positions[1], page.total
    return payloads


def collect_group(run: Run, run_id: str, group: str, *, page_tokens: int = MAX_TOKENS) -> dict[str, Any]:
    """Return a group with all of its episodes as payloads of `export_html`. Raises EpisodeError if there is no such group."""
    view = read_group(run.index, group)
    payloads: dict[str, Any] = {f"runs/{run_id}/groups/{group}": view}
    for member in view.members:
        payloads |= collect_episode(run, run_id, member.row.id, page_tokens=page_tokens)
    return payloads


def collect_samples(run: Run, run_id: str, *, each: int = 2, max_bytes: int = MAX_SAMPLE_BYTES) -> dict[str, Any]:
    """Return the newest `each` episodes of every state and reason, with their tokens, and the list of them, as payloads of
    `export_html`. Episodes that no longer fit into `max_bytes` are left out."""
    payloads: dict[str, Any] = {}
    rows: list[EpisodeRow] = []
    size = 0
    for state in STATES:
        for reason in sorted(run.index.values("reason", EpisodeFilter(state=state))):
            newest = run.index.page(EpisodeFilter(state=state, reason=reason), limit=each).rows
            for row in newest if reason else [row for row in newest if not row.reason]:
                sample = collect_episode(run, run_id, row.id)
                size_of_one = len(msgspec.json.encode(sample))
                if size + size_of_one <= max_bytes:
                    size += size_of_one
                    payloads |= sample
                    rows.append(row)
    rows.sort(key=lambda row: row.began_at, reverse=True)
    return payloads | {f"runs/{run_id}/episodes": EpisodePage(rows=rows, total=len(rows), next=None)}


def export_html(
    kind: Kind, payloads: Mapping[str, Any], *, folder: Path | None = None, max_bytes: int = MAX_EXPORT_BYTES
) -> bytes:
    """Return a page that shows `payloads` without a server.

    `payloads` maps paths of the API to their answers: the path without `/api/`, unquoted, with those parameters that tell its
    answers apart (`runs/math/steps?policy=main`); all other parameters are ignored by the page. The first path decides what
    the page opens with. `runs` names the run, `runs/ID/episodes` lists a sample of episodes that are payloads, too. The path of the
    run's `folder` on this machine is replaced by its name. Raises EpisodeError if the page would be larger than `max_bytes`.
    """
    data = embed_json(
        {
            "kind": kind,
            "start": find_start(kind, next(iter(payloads))),
            "made_at": time.time(),
            "version": __version__,
            "answers": {"me": {"name": "", "roles": [], "base": "", "can_operate": False}, "runs": {"runs": []}}
            | dict(payloads),
        }
    )
    if folder is not None:
        for path in sorted({str(folder.absolute()), str(folder.resolve())}, key=len, reverse=True):
            data = data.replace(embed_json(path)[1:-1], embed_json(folder.resolve().name)[1:-1])
    script = (STATIC / "app.js").read_bytes().replace(b"</script", b"<\\/script").replace(b"<!--", b"\\x3c!--")
    style = (STATIC / "app.css").read_bytes().replace(b"</style", b"<\\/style")
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    page = b"".join(
        (
            b'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">'.encode(),
            b'<meta name="viewport" content="width=device-width, initial-scale=1">',
            b'<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">',
            b'<link rel="icon" href="data:,"><title>swarmq</title><style>',
            style,
            b'</style></head><body><div id="app"></div><noscript>This file needs JavaScript.</noscript>',
            b'<script type="application/json" id="data">',
            data,
            b'</script><script type="module">',
            script,
            b"</script></body></html>\n",
        )
    )
    if len(page) > max_bytes:
        raise EpisodeError(
            f"export of this {kind} has {len(page) / 1e6:.1f} MB, over the limit of {max_bytes / 1e6:.1f} MB: "
            + ("export single episodes" if kind != "episode" else "read it with `swarmq inspect` instead")
        )
    return page


def embed_json(data: Any) -> bytes:
    """Return JSON that may stand inside of a script element, whatever its strings contain."""
    text = msgspec.json.encode(data)
    for raw, escaped in SAFE.items():
        text = text.replace(raw, escaped)
    return text


def find_start(kind: Kind, path: str) -> str:
    """Return the hash of the view that shows an API path, e.g. `#/run/math/episode/E` for `runs/math/episodes/E`."""
    _, run, resource, *rest = path.partition("?")[0].split("/")
    expected, view = VIEWS[kind]
    if resource != expected:
        raise ValueError(f"first payload of a {kind} export is {path}, expected runs/RUN/{expected}/...")
    return "#/" + "/".join(quote(part, safe="") for part in ("run", run, view, *(["/".join(rest)] if rest else [])))


def _digest(content: bytes) -> str:
    """Return the digest of an inlined script or style for a Content-Security-Policy."""
    return f"sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}"
