"""Apps, reward and agent of examples/tool_api."""

import random
from itertools import islice

import pytest

from support.scripted_chat import answers_of, scripted_chat, spoken

pytest.importorskip("openai")
from examples.tool_api import agent, demonstrations, environment

TASK = {"size": "toy", "goal": "set", "seed": 11}


def endpoint(world, app, action):
    return next(name for name, does in world.apps[app].endpoints.items() if does == action)


def test_the_splits_have_different_seeds():
    train, held_out = list(environment.train()), list(environment.held_out())
    assert (len(train), len(held_out)) == (1500, 96)
    seeds = {task["seed"] for task in train + held_out}
    assert len(seeds) == 1596
    assert max(seeds) < environment.WARMUP_SEED


def test_no_task_is_done_before_it_begins():
    for task in [*environment.held_out(), *islice(environment.train_full(), 600)]:
        assert environment.score(environment.build(task)) == 0.0


def test_a_task_always_gives_the_same_world():
    first, second = environment.build(TASK), environment.build(TASK)
    assert first.records() == second.records()
    assert [app.documentation() for app in first.apps.values()] == [app.documentation() for app in second.apps.values()]


def test_documentation_leads_to_the_right_call_and_changes_one_value_only():
    world = environment.build(TASK)
    app, value = world.subject
    name = world.run("docs", {"app": app}).split()[1].partition("(")[0]
    assert world.run("call", {"app": app, "endpoint": name, "value": value}) == "ok"
    assert environment.score(world) == 1.0
    other = next(device for device in world.apps if device != app)
    world.run("call", {"app": other, "endpoint": endpoint(world, other, "put"), "value": value})
    assert environment.score(world) == 0.0, "another change spoils it"


@pytest.mark.parametrize("goal", environment.GOALS["full"])
@pytest.mark.parametrize("seed", range(6))
def test_every_full_task_can_be_done_by_calls_alone(goal, seed):
    world = environment.build({"size": "full", "goal": goal, "seed": seed})
    vault = endpoint(world, "vault", "get")

    def call(app, action, **arguments):
        if "code" in world.run("docs", {"app": app}):
            arguments["code"] = world.run("call", {"app": "vault", "endpoint": vault, "key": app})
        return world.run("call", {"app": app, "endpoint": endpoint(world, app, action), **arguments})

    source, state = world.subject
    if goal == "tidy":
        for key in call(source, "list").split(", "):
            if call(source, "get", key=key) == state:
                assert call(source, "remove", key=key) == f"removed {state}"
    else:
        words = world.question.replace(",", "").split()
        key, target = words[3], words[7]
        assert call(source, "get", key=key) == state
        assert call(target, "put", key=key, value=state) == "ok"
        if goal == "move":
            call(source, "remove", key=key)
    assert environment.score(world) == 1.0


@pytest.mark.parametrize(
    ("tool", "arguments", "answer"),
    [
        ("docs", {"app": "bank"}, "404: no such app; there are "),
        ("docs", {}, "404: no such app; there are "),
        ("docs", [], "400: the arguments are texts by name"),
        ("call", {"app": "fan", "value": 7}, "400: the arguments are texts by name"),
        ("call", {"app": "fan", "endpoint": "records"}, "404: fan has no such endpoint"),
        ("call", {"app": "fan"}, "404: fan has no such endpoint"),
        ("records", {"app": "fan"}, "404: no tool records"),
    ],
)
def test_wrong_calls_come_back_as_text_and_change_nothing(tool, arguments, answer):
    world = environment.build(TASK)
    before = {name: dict(records) for name, records in world.records().items()}
    assert world.run(tool, arguments).startswith(answer)
    assert world.records() == before
    assert agent.run_tool(world, "docs", "not JSON") == "400: the arguments are not JSON"
    assert agent.run_tool(world, "docs", "[" * 5000).startswith("400: ")


def test_missing_parameters_and_wrong_codes_are_refused():
    worlds = (environment.build(task) for task in environment.train_full())
    world, app = next((world, app) for world in worlds for app in world.apps.values() if app.code)
    put = endpoint(world, app.name, "put")
    assert world.run("call", {"app": app.name, "endpoint": put, "key": "tom"}) == "400: value, code missing"
    wrong = {"app": app.name, "endpoint": put, "key": "tom", "value": "x", "code": "0"}
    assert world.run("call", wrong) == "403: wrong code"
    assert world.run("call", {**wrong, "code": app.code}) == "ok"
    get = endpoint(world, app.name, "get")
    assert world.run("call", {"app": app.name, "endpoint": get, "key": "??", "code": app.code}) == "404: no record ??"


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_an_agent_that_only_says_it_is_done_gets_nothing():
    with scripted_chat(["done"]) as chat:
        outcome = agent.attempt(chat.episode(TASK))
    assert (outcome.reward, outcome.success, outcome.metrics) == (0.0, False, {"docs_read": 0, "calls": 0})


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_an_agent_that_never_stops_is_judged_by_the_records():
    app, value = environment.build(TASK).subject
    read = ("docs", {"app": app})

    def call(messages):
        name = messages[-1]["content"].split()[1].partition("(")[0]
        return "call", {"app": app, "endpoint": name, "value": value}

    with scripted_chat([read, read, read, call]) as chat:
        outcome = agent.attempt(chat.episode(TASK))
    assert (outcome.reward, outcome.metrics) == (1.0, {"docs_read": 3, "calls": 1})


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("way", demonstrations.WAYS)
def test_demonstrations_show_what_the_agent_sends(way):
    shown = demonstrations.chat(environment.build(TASK), way, random.Random(5))
    with scripted_chat(answers_of(shown)) as chat:
        outcome = agent.attempt(chat.episode(TASK))
    assert chat.conversation() == spoken(shown[:-1])
    assert chat.requests[0]["tools"] == demonstrations.TOOLS
    if way == "read":
        assert outcome.reward == 1.0
