"""The dashboard's HTTP application: a JSON API over run folders, server-sent events, and the built front end.

    browser ── cookie ──> ASGI: security headers ──> litestar ──> a thread of a few ──> views, overview, observe ──> files
       ^────────────────── server-sent events ── what changed ── OpenRun (shelf.py) ── sizes and times of files ───────┘

`swarmq dashboard` serves it at its own address; a proxy forwards requests under /dashboard to it (`behind_proxy.py`).
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, get_args, get_origin
from urllib.parse import urlsplit

import anyio
import anyio.to_thread
import msgspec
import structlog
from litestar import Litestar, Request, get, post
from litestar.config.compression import CompressionConfig
from litestar.connection import ASGIConnection
from litestar.datastructures import Cookie
from litestar.exceptions import HTTPException
from litestar.handlers import BaseRouteHandler, HTTPRouteHandler
from litestar.params import FromPath
from litestar.response import Response, Stream
from litestar.types import ASGIApp, Message, Receive, Scope, Send

from swarmq.dashboard import actions, views
from swarmq.dashboard.access import HEADERS, Access, ForbiddenError, Reader
from swarmq.dashboard.export import (
    STATIC,
    Kind,
    collect_episode,
    collect_group,
    collect_run,
    collect_samples,
    export_html,
)
from swarmq.dashboard.overview import view_overview
from swarmq.dashboard.shelf import Shelf, UnknownRunError
from swarmq.errors import (
    BrokerError,
    CollectorError,
    ConfigError,
    EpisodeError,
    KeyRefusedError,
    SwarmqError,
    TimelineError,
)
from swarmq.observe.episodes import (
    MAX_TOKENS,
    EpisodeDetail,
    GroupView,
    TokenPage,
    read_detail,
    read_group,
    read_tokens,
)
from swarmq.observe.index import EpisodeFilter, Histogram, parse_filter
from swarmq.observe.run import Run
from swarmq.proxy.http.authorization import read_bearer

READERS = 4
"""Maximum number of requests that read files at the same time; further requests wait."""
MAX_ROWS = 1000
MAX_LINES = 20_000
MAX_DIFFERENT = 4
MAX_BODY = 64 * 1024
STREAM_PAUSE_S = 1.0
"""Minimum seconds between two events of a stream."""
READER = "swarmq_reader"
"""Key of the reader in a request's state."""
CONFIRM = "x-swarmq-confirm"
SESSION_S = 30 * 86_400

FILES = {
    "index.html": "text/html",
    "app.js": "text/javascript",
    "app.css": "text/css",
    "LICENSES.txt": "text/plain",
}

log = structlog.get_logger()
T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)


class Login(msgspec.Struct, frozen=True, kw_only=True):
    token: str


class Studies(Protocol):
    """What the dashboard shows of studies, which are above it."""

    def rows(self) -> Sequence[Any]: ...
    def show(self, id: str) -> dict[str, Any]:  # noqa: A002 - what addresses call it
        """Return a study. Raises UnknownRunError."""


def create_app(
    shelf: Shelf, access: Access, *, studies: Studies | None = None, base: str = "", is_secure: bool = False
) -> ASGIApp:
    """Create the dashboard.

    `studies`: the studies that it shows; none behind a proxy, which serves one run. `base`: prefix of its paths in the browser. `is_secure`: whether browsers reach it only by https.
    """
    pages = DashboardPages(shelf, access, studies=studies, base=base, is_secure=is_secure)

    @contextlib.asynccontextmanager
    async def close_shelf(_: Litestar) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await shelf.close()

    app = Litestar(
        pages.handlers(),
        lifespan=[close_shelf],
        openapi_config=None,
        exception_handlers={Exception: refuse},
        compression_config=CompressionConfig(backend="gzip", gzip_compress_level=4, exclude="/stream$"),
        request_max_body_size=MAX_BODY,
        logging_config=None,
    )
    return with_headers(app)


