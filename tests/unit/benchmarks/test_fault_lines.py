"""What a fault run that was cut short finds again when it goes on, and what it knows of its parts."""

from __future__ import annotations

import os
import signal
import subprocess

from benchmarks.faults.check import longest
from benchmarks.faults.client import Lines
from benchmarks.faults.inject import FAULTS, Injection, plan
from benchmarks.faults.world import Stall, catches


def test_lines_of_earlier_processes_are_found_and_one_that_a_kill_has_cut_is_not(tmp_path):
    path = tmp_path / "opened.jsonl"
    first = Lines(path, float)
    first.add(1.5)
    first.add(2.5)
    with path.open("ab") as file:
        file.write(b"3.")
    again = Lines(path, float)
    again.add(4.5)
    assert again.found == Lines(path, float).found == [1.5, 2.5, 4.5]


def test_what_is_left_to_inject_is_the_rest_of_the_same_plan():
    whole = plan(50, seed=7)
    assert (len(whole), plan(50, seed=7)) == (50, whole)
    assert plan(50, seed=8) != whole


def test_a_plan_has_every_fault_where_there_is_room():
    for seed in range(20):
        assert sorted(plan(len(FAULTS), seed=seed)) == sorted(FAULTS)
        assert set(plan(50, seed=seed)) == FAULTS.keys()
    assert len(plan(8, seed=0, only=("proxy killed",))) == 8
    assert len(plan(5, seed=0)) == 5


def test_the_longest_stalls_are_told_with_what_was_injected_meanwhile():
    injections = [
        Injection(number=n, fault=name, at=at, hit="")
        for n, (name, at) in enumerate([("link cut", 10.0), ("proxy killed", 25.0), ("engine killed", 60.0)])
    ]
    first, second = longest([Stall(1.0, 2.0), Stall(11.0, 30.0), Stall(5.0, 1.0)], injections, num=2)
    assert (first.seconds, first.before, first.during) == (30.0, "link cut", ((14.0, "proxy killed"),))
    assert (second.seconds, second.before, second.during) == (2.0, "before the first", ())


def test_a_process_can_be_asked_to_stop_once_it_catches_the_signal():
    number = signal.SIGUSR2
    assert not catches(os.getpid(), number)
    before = signal.signal(number, lambda *_: None)
    assert catches(os.getpid(), number)
    signal.signal(number, before)
    assert not catches(os.getpid(), number)
    with subprocess.Popen(["true"]) as ended:
        pass
    assert not catches(ended.pid, number)
