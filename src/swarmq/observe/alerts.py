"""Alerts to a command or a URL: warnings, standstills and the end of training, sent by the process that records the run.

    events ──> handle_event ──(not the same text again within `alerts.interval_s`)──> queue ──> deliver ─┬─> command, JSON on its input
                                                                                                └─> POST of the JSON

No process waits for an alert: the queue is bounded, each delivery has a time limit, and a failed one costs one warning in the log.
Passwords and keys are cut out of the texts, and the command gets none of swarmq's environment variables.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
import shutil
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Literal

import msgspec
import structlog

from swarmq import live_settings
from swarmq.config import AlertSettings, SwarmJob
from swarmq.errors import ConfigError
from swarmq.messages import Change, Event
from swarmq.observe.board import drop_figures

log = structlog.get_logger()

DELIVERY_S = 10.0
"""Maximum seconds that the command or the server may take for one alert."""
MAX_WAITING = 64
"""Maximum number of alerts that wait for their delivery; further ones are discarded."""
MAX_WORDINGS = 1000
"""Maximum number of different alert texts that are remembered, to recognise repetitions."""
MAX_CHARS = 4000
SECRETS = re.compile(r"(?<=://)[^/@\s]+(?=@)|(?i:(?<=bearer ))\S+|\bsk-[\w-]{8,}|\bswarmq[._-][A-Za-z0-9_=.-]{40,}")

AlertKind = Literal["warning", "stall", "end"]


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON object that the command reads from its input, or that is posted to the URL."""

    run: str
    folder: str
    """The run folder, on `host`."""
    host: str
    kind: AlertKind
    source: str
    """Name of the process that caused the alert."""
    message: str
    text: str
    """The whole alert in one line; chat servers show this field."""
    at: float
    """Unix time of the alert."""
    left_out: int
    """Number of alerts with the same wording that were held back since the last one was sent."""
    steps: dict[str, int]
    """Policy -> its newest step."""


class Alerts:
    """Finds what in a run calls for an alert, holds repetitions back, and delivers the others."""

    def __init__(
        self, job: SwarmJob, *, clock: Callable[[], float] = time.time, delivery_s: float = DELIVERY_S
    ) -> None:
        self._job, self._settings, self._clock, self._delivery_s = job, job.alerts, clock, delivery_s
        self._waiting: asyncio.Queue[Alert] = asyncio.Queue(MAX_WAITING)
        self._sent: OrderedDict[tuple[str, ...], tuple[float, int]] = OrderedDict()
        """(kind, source, wording) -> (time of the last alert, number of alerts left out since)"""
        self._steps: dict[str, int] = {}
        self._ended: set[str] = set()
        self._changes: list[Change] = []
        self._has_failed: set[str] = set()

    def handle_event(self, event: Event) -> None:
        """Send the alerts that an event of the run calls for."""
        fields = event.fields
        if event.name == "warning":
            kind: AlertKind = "stall" if fields.get("kind") == "stall" else "warning"
            self.add(kind, event.source, str(fields.get("text", fields)))
        elif event.name == "step":
            self._handle_step(event)
        elif event.source == "collector" and event.name == "state" and "changes" in fields:
            with contextlib.suppress(msgspec.ValidationError):  # a collector of another release
                self._changes = msgspec.convert(fields["changes"], list[Change])

    def _handle_step(self, event: Event) -> None:
        policy = event.source.removeprefix("learner.")
        step = self._steps[policy] = int(event.fields.get("version", 0))
        job = live_settings.apply_changes(self._job, self._changes) if self._changes else self._job
        if policy not in job.policies or not live_settings.has_ended(job, policy, step):
            self._ended.discard(policy)
        elif policy not in self._ended:
            self._ended.add(policy)
            reward = event.fields.get("reward")
            of_reward = "" if reward is None else f", reward {reward:.3f}"
            self.add("end", event.source, f"policy {policy} has made its last step ({step}{of_reward})")

    def has_ended(self, policy: str) -> bool:
        """Return whether the policy has made its last step."""
        return policy in self._ended

    def add(self, kind: AlertKind, source: str, message: str) -> None:
        """Send an alert, unless one with the same wording was sent within the interval."""
        if not (self._settings.command or self._settings.url):
            return
        message, now = hide_secrets(message)[:MAX_CHARS], self._clock()
        wording = (kind, source, drop_figures(message))
        last, left_out = self._sent.pop(wording, (-float("inf"), 0))
        is_due = kind == "end" or now - last >= self._settings.interval_s
        self._sent[wording] = (now, 0) if is_due else (last, left_out + 1)
        if len(self._sent) > MAX_WORDINGS:
            self._sent.popitem(last=False)
        if is_due:
            with contextlib.suppress(asyncio.QueueFull):
                self._waiting.put_nowait(self._compose(kind, source, message, at=now, left_out=left_out))

    def _compose(self, kind: AlertKind, source: str, message: str, *, at: float, left_out: int) -> Alert:
        return Alert(
            run=self._job.run,
            folder=str(self._job.run_folder.path),
            host=socket.gethostname(),
            kind=kind,
            source=source,
            message=message,
            text=f"swarmq {self._job.run}: {kind} from {source}: {message}",
            at=at,
            left_out=left_out,
            steps=dict(self._steps),
        )

    async def deliver(self) -> None:
        """Deliver alerts in order until cancelled."""
        while True:
            await self._deliver(await self._waiting.get())

    async def finish(self, message: str) -> None:
        """Deliver the waiting alerts, and then `message`, which says why the recording ends. All of this has the time limit
        of one delivery."""
        self.add("end", "recorder", message)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._delivery_s):
                while not self._waiting.empty():
                    await self._deliver(self._waiting.get_nowait())

    async def _deliver(self, alert: Alert) -> None:
        body = msgspec.json.encode(alert)
        async with asyncio.TaskGroup() as tasks:
            if self._settings.command:
                tasks.create_task(
                    self._try("alerts.command", run_command(self._settings.command, alert, body, self._delivery_s))
                )
            if self._settings.url:
                tasks.create_task(self._try("alerts.url", post(self._settings.url, body, self._delivery_s)))

    async def _try(self, setting: str, delivery: Any) -> None:
        try:
            await delivery
        except (OSError, ValueError) as error:
            if setting not in self._has_failed:
                log.warning("alert_not_delivered", setting=setting, reason=hide_secrets(str(error)))
            self._has_failed.add(setting)
        else:
            self._has_failed.discard(setting)