def with_headers(app: ASGIApp) -> ASGIApp:
    """Return the application with security headers on every answer, also on answers that no handler makes."""
    headers = [(name.encode(), value.encode()) for name, value in HEADERS.items()]

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *headers]
            await send(message)

        await app(scope, receive, send_with_headers)

    return answer


def refuse(_: Request[Any, Any, Any], error: Exception) -> Response[dict[str, str]]:
    """Answer an error as `{"error": text}`."""
    status = _status_of(error)
    if status == 500:
        log.error("page_failed", reason=repr(error), exc_info=error)
    text = error.detail if isinstance(error, HTTPException) else str(error)
    if status == 500:
        text = "the dashboard failed; its log says why"
    headers = {"cache-control": "no-store"} | (dict(error.headers or {}) if isinstance(error, HTTPException) else {})
    return Response({"error": text}, status_code=status, headers=headers)


def _status_of(error: Exception) -> int:
    match error:
        case HTTPException():
            return error.status_code
        case KeyRefusedError():
            return 401
        case ForbiddenError():
            return 403
        case UnknownRunError() | EpisodeError() | views.UnknownLogError():
            return 404
        case ConfigError():
            return 400
        case CollectorError() | TimelineError():
            return 409
        case BrokerError():
            return 503
        case SwarmqError():
            return 503
        case _:
            return 500


