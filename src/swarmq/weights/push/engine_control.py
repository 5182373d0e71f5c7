"""One engine's weights, changed in steps that end in an engine that serves, or in an error that says it cannot.

    SERVING --pause--> PAUSED --label, start, update--> UPDATING --finish--> VERSIONED --resume--> SERVING

Requests that run are kept over the pause and go on under the new weights. `clear_cache` makes vLLM drop every cached
key and value and compute those of the kept requests again, so that a token is always sampled from exactly the
distribution that its version names. (A `cache_salt` per version would be cheaper, but a request that runs across the
update would go on with keys of the old weights, and its log-probabilities would belong to no version.)

vLLM never ends a pause by itself and has no verb to abort an update: when the pusher dies, the engine stays as it is.
So it carries the label `updating-<version>` while its weights change, and whoever comes next can tell:

    paused, label is a version or `default`   nothing was changed: resume it
    label is `updating-...`                   unknown weights: a whole new update repairs them, else a restart

An update that was left open is closed with `finish` and no version; our backend changes the weights in a single call,
so there is nothing half done for it to make permanent. An engine that stays in doubt, or cannot be paused or resumed, is
condemned: its label then ends in `-restart`, and whoever started it starts it again (pause_watchdog.py); pushers leave it out
meanwhile.

An engine that shares its GPU with a learner may sleep while that one computes: its memory is given back, its requests
are kept, and its label is `asleep-` and what it was. An update would crash it then, so it is woken first. vLLM does not
tell a sleeping engine from a paused one, and samples as soon as all of it is awake; but to put to sleep what sleeps and to
wake what is awake does no harm. So a learner finds its engine as the last one was killed and leads it on:

    paused, whatever the label         it can be put to sleep, which the label says, too
    paused, whole weights              `wake_up` and not `resume`: it may be asleep
    asleep, label says `updating-...`  only its weights are woken, the update is done, then all of it is
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
LOAD_OVERHEAD_S = 60.0
MIN_BYTES_PER_S = 100e6
"""An update that is slower than this, and `LOAD_S` for its beginning, is stuck."""
NO_ROUTE_STATUSES = (404, 405)
STEP_METRICS = re.compile(
    r"^vllm:(?:iteration_tokens_total_count|kv_cache_usage_perc)(?:\{.*\})? ([0-9.e+]+)$", re.MULTILINE
)
REQUEST_METRICS = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{.*\})? ([0-9.e+]+)$", re.MULTILINE)


class EngineSilentError(EngineError):
    """It took longer than it is given for an answer, or for a connection."""


class UpdatePhase(enum.Enum):
    SERVING = "serving"
    PAUSED = "paused"
    UPDATING = "updating"
    VERSIONED = "versioned"


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine says of itself. `label` is vLLM's weight version: ours, or `default` for the model on disk."""

    label: str
    is_paused: bool

    @property
    def version(self) -> int | None:
        """The weight version served; None when nobody has set one or the weights are in doubt."""
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
        """Or about to be: the label is set before."""
        return self.label.startswith(ASLEEP)

    @property
    def awake_label(self) -> str:
        return self.label.removeprefix(ASLEEP)

    @property
    def is_condemned(self) -> bool:
        """Nothing but a restart helps."""
        return self.is_in_doubt and self.label.endswith(CONDEMNED)


class _WeightInfoReply(msgspec.Struct, frozen=True, kw_only=True):
    weight_version: str | int


class _IsPausedReply(msgspec.Struct, frozen=True, kw_only=True):
    is_paused: bool


class WorkerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker of an engine says of itself."""

    gpu: str
    """The physical GPU; empty on a CPU."""
    dtype: str
    """That of the weights it computes with, e.g. `bfloat16`."""
    pid: int
    nccl: str = ""
    """The version of the library that it would broadcast with; empty where it has none."""
    loads: int = 0
    """Updates that have changed its weights."""
    checksum: int | None = None
    """Of what the newest of them brought, as it arrived."""


class _WorkerFactsReply(msgspec.Struct, frozen=True, kw_only=True):
    results: list[WorkerFacts]


class Payload(msgspec.Struct, frozen=True, kw_only=True):
    """New weights, ready to be fetched by an engine."""

    update_info: Mapping[str, Any]
    """For the backend inside vLLM: where they are."""
    checksum: int | None = None
    """Of what an engine fetches; None: it is not known."""
    size_bytes: int = 0
    send: Callable[[str, float], None] | None = None
    """What the learner does, in a thread, while an engine receives; given the engine's url and a limit in seconds."""


