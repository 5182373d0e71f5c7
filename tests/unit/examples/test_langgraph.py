"""Desk, reward and graph of examples/langgraph."""

import random
from itertools import islice

import pytest

from support.scripted_chat import answers_of, scripted_chat, spoken

pytest.importorskip("langgraph")
pytest.importorskip("langchain_openai")
from examples.langgraph import agent, demonstrations, environment

TASK = {"size": "toy", "seed": 11}
DESK = environment.build(TASK)


def test_the_splits_have_different_seeds():
    train, held_out = list(environment.train()), list(environment.held_out())
    assert (len(train), len(held_out)) == (1500, 96)
    seeds = {task["seed"] for task in train + held_out}
    assert len(seeds) == 1596
    assert max(seeds) < environment.WARMUP_SEED
    assert environment.build(TASK) == DESK


def test_every_action_is_right_about_as_often():
    for tasks in (environment.train(), islice(environment.train_full(), 1500)):
        right = [environment.build(task).right for task in tasks]
        assert all(250 < right.count(action) < 500 for action in environment.ACTIONS)


@pytest.mark.parametrize(
    ("customer", "price", "right"), [("Ada", 99, "wait"), ("Ben", 49, "resend"), ("Ben", 50, "refund")]
)
def test_rules_depend_on_member_and_price(customer, price, right):
    desk = environment.Desk(
        size="full",
        orders={"1": environment.Order(number="1", status="lost", customer=customer, price=price)},
        gold=frozenset({"Ada"}),
        rules={"lost": environment.Rule(gold="wait", cheap="resend", dear="refund", limit=50)},
        asked="1",
    )
    assert desk.right == right
    assert desk.policy("lost") == "lost: wait for gold members; for others resend below 50, else refund"
    assert desk.lookup("1") == f"order 1: lost, price {price}, customer {customer}"
    assert desk.customer("Ada") == "Ada: gold member"
    assert (desk.lookup("2"), desk.customer("Zoe"), desk.policy("blue")) == (
        "no order 2",
        "no customer Zoe",
        "the statuses are broken, late, lost, returned",
    )


@pytest.mark.parametrize(
    "reply", ["", DESK.right, "<answer></answer>", f"<answer>{' '.join(environment.ACTIONS)}</answer>"]
)
def test_only_one_action_in_tags_is_rewarded(reply):
    assert environment.score(DESK, reply) == 0.0
    assert environment.score(DESK, f"{reply} <answer> {DESK.right.title()}\n</answer>") == 1.0


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("way", demonstrations.WAYS)
def test_demonstrations_show_what_the_graph_sends(way):
    shown = demonstrations.chat(DESK, way, random.Random(5))
    with scripted_chat(answers_of(shown)) as chat:
        outcome = agent.attempt(chat.episode(TASK))
    assert chat.conversation() == spoken(shown[:-1])
    assert [tool["function"]["name"] for tool in chat.requests[0]["tools"]] == ["lookup", "customer", "policy"]
    assert chat.requests[0]["tools"] == demonstrations.TOOLS
    assert outcome.metrics == {"lookups": way != "guess", "reminded": 0.0}
    if way == "obey":
        assert outcome.reward == 1.0


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_an_answer_that_is_no_action_is_asked_for_once_more():
    with scripted_chat(["Hm.", f"<answer>{DESK.right}</answer>"]) as chat:
        outcome = agent.attempt(chat.episode(TASK))
    assert (outcome.reward, outcome.metrics) == (1.0, {"lookups": 0, "reminded": 1.0})
    assert chat.conversation()[-1] == ("user", agent.REMINDER)
    with scripted_chat(["Hm.", "Hm."]) as chat:
        assert agent.attempt(chat.episode(TASK)).reward == 0.0


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_wrong_calls_come_back_as_text_and_endless_ones_get_nothing():
    says = [("refund", {"order": "1"}), ("lookup", {"number": DESK.asked}), ("lookup", {"order": "1"})]
    with scripted_chat([*says, ("policy", {"status": "lost"})]) as chat:
        outcome = agent.attempt(chat.episode(TASK))
    assert (outcome.reward, outcome.success) == (0.0, False)
    results = [text for role, text, *_ in chat.conversation() if role == "tool"]
    assert results[0].startswith("Error: refund is not a valid tool")
    assert "Field required" in results[1] or "order" in results[1]
    assert results[2] == "no order 1"
