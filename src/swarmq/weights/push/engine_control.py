"""Control of one engine's weights: an update ends with a serving engine, or with an error if the engine cannot serve.

    SERVING --pause--> PAUSED --label, start, update--> UPDATING --finish--> VERSIONED --resume--> SERVING

Running requests are kept over the pause and continue under the new weights. `clear_cache` makes vLLM drop all cached keys and
values and the vision tower's outputs of images, and recompute those of kept requests, so that each token is sampled from exactly the
distribution that its version names. With `keep_cache` nothing is dropped by a push of a newer version: conversations continue with keys of
the old weights, and a salt of their requests keeps new episodes from using these (docs/explanation/learning/weights.md).

vLLM never ends a pause by itself and cannot abort an update: if the pusher dies, the engine stays as it is. Therefore the label
is `updating-<version>` while weights change, and tells the next pusher what to do:

    paused, label is a version or `default`   nothing was changed: resume the engine
    label is `updating-...`                   unknown weights: a full update repairs them, else a restart

An update that was left open is closed with `finish` and no version; swarmq's backend changes the weights in one call, so
`finish` makes no partial change permanent. An engine that stays in doubt, or cannot be paused or resumed, is condemned: its
label then ends in `-restart`, its owner restarts it (pause_watchdog.py), and pushers skip it meanwhile.

An engine that shares a GPU with a learner may sleep while the learner computes: its memory is freed, its requests are kept, and
its label is `asleep-` plus the former label. An update would crash a sleeping engine, so it is woken first. vLLM does not
distinguish a sleeping engine from a paused one, and samples as soon as all of it is awake; but `sleep` and `wake_up` are
harmless if repeated. So a learner can continue from any state in which a killed one left an engine:

    paused, whatever the label         can be put to sleep, and the label records that
    paused, whole weights              `wake_up` and not `resume`: the engine may be asleep
    asleep, label says `updating-...`  wake only the weights, do the update, then wake the rest
"""

from __future__ import annotations

import asyncio
import enum
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

import aiohttp
import msgspec
import structlog

from swarmq.engine.auth import make_auth_headers
from swarmq.engine.client.versions import check_server_version
from swarmq.engine.client.vllm_errors import make_secret_error, map_connection_error
from swarmq.errors import EngineError, EngineRefusedError
from swarmq.weights.format.conventions import UNANNOUNCED, UNTOUCHED, UPDATING, WORKER_FACTS_ROUTE

log = structlog.get_logger()

T = TypeVar("T")

ASLEEP = "asleep-"
CONDEMNED = "-restart"
CONNECT_S = 5.0
LOAD_OVERHEAD_S = 60.0
MIN_BYTES_PER_S = 100e6
"""Minimum speed of an update in bytes per second, after `LOAD_OVERHEAD_S` for its start; a slower update counts as stuck."""
NO_ROUTE_STATUSES = (404, 405)
STEP_METRICS = re.compile(
    r"^vllm:(?:iteration_tokens_total_count|kv_cache_usage_perc)(?:\{.*\})? ([0-9.e+]+)$", re.MULTILINE
)
REQUEST_METRICS = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{.*\})? ([0-9.e+]+)$", re.MULTILINE)


class EngineSilentError(EngineError):
    """The engine did not answer or connect in time."""


class UpdatePhase(enum.Enum):
    SERVING = "serving"
    PAUSED = "paused"
    UPDATING = "updating"
    VERSIONED = "versioned"


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Status reported by an engine. `label` is vLLM's weight version: set by swarmq, or `default` for the model on disk."""

    label: str
    is_paused: bool

    @property
    def version(self) -> int | None:
        """Served weight version; None if no version was set or the weights are in doubt."""
        return int(self.label) if self.label.isdecimal() else None

    @property
    def is_in_doubt(self) -> bool:
        return self.awake_label.startswith(UPDATING)

    @property
    def is_unannounced(self) -> bool:
        """Whether somebody changed the weights while a version was served."""
        return self.label == UNANNOUNCED

    @property
    def is_asleep(self) -> bool:
        """Whether the engine sleeps or is about to fall asleep: its label is set before it does."""
        return self.label.startswith(ASLEEP)

    @property
    def awake_label(self) -> str:
        return self.label.removeprefix(ASLEEP)

    @property
    def is_condemned(self) -> bool:
        """Whether a pusher has marked the engine as needing a restart."""
        return self.is_in_doubt and self.label.endswith(CONDEMNED)