def check_alerts(settings: AlertSettings) -> None:
    """Raise ConfigError if `alerts.command` names no program of this host."""
    if settings.command and shutil.which(program := shlex.split(settings.command)[0]) is None:
        raise ConfigError(f"alerts.command: there is no program {program!r} on this host, or it is not executable")


def hide_secrets(text: str) -> str:
    """Return the text with `***` in place of passwords in URLs, bearer tokens, keys and invites."""
    return SECRETS.sub("***", text)


async def run_command(command: str, alert: Alert, body: bytes, limit_s: float) -> None:
    """Run the command with the alert's JSON on its input. Raises OSError if it fails or takes longer than `limit_s`."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SWARMQ_")}
    own = {"RUN": alert.run, "KIND": alert.kind, "SOURCE": alert.source, "TEXT": alert.text}
    process = await asyncio.create_subprocess_exec(
        *shlex.split(command),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
        env=inherited | {f"SWARMQ_ALERT_{name}": value for name, value in own.items()},
    )
    try:
        async with asyncio.timeout(limit_s):
            await process.communicate(body)
    except TimeoutError:
        raise OSError(f"it took longer than {limit_s:g} s and was killed") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if process.returncode:
        raise OSError(f"it ended with status {process.returncode}")


async def post(url: str, body: bytes, limit_s: float) -> None:
    """Post the alert's JSON. Raises OSError if the server refuses it or takes longer than `limit_s`."""
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"}, method="POST")  # noqa: S310 - http(s), as checked
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    failed: list[Exception] = []

    def work() -> None:
        try:
            with urllib.request.urlopen(request, timeout=limit_s):  # noqa: S310
                pass
        except urllib.error.HTTPError as error:
            error.close()
            failed.append(error)
        except Exception as error:
            failed.append(error)
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(done.set)

    # A daemon thread of its own: a server that answers byte by byte must not keep this process from ending.
    threading.Thread(target=work, name="alert", daemon=True).start()
    try:
        async with asyncio.timeout(limit_s):
            await done.wait()
    except TimeoutError:
        raise OSError(f"the server took longer than {limit_s:g} s") from None
    if failed:
        raise OSError(str(failed[0])) from failed[0]
