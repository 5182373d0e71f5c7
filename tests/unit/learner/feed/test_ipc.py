"""Rank 0's link to the batch feeder, against scripted ones."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Callable

import pytest

from swarmq.config import SwarmJob
from swarmq.errors import LearnerError, SetUpError
from swarmq.learner.feed.ipc import MAX_DEATHS, FeederLink, StopSignal
from swarmq.learner.store.records import BatchReady, CheckpointSaved, EvaluationLogged, Hello, StepDone
from swarmq.messages import Evaluation

SCRIPT = """
import socket, sys
from swarmq.learner.feed import frames as wire
from swarmq.learner.store import records
sock = socket.socket(fileno=int(sys.argv[-1]))
def receive():
    (size,) = wire.LENGTH.unpack(wire._exactly(sock, 8))
    return wire._to_io.decode(wire._exactly(sock, size))
def send(message):
    body = wire._encoder.encode(message)
    sock.sendall(wire.LENGTH.pack(len(body)) + body)
hello = receive()
"""


class Idle:
    def __init__(self, then: Callable[[], None] = lambda: None) -> None:
        self.calls: list[bool] = []
        self.then = then

    def __call__(self, *, again: bool) -> None:
        self.calls.append(again)
        self.then()


def link(
    script: str, stop: StopSignal | None = None, *, versions: list[int] | None = None, **timings: float
) -> FeederLink:
    job = SwarmJob.build({"run": "r", "policies": {"main": {"model": "m"}}})
    pending = iter(versions or [0] * 99)
    hello = lambda: Hello(job=job, policy="main", version=next(pending), vocab_size=9)  # noqa: E731
    return FeederLink(hello, stop or StopSignal(), command=[sys.executable, "-c", SCRIPT + script], **timings)


def unexpected(evaluation: Evaluation) -> None:
    raise AssertionError(evaluation)


def test_results_of_evaluations_are_passed_on_while_a_batch_is_awaited_and_it_is_asked_for_once() -> None:
    script = """
from swarmq.messages import Evaluation
receive()
for began_at in (1.0, 2.0):
    send(records.EvaluationReady(evaluation=Evaluation(run="r", version=3, began_at=began_at, results={})))
    assert receive() == records.EvaluationLogged(began_at=began_at)
send(records.BatchReady(record=b"x", replayed=False)); receive()
"""
    with link(script) as one:

        def log(evaluation: Evaluation) -> None:
            logged.append((evaluation.version, evaluation.began_at))
            one.send(EvaluationLogged(began_at=evaluation.began_at))

        logged: list[tuple[int, float]] = []
        batch = one.next(idle=Idle(), idle_s=lambda: 60, evaluated=log)
    assert batch == BatchReady(record=b"x", replayed=False)
    assert logged == [(3, 1.0), (3, 2.0)]


def test_a_batch_comes_back_and_idle_is_called_when_the_wait_begins() -> None:
    idle = Idle()
    with link(
        "receive(); send(records.QueueEmpty()); send(records.BatchReady(record=b'x' * 3_000_000, replayed=False)); receive()"
    ) as one:
        batch = one.next(idle=idle, idle_s=lambda: 60, evaluated=unexpected)
    assert batch == BatchReady(record=b"x" * 3_000_000, replayed=False)
    assert idle.calls == [False]


def test_a_process_that_dies_is_started_again_from_the_trainers_present_version() -> None:
    script = "receive()\nif hello.version == 0: sys.exit(9)\nsend(records.BatchReady(record=b'%d %d' % (hello.version, hello.again), replayed=True)); receive()"
    with link(script, versions=[0, 5]) as one:
        batch = one.next(idle=Idle(), idle_s=lambda: 60, evaluated=unexpected)
    assert batch is not None
    assert batch.record == b"5 1", "and told that it may wait for the broker"


def test_what_was_told_to_a_dead_process_is_told_to_its_successor() -> None:
    script = "if hello.version == 0: sys.exit(9)\nstep = receive(); send(records.BatchReady(record=b'%d' % step.version, replayed=True)); receive()"
    with link(script, versions=[0, 1]) as one:
        one._process.wait()
        one.send(StepDone(version=7))
        batch = one.next(idle=Idle(), idle_s=lambda: 60, evaluated=unexpected)
    assert batch is not None
    assert batch.record == b"7"


def test_a_successor_that_dies_before_it_is_told_anything_has_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    script = "if hello.version < 2: sys.exit(9)\nstep = receive(); send(records.BatchReady(record=b'%d' % step.version, replayed=True)); receive()"
    with link(script, versions=[0, 1, 2]) as one:
        start, successors = one._start, itertools.count(1)

        def started(*, again: bool) -> None:
            start(again=again)
            if next(successors) == 1:
                one._process.wait()

        monkeypatch.setattr(one, "_start", started)
        one._process.wait()
        one.send(StepDone(version=7))
        batch = one.next(idle=Idle(), idle_s=lambda: 60, evaluated=unexpected)
    assert batch is not None
    assert batch.record == b"7"


def test_a_successor_is_asked_for_a_batch_also_if_the_death_is_noticed_while_something_else_is_told() -> None:
    script = """
first = receive()
if hello.version == 0:
    send(records.QueueEmpty()); sys.exit(9)
assert isinstance(first, records.CheckpointSaved), first
receive(); send(records.BatchReady(record=b'asked again', replayed=True)); receive()
"""
    with link(script, versions=[0, 1]) as one:

        def send() -> None:
            one._process.wait()
            one.send(CheckpointSaved(oldest=1))

        batch = one.next(idle=Idle(send), idle_s=lambda: 60, evaluated=unexpected)
    assert batch == BatchReady(record=b"asked again", replayed=True)


def test_an_io_process_that_keeps_dying_is_given_up() -> None:
    hour_s = 3600.0  # a busy machine takes long to start five
    with (
        pytest.raises(LearnerError, match=f"died {MAX_DEATHS} times"),
        link("sys.exit(9)", death_window_s=hour_s) as one,
    ):
        one.next(idle=Idle(), idle_s=lambda: 60, evaluated=unexpected)


def test_a_reason_a_person_must_see_is_raised_in_the_trainer() -> None:
    script = "send(records.FeederFailed(text='the disk is full'))"
    with link(script) as one:
        one._process.wait()
        with pytest.raises(LearnerError, match="the disk is full"):
            one.next(idle=Idle(), idle_s=lambda: 60, evaluated=unexpected)


def test_a_failure_that_no_other_io_process_could_mend_is_a_set_up_error() -> None:
    for for_good, kind in ((True, SetUpError), (False, LearnerError)):
        with link(f"receive(); send(records.FeederFailed(text='another run', for_good={for_good})); receive()") as one:
            with pytest.raises(LearnerError, match="another run") as failure:
                one.next(idle=Idle(), idle_s=lambda: 60, evaluated=unexpected)
            assert failure.type is kind


def test_the_first_signal_ends_the_wait_and_the_second_would_kill() -> None:
    stop = StopSignal()
    idle = Idle(lambda: os.kill(os.getpid(), signal.SIGTERM))
    with (
        stop.handle_signals(),
        link("receive(); send(records.QueueEmpty()); receive(); send(records.Stopped())", stop) as one,
    ):
        assert one.next(idle=idle, idle_s=lambda: 60, evaluated=unexpected) is None
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        one.finish()
    assert stop.asked
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