class _WeightInfoReply(msgspec.Struct, frozen=True, kw_only=True):
    weight_version: str | int


class _IsPausedReply(msgspec.Struct, frozen=True, kw_only=True):
    is_paused: bool


class WorkerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts reported by one worker of an engine."""

    gpu: str
    """Uuid of the worker's physical GPU; "" on a CPU."""
    dtype: str
    """Dtype of the weights in computations, such as `bfloat16`."""
    pid: int
    nccl: str = ""
    """NCCL version for broadcasts; "" without NCCL."""
    loads: int = 0
    """Number of updates that changed the worker's weights."""
    checksum: int | None = None
    """Checksum of the newest update, computed by the worker from what it received."""
    receiver_port: int = 0
    """Port of the weight receiver on the worker's host; 0: there is none."""


class _WorkerFactsReply(msgspec.Struct, frozen=True, kw_only=True):
    results: list[WorkerFacts]


class Payload(msgspec.Struct, frozen=True, kw_only=True):
    """Published weights that engines can fetch."""

    update_info: Mapping[str, Any]
    """Location of the weights, for the backend inside vLLM."""
    checksum: int | None = None
    """Checksum of the transferred bytes; None: unknown."""
    size_bytes: int = 0
    send: Callable[[str, float], None] | None = None
    """Function that the learner runs in a thread while an engine receives; its arguments are the engine's url and a time limit in
    seconds."""
    deliver: Callable[[str], Awaitable[Payload]] | None = None
    """Function that sends the weights to the receiver at a URL, and returns the payload with the file's path on the receiver's host.
    It is called while the engine still serves, and raises EngineError."""


class Timeouts(msgspec.Struct, frozen=True, kw_only=True):
    """Time limits in seconds. A pause waits for the model's current step; an update reads the whole model."""

    ask_s: float = 10.0
    pause_s: float = 60.0
    update_s: float = 600.0
    finish_s: float = 60.0
    resume_s: float = 30.0
    sleep_s: float = 120.0

    def for_size(self, size_bytes: int) -> Timeouts:
        """Return the limits with `update_s` reduced to the longest time that weights of this size need."""
        enough_s = LOAD_OVERHEAD_S + size_bytes / MIN_BYTES_PER_S
        return msgspec.structs.replace(self, update_s=min(self.update_s, enough_s))

    @property
    def total_s(self) -> float:
        """Longest time in seconds that a pause and an update can take; a pause that lasts longer has lost its owner."""
        return 4 * self.ask_s + self.pause_s + self.update_s + 3 * self.finish_s + 3 * self.sleep_s


