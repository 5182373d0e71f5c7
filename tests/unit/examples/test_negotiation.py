"""Bargains, shares and agent of examples/negotiation."""

import random

import pytest

from support.scripted_chat import scripted_chat

pytest.importorskip("openai")
from examples.negotiation import agent, demonstrations, environment
from examples.negotiation.environment import Bargain

TASK = {"size": "toy", "cost": 2, "value": 8, "first": "seller"}


def bargain(*moves):
    game = Bargain(TASK)
    for text in moves:
        assert not game.ended
        game.move(text)
    return game


def test_a_trade_shares_the_surplus_by_its_price():
    game = bargain("offer 7", "offer 4", "accept")
    assert (game.ended, game.price) == ("trade", 4)
    assert game.shares() == {"seller": pytest.approx(1 / 3), "buyer": pytest.approx(2 / 3)}
    beyond = bargain("offer 9", "accept")
    assert beyond.shares() == {"seller": pytest.approx(7 / 6), "buyer": pytest.approx(-1 / 6)}


@pytest.mark.parametrize(
    ("moves", "ended"),
    [
        (("leave",), "left"),
        (("accept",), "left"),
        (("offer 10",), "left"),
        (("offer -1",), "left"),
        (("offer 5 or accept",), "left"),
        (("",), "left"),
        (("I think.\nOffer 5.", "offer 4", "offer 5", "offer 4"), "late"),
    ],
)
def test_without_a_trade_nobody_gets_anything(moves, ended):
    game = bargain(*moves)
    assert game.ended == ended
    assert game.shares() == {"seller": 0.0, "buyer": 0.0}


def test_every_bargain_has_a_price_that_is_good_for_both():
    for size in ("toy", "full"):
        for task in environment.tasks("train", size, 500):
            assert 1 <= task["cost"] < task["value"] - 1 <= environment.HIGHEST[size] - 1
    ids = [task["id"] for task in [*environment.train(), *environment.held_out()]]
    assert len(ids) == len(set(ids)) == 2096


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_each_side_sees_its_own_number_and_is_rewarded_for_its_own_share():
    with scripted_chat(["offer 6", "accept"]) as chat:
        outcome = agent.attempt(chat.episode(TASK))
    seller, buyer = (request["messages"] for request in chat.requests)
    assert [message["content"] for message in seller] == ["You are the seller. Cost 2.", "begin"]
    assert [message["content"] for message in buyer] == ["You are the buyer. Value 8.", "offer 6"]
    assert outcome.reward == 1.0
    assert outcome.agent_rewards == {"main": {"seller": pytest.approx(2 / 3), "buyer": pytest.approx(1 / 3)}}


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_side_that_never_moved_gets_no_reward_of_its_own():
    with scripted_chat(["leave"]) as chat:
        outcome = agent.attempt(chat.episode(TASK))
    assert (outcome.reward, outcome.agent_rewards) == (0.0, {"main": {"seller": 0.0}})


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_demonstrations_show_what_the_agent_sends():
    dice = random.Random(5)
    talks = next(t for t in (demonstrations.play(TASK, dice) for _ in range(50)) if len(t) == 2 and len(t[0]) == 5)
    said = [
        message["content"] for pair in zip(*talks, strict=False) for message in pair if message["role"] == "assistant"
    ]
    longer = [message["content"] for message in talks[0] if message["role"] == "assistant"]
    script = [*said, *longer[len(said) - len(said) // 2 :]]
    with scripted_chat(script) as chat:
        agent.attempt(chat.episode(TASK))
    seller = [
        request["messages"]
        for request in chat.requests
        if request["messages"][0]["content"].startswith("You are the s")
    ]
    assert seller[-1] == talks[0][:-1]


def test_about_a_third_of_the_demonstrated_bargains_are_good_trades():
    dice, good = random.Random(0), 0
    for task in environment.tasks("train", "toy", 1000):
        game = Bargain(task)
        while not game.ended:
            own = task["cost"] if game.turn == "seller" else task["value"]
            who = dice.choices(demonstrations.CHARACTERS, demonstrations.WEIGHTS)[0]
            game.move(demonstrations.choose(who, game.turn, own, game.offer, dice))
        good += game.price is not None and min(game.shares().values()) >= 0
    assert 200 < good < 500
