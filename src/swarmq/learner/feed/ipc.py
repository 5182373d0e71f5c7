"""Rank 0's link to the batch feeder: starts the process, requests batches, and restarts the process when it dies.

A dead process loses nothing: batches in the log are replayed, and rollouts that are not in the log are redelivered.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, Self

import msgspec
import structlog

from swarmq.errors import LearnerError, SetUpError
from swarmq.learner.feed import frames
from swarmq.learner.store import records
from swarmq.messages import Evaluation
from swarmq.runtime.processes import DeathCounter, die_with_parent

log = structlog.get_logger()

COMMAND = (sys.executable, "-m", "swarmq.learner.feed.process")
MAX_DEATHS = 5
DEATH_WINDOW_S = 60.0
STOP_S = 20.0


class Idle(Protocol):
    def __call__(self, *, again: bool) -> None: ...


class StopSignal:
    """Request to stop, made by a signal: the first SIGTERM or SIGINT asks to stop, the second ends the process at once."""

    def __init__(self) -> None:
        self.asked = False
        self.wakeup, self._waker = os.pipe()

    @contextlib.contextmanager
    def handle_signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._ask) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def ask(self) -> None:
        self.asked = True
        os.write(self._waker, b"!")

    def _ask(self, number: int, _: object) -> None:
        log.info(
            "stopping", signal=signal.Signals(number).name, action="signal again to stop at once, without a checkpoint"
        )
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_DFL)
        self.ask()


class FeederLink:
    """Link to the batch feeder, used as a context manager. `hello`: function that returns the trainer's state, called at each start
    of the batch feeder. `death_window_s`: the link gives up after MAX_DEATHS deaths of the batch feeder within these seconds."""

    def __init__(
        self,
        hello: Callable[[], records.Hello],
        stop: StopSignal,
        *,
        command: Sequence[str] = COMMAND,
        death_window_s: float = DEATH_WINDOW_S,
    ) -> None:
        self._hello, self._stop, self._command = hello, stop, command
        self._deaths = DeathCounter(death_window_s)

    def __enter__(self) -> Self:
        self._start(again=False)
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def next(
        self, *, idle: Idle, idle_s: Callable[[], float], evaluated: Callable[[Evaluation], None]
    ) -> records.BatchReady | records.SaveCheckpoint | None:
        """Wait for the next batch or checkpoint request; None if asked to stop or after the last step.

        `idle`: called when the wait begins (nothing is left to replay, no batch is full) and again every `idle_s()` seconds.
        `evaluated`: called with results of evaluation rounds.
        Raises LearnerError if the batch feeder cannot go on.
        """
        asked: subprocess.Popen[bytes] | None = None
        while not self._stop.asked:
            # a restarted process has not got the request yet; the process may also have died during `idle`
            if asked is not self._process:
                self._send(records.RequestBatch())
                asked = self._process
            with selectors.DefaultSelector() as selector:
                selector.register(self._socket, selectors.EVENT_READ)
                selector.register(self._stop.wakeup, selectors.EVENT_READ)
                ready = [key.fileobj for key, _ in selector.select(idle_s())]
            if self._socket in ready:
                match self._receive():
                    case records.BatchReady() | records.SaveCheckpoint() as message:
                        return message
                    case records.TrainingDone():
                        return None
                    case records.QueueEmpty():
                        idle(again=False)
                    case records.EvaluationReady(evaluation=evaluation):
                        evaluated(evaluation)
            elif not ready:
                idle(again=True)
        return None

    def send(self, message: records.ToIO) -> None:
        self._send(message)

    def finish(self) -> None:
        """Ask the batch feeder to stop, and wait until it has sent all reports, but at most STOP_S. The next start sends the rest."""
        self._send(records.Stop())
        self._socket.settimeout(STOP_S)
        with contextlib.suppress(TimeoutError, EOFError, LearnerError):
            while not isinstance(frames.receive(self._socket), records.Stopped):
                pass

    def _receive(self) -> records.ToTrainer | None:
        """Return a message, or None if the process died and a new one was started."""
        try:
            message = frames.receive(self._socket)
        except EOFError:
            self._restart()
            return None
        if isinstance(message, records.FeederFailed):
            raise _to_error(message)
        return message

    def _send(self, message: records.ToIO) -> None:
        while True:
            try:
                return frames.send(self._socket, message)
            except OSError:
                self._raise_reported_error()
                self._restart()

    def _raise_reported_error(self) -> None:
        """Raise the error that a dead batch feeder has left in the socket, if any."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                if isinstance(message := frames.receive(self._socket), records.FeederFailed):
                    raise _to_error(message)

    def _start(self, *, again: bool) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [*self._command, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                preexec_fn=die_with_parent,
            )
        with contextlib.suppress(OSError):  # the process is already dead, which the next message shows
            frames.send(self._socket, msgspec.structs.replace(self._hello(), again=again))

    def _restart(self) -> None:
        self._socket.close()
        status = self._process.wait()
        if self._deaths.record_death() >= MAX_DEATHS:
            raise LearnerError(
                f"the batch feeder died {MAX_DEATHS} times in a minute (status {status}): see its log lines above"
            )
        log.warning("batch_feeder_died", status=status, action="started again; nothing is lost")
        self._start(again=True)


def _to_error(message: records.FeederFailed) -> LearnerError:
    return (SetUpError if message.for_good else LearnerError)(message.text)