class EngineControl:
    """Control of one engine: `async with EngineControl(url, secret=secret) as engine: await engine.update(payload, version=3)`."""

    def __init__(
        self, url: str, *, secret: str = "", timeouts: Timeouts | None = None, keep_cache: bool = False
    ) -> None:
        """`secret`: the engine's secret; empty for an engine that requires none. `keep_cache`: whether an update from
        one version to a newer one leaves cached keys and values as they are."""
        self.url = url.rstrip("/")
        self._headers = make_auth_headers(secret)
        self.timeouts = timeouts or Timeouts()
        self._keep_cache = keep_cache
        self.phase = UpdatePhase.SERVING
        self.is_at_fault = False
        """Whether the newest update failed because of the engine: it had answered, and the weights sent were not the cause."""
        self.loaded_facts: list[WorkerFacts] = []
        """Facts of the workers after the newest update."""
        self._session: aiohttp.ClientSession | None = None
        self._version_known = False

    async def __aenter__(self) -> Self:
        # vLLM closes the connection after each error; a kept one would fail the next call.
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True), headers=self._headers)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        await self._session.close()

    async def is_healthy(self) -> bool:
        """Return whether the server answers and its engine core lives."""
        try:
            await self._call("GET", "/health", self.timeouts.ask_s)
        except EngineError:
            return False
        return True

    async def is_unprotected(self) -> bool:
        """Return whether the engine accepts callers without its secret. Raises EngineError if nobody answers."""
        async with EngineControl(self.url, timeouts=self.timeouts) as stranger:
            try:
                await stranger._read(_IsPausedReply, "GET", "/is_paused")
            except EngineRefusedError:
                return False
        return True

    async def status(self) -> EngineStatus:
        """Return the engine's status. Raises EngineError if the engine does not answer, has an unsupported version of vLLM, or
        was started without control endpoints."""
        await self._check_version()
        try:
            info = await self._read(_WeightInfoReply, "GET", "/weight_info")
            pause = await self._read(_IsPausedReply, "GET", "/is_paused")
        except EngineRefusedError as error:
            if error.status not in NO_ROUTE_STATUSES:
                raise _map_status_error(self.url, error) from error
            raise EngineError(
                f"engine {self.url} has no weight control ({error}): "
                "use vLLM 0.30 to 0.33, started on a loopback address with VLLM_SERVER_DEV_MODE=1"
            ) from error
        return EngineStatus(label=str(info.weight_version), is_paused=pause.is_paused)

    async def count_open_requests(self) -> int:
        """Return the number of running and waiting requests. Raises EngineError."""
        text = await self._call("GET", "/metrics", self.timeouts.ask_s)
        return sum(int(float(count)) for count in REQUEST_METRICS.findall(text.decode()))

    async def steps(self) -> float | None:
        """Return a number that changes while the engine computes, even within one long prompt; None if unavailable. The server
        answers also during a long step."""
        try:
            text = (await self._call("GET", "/metrics", self.timeouts.ask_s)).decode()
        except EngineError:
            return None
        counts = [float(count) for count in STEP_METRICS.findall(text)]
        return sum(counts) if counts else None

    async def facts(self) -> list[WorkerFacts]:
        """Return the facts of all workers; [] if the engine was started without swarmq's middleware or worker extension."""
        try:
            return (await self._read(_WorkerFactsReply, "GET", WORKER_FACTS_ROUTE)).results
        except EngineRefusedError:
            return []

    async def rendezvous(self, **where: Any) -> None:
        """Make all workers join the learner's NCCL group, and return when they have. `where`: fields of the plug-in's
        `RendezvousInfo`."""
        await self._call("POST", "/init_weight_transfer_engine", self.timeouts.pause_s, init_info=where)

    async def sleep(self) -> None:
        """Put the engine to sleep, whatever state another learner left it in: free its GPU memory, move its weights to host
        memory, keep its requests. Raises EngineRefusedError if the engine refuses and continues to serve, EngineError
        otherwise."""
        status = await self.status()
        if status.is_condemned:
            raise EngineError(f"engine {self.url} must be restarted ({status.label}) and cannot be put to sleep")
        if not status.is_paused:
            await self._pause(clear_cache=True)
        if not status.is_asleep:
            await self._label(f"{ASLEEP}{status.label}")  # the engine is paused, so no token gets this label
        try:
            await self._fall_asleep()
        except EngineRefusedError as error:
            if status.is_in_doubt:
                await self._label(f"{status.awake_label}{CONDEMNED}")
                raise EngineError(
                    f"engine {self.url} was left in the middle of an update, and only a restart helps: {error}"
                ) from error
            await self._label(status.awake_label)
            await self._wake_up()
            raise

    async def wake(self) -> EngineStatus:
        """Resume after `sleep` or a killed learner, and return the resulting status. Does nothing if the engine serves, or if
        its weights are in doubt, which `update` repairs."""
        return await self._wake_from(await self.status())

    async def _wake_from(self, status: EngineStatus) -> EngineStatus:
        if status.is_in_doubt or not status.is_paused:
            return status
        if status.is_asleep:
            await self._label(status.awake_label)  # set before any token could get the `asleep-` label
        await self._wake_up()
        return await self.status()

    async def condemn(self, version: int) -> None:
        """Mark the engine as needing a restart. `version`: the weight version that could not be pushed to it."""
        await self._label(f"{UPDATING}{version}{CONDEMNED}")

    async def update(self, payload: Payload, version: int) -> float:
        """Load the weights, serve them as `version`, and return the pause in seconds.

        Also repairs an engine that another pusher left paused, asleep or half updated. Raises EngineError; the engine then
        serves its former weights or, if these are in doubt, stays paused until the next update or a restart.
        """
        self.is_at_fault = False
        status = await self.status()
        try:
            return await self._run_update(payload, version, status)
        except EngineError as error:
            self.is_at_fault = self.phase is not UpdatePhase.SERVING or UNTOUCHED not in str(error)
            raise

    async def _run_update(self, payload: Payload, version: int, found: EngineStatus) -> float:
        before = await self._wake_from(found)
        began = time.perf_counter()
        self.phase = UpdatePhase.UPDATING if before.is_in_doubt else UpdatePhase.SERVING
        try:
            if before.is_asleep:
                await self._fall_asleep()  # if it were in fact awake, it would sample as soon as its weights were woken
                await self._wake_up("weights")
            # weights that replace a newer version, or none, may get keys that others computed under a salt of the same name
            is_newer = before.version is not None and version > before.version
            await self._pause(clear_cache=not (self._keep_cache and is_newer))
            await self._load(payload, version, before)
        finally:
            if self.phase is not UpdatePhase.UPDATING:
                await (self._wake_up() if before.is_paused else self._resume())
        pause_s = time.perf_counter() - began
        after = await self.status()
        if after.version != version or after.is_paused:
            raise EngineError(f"engine {self.url} should serve version {version} but says {after}: restart it")
        log.info("weights_pushed", engine=self.url, version=version, pause_s=round(pause_s, 4))
        return pause_s

    async def release(self) -> None:
        """Resume an engine that was left paused. Raises EngineError if the weights are in doubt."""
        status = await self.wake()
        if status.is_in_doubt:
            raise EngineError(f"engine {self.url} stopped inside an update ({status.label}): push again or restart it")

    async def _check_version(self) -> None:
        """Check vLLM's version, once per EngineControl; a server that reports none passes."""
        if self._version_known:
            return
        try:
            check_server_version(self.url, await self._read(dict, "GET", "/version"))
        except EngineRefusedError as error:
            if error.status not in NO_ROUTE_STATUSES:
                raise _map_status_error(self.url, error) from error
        self._version_known = True

    async def _pause(self, *, clear_cache: bool) -> None:
        if self.phase is UpdatePhase.SERVING:
            # set before the call, whose answer may get lost; to resume a running engine does no harm
            self.phase = UpdatePhase.PAUSED
        await self._call("POST", f"/pause?mode=keep&clear_cache={str(clear_cache).lower()}", self.timeouts.pause_s)

    async def _load(self, payload: Payload, version: int, before: EngineStatus) -> None:
        await self._label(f"{UPDATING}{version}")
        self.phase = UpdatePhase.UPDATING
        await self._start()
        try:
            await self._deliver(payload)
        except EngineRefusedError as error:
            if UNTOUCHED in str(error) and not before.is_in_doubt and await self._workers_agree():
                await self._label(before.label)
                self.phase = UpdatePhase.PAUSED
            raise
        finish = self._call("POST", "/finish_weight_update", self.timeouts.finish_s, weight_version=str(version))
        # Both calls at once, because one after the other would prolong the pause.
        finished, loaded_facts = await asyncio.gather(finish, self.facts(), return_exceptions=True)
        if isinstance(finished, BaseException):
            raise finished
        if isinstance(loaded_facts, BaseException):
            raise loaded_facts
        self.loaded_facts = loaded_facts
        loaded = {worker.checksum for worker in self.loaded_facts}
        if payload.checksum is not None and loaded - {None, payload.checksum}:
            await self._label(f"{UPDATING}{version}")
            raise EngineError(f"engine {self.url} has loaded weights that differ from those sent: push again")
        self.phase = UpdatePhase.VERSIONED

    async def _deliver(self, payload: Payload) -> None:
        timeout_s = self.timeouts.for_size(payload.size_bytes).update_s
        both: list[Awaitable[Any]] = [self._call("POST", "/update_weights", timeout_s, update_info=payload.update_info)]
        if payload.send:
            both.append(asyncio.to_thread(payload.send, self.url, timeout_s))
        for result in await asyncio.gather(*both, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result  # the engine's error comes first, because it may have caused the sender's

    async def _workers_agree(self) -> bool:
        """Return whether all workers have loaded the same number of updates: the error of one worker does not show what the
        others did."""
        return len({worker.loads for worker in await self.facts()}) <= 1

    async def _start(self) -> None:
        try:
            await self._call("POST", "/start_weight_update", self.timeouts.finish_s)
        except EngineRefusedError as error:
            if "already active" not in str(error):
                raise
            log.warning("open_update_closed", engine=self.url, reason="an earlier weight update was never finished")
            await self._call("POST", "/finish_weight_update", self.timeouts.finish_s)
            await self._call("POST", "/start_weight_update", self.timeouts.finish_s)

    async def _label(self, label: str) -> None:
        await self._call("POST", "/update_weight_version", self.timeouts.ask_s, new_version=label)

    async def _resume(self) -> None:
        await self._call("POST", "/resume", self.timeouts.resume_s)
        self.phase = UpdatePhase.SERVING

    async def _fall_asleep(self) -> None:
        await self._call("POST", "/sleep?level=1&mode=keep", self.timeouts.sleep_s)

    async def _wake_up(self, tag: str = "") -> None:
        """Wake the whole engine, which also resumes it, or only the memory with this tag."""
        await self._call("POST", f"/wake_up?tags={tag}" if tag else "/wake_up", self.timeouts.sleep_s)
        if not tag:
            self.phase = UpdatePhase.SERVING

    async def _read(self, kind: type[T], method: str, path: str, /, **body: Any) -> T:
        raw = await self._call(method, path, self.timeouts.ask_s, **body)
        try:
            return msgspec.json.decode(raw, type=kind)
        except ValueError as error:
            answer = raw[:80].decode(errors="replace")
            raise EngineError(
                f"{self.url} answers {path} with {answer!r}, which is not vLLM's answer: check which server listens there"
            ) from error

    async def _call(self, method: str, path: str, timeout_s: float, /, **body: Any) -> bytes:
        """Send a request and return the answer's body."""
        assert self._session is not None
        limit = aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(timeout_s, CONNECT_S))
        try:
            async with self._session.request(method, self.url + path, json=body, timeout=limit) as response:
                if response.status >= 400:
                    reason = f"{path} failed: {(await response.text())[:500]}"
                    raise EngineRefusedError(f"engine {self.url}: {reason}", status=response.status)
                return await response.read()
        except aiohttp.ConnectionTimeoutError as error:
            raise EngineSilentError(str(map_connection_error(self.url, error))) from error
        except TimeoutError as error:
            message = f"engine {self.url} did not answer {path} within {timeout_s:g} s: restart it"
            raise EngineSilentError(message) from error
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
            raise EngineError(f"engine {self.url!r}: not a vLLM address like http://127.0.0.1:8000") from error
        except aiohttp.ClientError as error:
            raise map_connection_error(self.url, error) from error


def _map_status_error(url: str, error: EngineRefusedError) -> EngineError:
    """Map a failed status request to a plain EngineError, because the engine may recover in a moment."""
    if error.status == 401:
        return make_secret_error(url)
    return EngineError(f"{error}; see its log")
