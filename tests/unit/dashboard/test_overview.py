"""The first page of a run: bottleneck, stations and alarms, from recorded states."""

import pytest

from swarmq.broker import topology
from swarmq.config import SwarmJob
from swarmq.dashboard.overview import Flow, describe_nodes, find_alarms, measure_flow, name_bottleneck
from swarmq.messages import Event

NOW = 1000.0


def job(**more):
    groups = {"group_size": 4, "groups_per_batch": 8}
    return SwarmJob.build({"run": "r", "policies": {"main": {"model": "x"}}, "groups": groups, **more})


def board(**more):
    inbox = topology.inbox("r")
    return {
        "at": NOW,
        "recorder": {"is_recording": True},
        "broker": {"state": "ok"},
        "parts": {
            "collector": {
                "at": NOW,
                "open": 5,
                "waiting": 3,
                "tickets_out": {"default": 7},
                "groups_ready": {"main": 2},
            },
            "proxy.0": {"at": NOW, "open_calls": 4},
            "learner.main": {"at": NOW, "phase": "training"},
        },
        "queues": {inbox: 9, topology.ready("r", "main"): 12},
        "queue_details": {inbox: {"oldest_s": 1.5, "in_per_s": 10.0, "out_per_s": 12.0}},
        "engines": {"http://e": {"state": "up", "running": 3, "waiting": 1, "kv": 0.5}},
        **more,
    }


@pytest.mark.parametrize(
    ("flow", "node"),
    [
        (Flow(tickets=64, open_episodes=0, wait_s=5.0, step_s=6.0), "clients"),
        (Flow(tickets=64, open_episodes=0), "clients"),
        (Flow(tickets=64, open_episodes=9, open_calls=9, wait_s=5.0, step_s=6.0), "clients"),
        (Flow(inbox=900, inbox_in_per_s=50.0, inbox_out_per_s=20.0, wait_s=5.0, step_s=6.0), "collector"),
        (Flow(ready_groups=40, groups_per_batch=8, wait_s=0.1, step_s=6.0), "learner"),
        (Flow(tickets=0, open_episodes=40, open_calls=30, requests_waiting=12, wait_s=5.0, step_s=6.0), "engines"),
        (Flow(tickets=0, open_episodes=40, open_calls=30, kv=0.99, wait_s=5.0, step_s=6.0), "engines"),
        (Flow(tickets=0, open_episodes=40, open_calls=2, wait_s=5.0, step_s=6.0), "clients"),
        (Flow(is_broker_blocked=True), "in"),
    ],
)
def test_a_bottleneck_is_named_by_depths_and_waits(flow, node):
    found = name_bottleneck(flow)
    assert found is not None
    assert found.node == node
    assert found.text


@pytest.mark.parametrize(
    "flow",
    [
        Flow(),
        Flow(is_paused=True, tickets=64, open_episodes=0),
        Flow(has_ended=True, tickets=64, open_episodes=0),
        Flow(tickets=5, open_episodes=20, open_calls=18, wait_s=0.2, step_s=6.0, ready_groups=3, groups_per_batch=8),
        Flow(inbox=900, inbox_in_per_s=10.0, inbox_out_per_s=90.0),
    ],
)
def test_no_bottleneck_is_named_where_nothing_waits_or_nothing_is_known(flow):
    assert name_bottleneck(flow) is None


def test_the_flow_comes_from_the_recorded_board():
    flow = measure_flow(board(), job(), {"main": [{"wait_s": 1.0, "step_s": 4.0}]}, has_ended=False)
    assert (flow.tickets, flow.open_episodes, flow.inbox, flow.ready_groups) == (7, 5, 9, 2)
    assert (flow.wait_s, flow.step_s, flow.requests_waiting, flow.open_calls) == (1.0, 4.0, 1, 4)


def nodes(recorded, *, is_live=True, now=NOW):
    steps = {"main": [{"wait_s": 1.0, "step_s": 4.0}]}
    flow = measure_flow(recorded, job(), steps, has_ended=False)
    return {one.id: one for one in describe_nodes(recorded, job(), steps, flow, now=now, is_live=is_live)}


def test_the_stations_are_in_the_order_of_an_episode():
    found = nodes(board())
    assert list(found) == ["clients", "tickets", "proxies", "in", "collector", "ready", "learner", "engines"]
    assert (found["in"].depth, found["in"].oldest_s, found["in"].rate_per_s) == (9, 1.5, 12.0)
    assert (found["engines"].depth, found["engines"].state) == (4, "busy")
    assert (found["learner"].state, found["learner"].rate_per_s) == ("busy", 0.25)


def test_a_silent_process_is_down_and_an_idle_learner_waits():
    recorded = board()
    recorded["parts"]["learner.main"] = {"at": NOW, "phase": "waiting"}
    recorded["parts"]["collector"]["at"] = NOW - 60
    found = nodes(recorded)
    assert (found["collector"].state, found["learner"].state) == ("down", "waiting")


@pytest.mark.parametrize("recorded", [{}, board()])
def test_nothing_counts_as_up_in_a_run_that_is_not(recorded):
    assert {one.state for one in nodes(recorded, is_live=False).values()} <= {"down", "unknown"}


def warning(at, text, **more):
    return Event(run="r", source="collector", name="warning", at=at, fields={"text": text, **more})


def test_alarms_come_newest_first_and_repetitions_are_counted():
    told = [warning(1.0, "3 groups wait"), warning(2.0, "other"), warning(3.0, "4 groups wait")]
    found = find_alarms(told, {}, now=NOW, is_live=False)
    assert [(one["text"], one["times"]) for one in found] == [("4 groups wait", 2), ("other", 1)]
    dead = board(broker={"state": "away"}, engines={"http://e": {"state": "down"}})
    assert [one["source"] for one in find_alarms([], dead, now=NOW, is_live=True)] == ["http://e", "broker"]
    assert find_alarms([], dead, now=NOW, is_live=False) == []


def test_a_run_that_was_stopped_waits_for_nothing_and_keeps_its_other_warnings():
    told = [warning(1.0, "rewards are equal"), warning(2.0, "nothing moves", kind="stall")]

    def texts(recorder, *, is_live):
        return [one["text"] for one in find_alarms(told, board(recorder=recorder), now=NOW, is_live=is_live)]

    assert texts({"is_recording": False}, is_live=False) == ["rewards are equal"]
    killed = texts({"is_recording": True}, is_live=False)
    assert killed == texts({"is_recording": True}, is_live=True) == ["nothing moves", "rewards are equal"]