class DashboardPages:
    """The handlers of the dashboard."""

    def __init__(self, shelf: Shelf, access: Access, *, studies: Studies | None, base: str, is_secure: bool) -> None:
        self._shelf, self._access, self._base, self._is_secure = shelf, access, base, is_secure
        self._studies = studies
        self._limiter: anyio.CapacityLimiter | None = None

    def handlers(self) -> list[HTTPRouteHandler]:
        """Return the route handlers for the application."""
        run = "/api/runs/{run:str}"
        open_to_all = [
            get("/", include_in_schema=False)(self.show_index),
            get("/{name:str}", include_in_schema=False)(self.show_file),
            post("/api/login", status_code=200)(self.login),
        ]
        reading: list[tuple[str, Callable[..., Any]]] = [
            ("/api/me", self.me),
            ("/api/runs", self.runs),
            ("/api/studies", self.studies),
            ("/api/studies/{study:str}", self.study),
            ("/api/diff", self.diff),
            (f"{run}/overview", self.overview),
            (f"{run}/steps", self.steps),
            (f"{run}/time", self.time),
            (f"{run}/ledger", self.ledger),
            (f"{run}/episodes", self.episodes),
            (f"{run}/episodes/histogram", self.histogram),
            (f"{run}/episodes/{{episode:str}}", self.episode),
            (f"{run}/episodes/{{episode:str}}/tokens", self.tokens),
            (f"{run}/groups/{{group:path}}", self.group),
            (f"{run}/clients", self.clients),
            (f"{run}/mix", self.mix),
            (f"{run}/evaluations", self.evaluations),
            (f"{run}/engines", self.engines),
            (f"{run}/settings", self.settings),
            (f"{run}/logs", self.logs),
            (f"{run}/logs/{{name:str}}", self.show_log),
            (f"{run}/dead-letters", self.dead_letters),
            (f"{run}/export/episode/{{episode:str}}", self.export_episode),
            (f"{run}/export/group/{{group:path}}", self.export_group),
            (f"{run}/export/report", self.export_report),
            (f"{run}/stream", self.stream),
        ]
        guarded = [get(path, guards=[self.require_reader])(handler) for path, handler in reading]
        acting = post(f"{run}/actions", guards=[self.require_operator], status_code=200)(self.act)
        return [*open_to_all, *guarded, acting]

    # ------------------------------------------------------------------------------------------ who

    def require_reader(self, connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
        """Store the reader in the request's state. Raises KeyRefusedError or ForbiddenError."""
        token = read_bearer(connection) or connection.cookies.get(self._access.cookie, "")
        if not token:
            raise KeyRefusedError("log in first: open the dashboard's link, or send a token with the role read")
        connection.state[READER] = self._access.identify(token.strip())

    def require_operator(self, connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler) -> None:
        """Demand the role `operate`, a confirmation, and that the request comes from the dashboard's own pages."""
        self.require_reader(connection, handler)
        reader: Reader = connection.state[READER]
        if not reader.can_operate:
            raise ForbiddenError(
                f"{reader.name!r} has the roles {', '.join(reader.roles)}; this needs operate (`swarmq token --role operate`)"
            )
        require_same_origin(connection)
        if connection.headers.get(CONFIRM) != "yes":
            raise ForbiddenError(f"an action must be confirmed: send the header {CONFIRM}: yes")

    async def login(self, request: Request[Any, Any, Any]) -> Response[dict[str, str]]:
        """Exchange a token for a cookie."""
        require_same_origin(request)
        data = parse_body(await request.body(), Login)
        reader = self._access.identify(data.token)
        cookie = Cookie(
            key=self._access.cookie,
            value=data.token,
            path=f"{self._base}/" if self._base else "/",
            max_age=SESSION_S,
            httponly=True,
            samesite="strict",
            secure=self._is_secure,
        )
        return Response({"name": reader.name}, cookies=[cookie], headers={"cache-control": "no-store"})

    async def me(self, request: Request[Any, Any, Any]) -> Response[bytes]:
        """Return the name and roles of the reader."""
        reader: Reader = request.state[READER]
        return _json(
            {"name": reader.name, "roles": reader.roles, "base": self._base, "can_operate": reader.can_operate}
        )

    # ----------------------------------------------------------------------------------- front end

    async def show_index(self, request: Request[Any, Any, Any]) -> Response[bytes]:
        return await self._file(request, "index.html")

    async def show_file(self, request: Request[Any, Any, Any], name: FromPath[str]) -> Response[bytes]:
        return await self._file(request, name)

    async def _file(self, request: Request[Any, Any, Any], name: str) -> Response[bytes]:
        if name not in FILES:
            raise HTTPException(status_code=404, detail=f"there is no page {name!r}")
        try:
            content = await anyio.Path(STATIC / name).read_bytes()
        except FileNotFoundError as error:
            raise HTTPException(
                status_code=404,
                detail="the front end is not built: `npm ci && npm run build` in web/ builds it in a checkout",
            ) from error
        tag = f'"{hashlib.sha256(content).hexdigest()[:20]}"'
        headers = {"cache-control": "no-cache", "etag": tag}
        if tag in request.headers.get("if-none-match", ""):
            return Response(b"", status_code=304, headers=headers, media_type=FILES[name])
        return Response(content, headers=headers, media_type=FILES[name])

    # -------------------------------------------------------------------------------------- reading

    async def _read(self, function: Callable[..., T], *args: Any, **how: Any) -> T:
        """Call `function`, which reads files, in one of a few threads."""
        if self._limiter is None:
            self._limiter = anyio.CapacityLimiter(READERS)
        return await anyio.to_thread.run_sync(lambda: function(*args, **how), limiter=self._limiter)

    async def _open(self, id: str) -> Run:  # noqa: A002 - what addresses call it
        """Return the run, whose index is kept up to date from now on."""
        return (await self._shelf.open(id)).run

    async def _view(self, id: str, function: Callable[..., Any], *args: Any, **how: Any) -> Response[bytes]:  # noqa: A002
        """Answer with the JSON of what `function` returns for a run."""
        run = await self._open(id)
        return _json(await self._read(lambda: function(run, *args, **how)))

    async def runs(self) -> Response[bytes]:
        """List the runs."""
        return _json({"runs": await self._read(self._shelf.entries)})

    async def studies(self) -> Response[bytes]:
        """List the studies; none behind a proxy."""
        return _json({"studies": await self._read(self._studies.rows) if self._studies else []})

    async def study(self, study: FromPath[str]) -> Response[bytes]:
        """Show a study: trials, comparisons, curves, budget, proposals of its planner."""
        if self._studies is None:
            raise UnknownRunError("this dashboard shows one run, and no studies")
        return _json(await self._read(self._studies.show, study))

    async def diff(self, request: Request[Any, Any, Any]) -> Response[bytes]:
        """Compare the settings of two to four runs; `runs` is their ids, separated by commas."""
        ids = [id for id in request.query_params.get("runs", "").split(",") if id]  # noqa: A001
        if not 2 <= len(ids) <= MAX_DIFFERENT:
            raise ConfigError(f"runs: name two to {MAX_DIFFERENT} runs, separated by commas (got {len(ids)})")
        opened = {id: await self._open(id) for id in dict.fromkeys(ids)}  # noqa: A001
        return _json(await self._read(views.diff_settings, opened))

    async def overview(self, run: FromPath[str]) -> Response[bytes]:
        """Return the present state of a run."""
        return await self._view(run, _overview)

    async def steps(self, request: Request[Any, Any, Any], run: FromPath[str]) -> Response[bytes]:
        """Return the figures of a policy's steps, by default all. Query: `policy`, and `series`, the names of the figures."""
        wanted = [name for name in request.query_params.get("series", "").split(",") if name]
        return await self._view(run, views.view_steps, request.query_params.get("policy", ""), wanted)

    async def time(self, run: FromPath[str]) -> Response[bytes]:
        """Return what each process did when, step by step."""
        return await self._view(run, views.view_time)

    async def ledger(self, run: FromPath[str]) -> Response[bytes]:
        """Return what became of every episode, by kind and reason."""
        return await self._view(run, views.view_ledger)

    async def episodes(self, request: Request[Any, Any, Any], run: FromPath[str]) -> Response[bytes]:
        """Return a page of episodes, filtered, with `sort`, `cursor` and `limit`."""
        chosen, how = _filter_of(request.query_params, {"sort", "cursor", "limit"})
        limit = _parse_whole_number(how.get("limit", "100"), "limit", most=MAX_ROWS)

        def page(of: Run) -> dict[str, Any]:
            _check_filter(of, chosen)
            progress = views.view_progress(of)
            found = of.index.page(
                chosen, sort=how.get("sort") or "-began_at", cursor=how.get("cursor") or None, limit=max(limit, 1)
            )
            return {"index": progress} | msgspec.structs.asdict(found)

        return await self._view(run, page)

    async def histogram(self, request: Request[Any, Any, Any], run: FromPath[str]) -> Response[bytes]:
        """Return a histogram of the filtered episodes. Query: `of`, what to count them by, such as `reward`."""
        chosen, how = _filter_of(request.query_params, {"of"})

        def count(of: Run) -> Histogram:
            _check_filter(of, chosen)
            return of.index.histogram(chosen, of=how.get("of", "reward"))

        return await self._view(run, count)

    async def group(self, run: FromPath[str], group: FromPath[Path]) -> Response[bytes]:
        """Return one group with its episodes."""
        return await self._view(run, _group, group)

    async def episode(self, run: FromPath[str], episode: FromPath[str]) -> Response[bytes]:
        """Return one episode with its conversation."""
        return await self._view(run, _episode, episode)

    async def tokens(
        self, request: Request[Any, Any, Any], run: FromPath[str], episode: FromPath[str]
    ) -> Response[bytes]:
        """Return a page of tokens of one timeline: `timeline`, `from` and `limit`."""
        query = request.query_params
        timeline, start, limit = (
            _parse_whole_number(query.get(name, usual), name, most=most)
            for name, usual, most in (("timeline", "0", 10**6), ("from", "0", 10**9), ("limit", "2000", MAX_TOKENS))
        )
        return await self._view(run, _tokens, episode, timeline=timeline, start=start, limit=limit)

    async def clients(self, run: FromPath[str]) -> Response[bytes]:
        """List the clients with their episodes, code versions and last errors."""
        return await self._view(run, views.view_clients)

    async def mix(self, run: FromPath[str]) -> Response[bytes]:
        """Return shares and counts of the task kinds."""
        return await self._view(run, views.view_mix)

    async def evaluations(self, run: FromPath[str]) -> Response[bytes]:
        """Return the rounds of evaluation."""
        return await self._view(run, views.view_evaluations)

    async def engines(self, run: FromPath[str]) -> Response[bytes]:
        """Return the engines with their load."""
        return await self._view(run, views.view_engines)

    async def settings(self, run: FromPath[str]) -> Response[bytes]:
        """Return the settings and their changes."""
        return await self._view(run, views.view_settings)

    async def logs(self, run: FromPath[str]) -> Response[bytes]:
        """List the log files."""

        def list_files(of: Run) -> dict[str, Any]:
            return {"files": views.list_logs(of.folder)}

        return await self._view(run, list_files)

    async def show_log(
        self, request: Request[Any, Any, Any], run: FromPath[str], name: FromPath[str]
    ) -> Response[bytes]:
        """Return the last `lines` lines of a log."""
        lines = _parse_whole_number(request.query_params.get("lines", "400"), "lines", most=MAX_LINES)

        def read(of: Run) -> dict[str, Any]:
            return views.read_log(of.folder, name, lines=max(lines, 1))

        return await self._view(run, read)

    async def dead_letters(self, run: FromPath[str]) -> Response[bytes]:
        """List the unusable messages of the run."""
        return _json(await actions.list_dead_letters((await self._open(run)).folder.path))

    # --------------------------------------------------------------------------------------- export

    async def export_episode(self, run: FromPath[str], episode: FromPath[str]) -> Response[bytes]:
        """Return one episode as a single HTML file."""
        return await self._export(run, "episode", episode, collect_episode)

    async def export_group(self, run: FromPath[str], group: FromPath[Path]) -> Response[bytes]:
        """Return one group as a single HTML file."""
        return await self._export(run, "group", _path_text(group), collect_group)

    async def export_report(self, run: FromPath[str]) -> Response[bytes]:
        """Return a report on the run as a single HTML file."""
        return await self._export(run, "report", "report", _collect_report)

    async def _export(
        self,
        id: str,  # noqa: A002
        kind: Kind,
        what: str,
        collect: Callable[[Run, str, str], dict[str, Any]],
    ) -> Response[bytes]:
        run = await self._open(id)

        def make() -> bytes:
            run.refresh()  # a file must not show an index that is still being built
            return export_html(kind, collect(run, id, what) | collect_run(run, id), folder=run.folder.path)

        page = await self._read(make)
        name = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "-" for c in f"{id}-{what}")
        headers = {"content-disposition": f'attachment; filename="{name[:120]}.html"', "cache-control": "no-store"}
        return Response(page, media_type="text/html", headers=headers)

    # --------------------------------------------------------------------------------- live, acting

    async def stream(self, run: FromPath[str]) -> Stream:
        """Stream which parts of the pages (`steps`, `episodes`, ...) have changed, as server-sent events at most once a second."""
        opened = await self._shelf.open(run)

        async def tell() -> AsyncIterator[bytes]:
            yield b": connected\n\n"
            async for what in opened.watch():
                if what:
                    data = msgspec.json.encode({"what": what, "at": time.time()})
                    yield b"event: changed\ndata: " + data + b"\n\n"
                    await anyio.sleep(STREAM_PAUSE_S)
                else:
                    yield b": nothing new\n\n"

        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return Stream(tell(), media_type="text/event-stream", headers=headers)

    async def act(self, request: Request[Any, Any, Any], run: FromPath[str]) -> Response[bytes]:
        """Carry out an operator's request; the run records it with the operator's name."""
        data = parse_body(await request.body(), actions.Request)
        reader: Reader = request.state[READER]
        folder = (await self._open(run)).folder.path
        text = await actions.act(folder, data, sender=reader.name)
        log.info("acted", run=run, action=data.action, sender=reader.name)
        return _json({"text": text})