class Timeouts(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds for each step. A pause waits for the model's current step; an update reads the whole model."""

    ask_s: float = 10.0
    pause_s: float = 60.0
    update_s: float = 600.0
    finish_s: float = 60.0
    resume_s: float = 30.0
    sleep_s: float = 120.0

    def for_size(self, size_bytes: int) -> Timeouts:
        """As short as weights of this size allow."""
        enough_s = LOAD_OVERHEAD_S + size_bytes / MIN_BYTES_PER_S
        return msgspec.structs.replace(self, update_s=min(self.update_s, enough_s))

    @property
    def total_s(self) -> float:
        """Longer than any update in progress can take: a pause beyond this has no owner any more."""
        return 4 * self.ask_s + self.pause_s + self.update_s + 3 * self.finish_s + 3 * self.sleep_s


class EngineControl:
    """`async with EngineControl(url, secret=secret) as engine: await engine.update({"path": ...}, version=3)`."""

    def __init__(self, url: str, *, secret: str = "", timeouts: Timeouts | None = None) -> None:
        """`secret`: what the engine asks every caller for; empty for one that asks nobody."""
        self.url = url.rstrip("/")
        self._headers = make_auth_headers(secret)
        self.timeouts = timeouts or Timeouts()
        self.phase = UpdatePhase.SERVING
        self.is_at_fault = False
        """Whether the newest update failed in an engine that had said how it is, and not because of the weights that came."""
        self.loaded_facts: list[WorkerFacts] = []
        """What the workers said after the newest update."""
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
        """Whether the server answers and its engine core lives."""
        try:
            await self._call("GET", "/health", self.timeouts.ask_s)
        except EngineError:
            return False
        return True

    async def is_unprotected(self) -> bool:
        """Whether it obeys callers who do not know its secret. Raises EngineError where nobody answers."""
        async with EngineControl(self.url, timeouts=self.timeouts) as stranger:
            try:
                await stranger._read(_IsPausedReply, "GET", "/is_paused")
            except EngineRefusedError:
                return False
        return True

    async def status(self) -> EngineStatus:
        """Raises EngineError when the engine does not answer, is of another version of vLLM than we know, or was started
        without its control endpoints."""
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
        """Requests that run or wait there. Raises EngineError."""
        text = await self._call("GET", "/metrics", self.timeouts.ask_s)
        return sum(int(float(count)) for count in REQUEST_METRICS.findall(text.decode()))

    async def steps(self) -> float | None:
        """A number that changes while the engine computes, be it one long prompt; None where it does not say. Its server tells it also
        in the middle of a long step."""
        try:
            text = (await self._call("GET", "/metrics", self.timeouts.ask_s)).decode()
        except EngineError:
            return None
        counts = [float(count) for count in STEP_METRICS.findall(text)]
        return sum(counts) if counts else None

    async def facts(self) -> list[WorkerFacts]:
        """Of every worker; none from an engine that was started without our guard or our extension."""
        try:
            return (await self._read(_WorkerFactsReply, "GET", WORKER_FACTS_ROUTE)).results
        except EngineRefusedError:
            return []

    async def rendezvous(self, **where: Any) -> None:
        """Have all workers meet the learner there; returns when they have."""
        await self._call("POST", "/init_weight_transfer_engine", self.timeouts.pause_s, init_info=where)

    async def sleep(self) -> None:
        """Give the GPU's memory back, keep the requests, in whatever state another learner left the engine. The weights go to
        host memory. Raises EngineError; EngineRefusedError from an engine that goes on as it was."""
        status = await self.status()
        if status.is_condemned:
            raise EngineError(f"engine {self.url} is to be started again ({status.label}), it cannot be put to sleep")
        if not status.is_paused:
            await self._pause()
        if not status.is_asleep:
            await self._label(f"{ASLEEP}{status.label}")  # now that no token gets it
        try:
            await self._fall_asleep()
        except EngineRefusedError as error:
            if status.is_in_doubt:
                await self._label(f"{status.awake_label}{CONDEMNED}")
                raise EngineError(f"engine {self.url} was left in an update, only a restart helps: {error}") from error
            await self._label(status.awake_label)
            await self._wake_up()
            raise

    async def wake(self) -> EngineStatus:
        """Go on where `sleep` came, or where another learner was killed. Nothing for an engine that serves, or whose weights are
        in doubt: those are for `update`. Returns what it is then."""
        return await self._wake_from(await self.status())

    async def _wake_from(self, status: EngineStatus) -> EngineStatus:
        if status.is_in_doubt or not status.is_paused:
            return status
        if status.is_asleep:
            await self._label(status.awake_label)  # before a token gets the other one
        await self._wake_up()
        return await self.status()

    async def condemn(self, version: int) -> None:
        """Mark an engine as one that only a restart helps."""
        await self._label(f"{UPDATING}{version}{CONDEMNED}")

    async def update(self, payload: Payload, version: int) -> float:
        """Load these weights and serve them as `version`; returns the pause in seconds.

        Also repairs an engine that another pusher left paused, asleep or half done. Raises EngineError; the engine then
        serves what it served before or, where that is in doubt, stays paused until the next update or a restart.
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
                await self._fall_asleep()  # if it does not: it would sample as soon as its weights were awake
                await self._wake_up("weights")
            await self._pause()
            await self._load(payload, version, before)
        finally:
            if self.phase is not UpdatePhase.UPDATING:
                await (self._wake_up() if before.is_paused else self._resume())
        pause_s = time.perf_counter() - began
        after = await self.status()
        if after.version != version or after.is_paused:
            raise EngineError(f"engine {self.url} should serve version {version} but says {after}: restart it")
        log.info("weights pushed", engine=self.url, version=version, pause_s=round(pause_s, 4))
        return pause_s

    async def release(self) -> None:
        """End a pause that nobody owns any more. Raises EngineError when the weights are in doubt."""
        status = await self.wake()
        if status.is_in_doubt:
            raise EngineError(f"engine {self.url} stopped inside an update ({status.label}): push again or restart it")

    async def _check_version(self) -> None:
        """Once: who looks again makes another EngineControl. Who does not say passes."""
        if self._version_known:
            return
        try:
            check_server_version(self.url, await self._read(dict, "GET", "/version"))
        except EngineRefusedError as error:
            if error.status not in NO_ROUTE_STATUSES:
                raise _map_status_error(self.url, error) from error
        self._version_known = True

    async def _pause(self) -> None:
        if self.phase is UpdatePhase.SERVING:
            self.phase = UpdatePhase.PAUSED  # even if the answer gets lost: resuming an engine that runs does no harm
        await self._call("POST", "/pause?mode=keep&clear_cache=true", self.timeouts.pause_s)

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
        # Side by side: one after the other would prolong the pause.
        finished, loaded_facts = await asyncio.gather(finish, self.facts(), return_exceptions=True)
        if isinstance(finished, BaseException):
            raise finished
        if isinstance(loaded_facts, BaseException):
            raise loaded_facts
        self.loaded_facts = loaded_facts
        loaded = {worker.checksum for worker in self.loaded_facts}
        if payload.checksum is not None and loaded - {None, payload.checksum}:
            await self._label(f"{UPDATING}{version}")
            raise EngineError(f"engine {self.url} has loaded other weights than were sent: push again")
        self.phase = UpdatePhase.VERSIONED

    async def _deliver(self, payload: Payload) -> None:
        timeout_s = self.timeouts.for_size(payload.size_bytes).update_s
        both: list[Awaitable[Any]] = [self._call("POST", "/update_weights", timeout_s, update_info=payload.update_info)]
        if payload.send:
            both.append(asyncio.to_thread(payload.send, self.url, timeout_s))
        for result in await asyncio.gather(*both, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result  # the engine's before the sender's, whom it may have left waiting

    async def _workers_agree(self) -> bool:
        """Return whether all workers have loaded the same number of updates. One worker's statement that nothing was changed says nothing
        of the others."""
        return len({worker.loads for worker in await self.facts()}) <= 1

    async def _start(self) -> None:
        try:
            await self._call("POST", "/start_weight_update", self.timeouts.finish_s)
        except EngineRefusedError as error:
            if "already active" not in str(error):
                raise
            log.warning("closing an update that was left open", engine=self.url)
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
        """All of it, which resumes it too; or only the memory with this tag."""
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
                f"{self.url} answers {path} with {answer!r}, as no vLLM does: look what listens there"
            ) from error

    async def _call(self, method: str, path: str, timeout_s: float, /, **body: Any) -> bytes:
        """The body of the answer."""
        assert self._session is not None
        limit = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.request(method, self.url + path, json=body, timeout=limit) as response:
                if response.status >= 400:
                    reason = f"{path} failed: {(await response.text())[:500]}"
                    raise EngineRefusedError(f"engine {self.url}: {reason}", status=response.status)
                return await response.read()
        except TimeoutError as error:
            message = f"engine {self.url} did not answer {path} within {timeout_s:g} s: restart it"
            raise EngineSilentError(message) from error
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
            raise EngineError(
                f"engine {self.url!r}: no address of a vLLM, which is like http://127.0.0.1:8000"
            ) from error
        except aiohttp.ClientError as error:
            raise map_connection_error(self.url, error) from error


def _map_status_error(url: str, error: EngineRefusedError) -> EngineError:
    """An engine that fails when asked how it is refuses nothing: it may be well in a moment."""
    if error.status == 401:
        return make_secret_error(url)
    return EngineError(f"{error}; look into its log")