def parse_body(raw: bytes, of: type[S]) -> S:
    """Return the record that a JSON object describes. Raises ConfigError that names the field and its value."""
    try:
        found = msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise ConfigError("the request's body is not a JSON object") from None
    fields = {field.name: field for field in msgspec.structs.fields(of)}
    for name in found.keys() - fields:
        raise ConfigError(f"{name[:60]}: unknown; a request has {', '.join(fields)}")
    for name, field in fields.items():
        if name not in found:
            if field.required:
                raise ConfigError(f"{name}: missing")
            continue
        try:
            msgspec.convert(found[name], field.type)
        except msgspec.ValidationError:
            choices = get_args(field.type) if get_origin(field.type) is Literal else ()
            wanted = (
                f"not one of {', '.join(choices)}" if choices else "not text" if field.type is str else "not an object"
            )
            raise ConfigError(f"{name}: {str(found[name])[:60]!r} is {wanted}") from None
    return msgspec.convert(found, of)


def require_same_origin(connection: ASGIConnection[Any, Any, Any, Any]) -> None:
    """Raise ForbiddenError for a request that a page of another site sends."""
    origin = connection.headers.get("origin")
    site = connection.headers.get("sec-fetch-site", "same-origin")
    if site not in {"same-origin", "none"} or (origin and urlsplit(origin).netloc != connection.headers.get("host")):
        raise ForbiddenError("requests from pages of other sites are refused")


def _json(value: Any) -> Response[bytes]:
    return Response(
        msgspec.json.encode(value, enc_hook=str), media_type="application/json", headers={"cache-control": "no-store"}
    )


def _filter_of(query: Mapping[str, str], others: set[str]) -> tuple[EpisodeFilter, dict[str, str]]:
    """Return the filter of a query, and its other parameters. Raises ConfigError for an unknown parameter."""
    how = {name: value for name, value in query.items() if name in others}
    return parse_filter({name: value for name, value in query.items() if name not in others}), how


def _check_filter(run: Run, chosen: EpisodeFilter) -> None:
    """Raise ConfigError if the filter names what the run does not know. An unfinished index raises nothing, because it does
    not know the whole run."""
    if run.index.progress.is_done:
        run.index.check(chosen)


def _parse_whole_number(text: str, name: str, *, most: int) -> int:
    if not text.isdecimal():
        raise ConfigError(f"{name}: {text[:40]!r} is not a whole number")
    return min(int(text[:12]), most)


def _path_text(path: Path) -> str:
    return str(path).removeprefix("/")


def _overview(run: Run) -> dict[str, Any]:
    return view_overview(run, views.read_board(run.folder), run.live_job())


def _episode(run: Run, episode: str) -> EpisodeDetail:
    return read_detail(run.index, episode)


def _group(run: Run, group: Path) -> GroupView:
    return read_group(run.index, _path_text(group))


def _tokens(run: Run, episode: str, *, timeline: int, start: int, limit: int) -> TokenPage:
    return read_tokens(run.index, episode, timeline=timeline, start=start, limit=limit, decoders=run.decoders)


def _without_folder(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings without the folder of the run, which means nothing elsewhere."""
    return settings | {"settings": [row for row in settings["settings"] if row["path"] != "folder"]}


def _collect_report(run: Run, id: str, _: str) -> dict[str, Any]:  # noqa: A002
    base = f"runs/{id}"
    payloads: dict[str, Any] = {
        f"{base}/overview": _overview(run),
        f"{base}/time": views.view_time(run),
        f"{base}/ledger": views.view_ledger(run),
        f"{base}/clients": views.view_clients(run),
        f"{base}/mix": views.view_mix(run),
        f"{base}/evaluations": views.view_evaluations(run),
        f"{base}/engines": views.view_engines(run),
        f"{base}/settings": _without_folder(views.view_settings(run)),
    }
    return (
        payloads
        | {f"{base}/steps?policy={policy}": views.view_steps(run, policy) for policy in reversed(run.policies)}
        | {f"{base}/steps": views.view_steps(run)}
        | collect_samples(run, id)
    )
