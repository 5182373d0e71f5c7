"""Requests, simulated user, reward and agent of examples/ask_user."""

import random

import pytest

from support.scripted_chat import answers_of, scripted_chat, spoken

pytest.importorskip("openai")
from examples.ask_user import agent, demonstrations, environment
from examples.ask_user.environment import User, read_booking, score, write_request

BOOKING = {"name": "Ada", "place": "zoo", "time": "14:30"}
TASK = {"size": "toy", "booking": BOOKING, "missing": ["time"]}


def test_held_out_names_are_in_no_training_request():
    train, held_out = list(environment.train()), list(environment.held_out())
    assert (len(train), len(held_out)) == (2000, 96)
    names, apart = ({task["booking"]["name"] for task in tasks} for tasks in (train, held_out))
    assert names
    assert apart
    assert not names & apart
    assert 0.7 < sum(bool(task["missing"]) for task in train) / len(train) < 0.8


def test_a_request_says_all_but_what_is_missing():
    assert write_request(TASK) == "A taxi for Ada to the zoo."
    full = next(task for task in environment.held_out_full() if len(task["missing"]) == 3)
    assert all(full["booking"][field] not in write_request(full).replace("A taxi", "") for field in full["missing"][:1])


def test_the_user_tells_one_missing_detail_for_each_question_about_it():
    task = {"size": "full", "booking": {**BOOKING, "people": "2", "luggage": "1"}, "missing": ["time", "people"]}
    user = User(task)
    assert user.reply("When, and how many passengers?") == "14:30."
    assert user.reply("And how many passengers?") == "2."
    assert user.reply("Where to?") == "I said that."
    assert user.reply("When?") == "I said that."
    assert user.reply("") == "What do you mean?"
    assert (user.told, user.needless) == ({"time", "people"}, 3)


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("book Ada, zoo, 14:30", 1.0),
        ("Fine.\nBOOK: ada, Zoo, 14:30.", 1.0),
        ("book Ada, zoo, 14:30\nbook Ada, zoo, 15:30", 0.0),
        ("book Ada, zoo", 0.0),
        ("book Ada, zoo, 14:30, 15:30", 0.0),
        ("book Ada zoo 14:30", 0.0),
        ("", 0.0),
    ],
)
def test_only_the_last_and_right_booking_is_rewarded(text, reward):
    assert score(TASK, read_booking(text, "toy"), needless=0) == reward


def test_needless_questions_cost_and_never_go_below_0():
    right = read_booking("book Ada, zoo, 14:30", "toy")
    assert score(TASK, right, needless=1) == 0.8
    assert score(TASK, right, needless=9) == 0.0


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_endless_questions_end_without_a_reward():
    with scripted_chat(["When?", "When?", "When?"]) as chat:
        outcome = agent.attempt(chat.episode(TASK))
    assert (outcome.reward, outcome.metrics["questions"], outcome.metrics["needless"]) == (0.0, 3, 2)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("way", demonstrations.WAYS)
def test_demonstrations_show_what_the_agent_sends(way):
    shown = demonstrations.chat(TASK, way, random.Random(3))
    with scripted_chat(answers_of(shown)) as chat:
        outcome = agent.attempt(chat.episode(TASK))
    assert chat.conversation() == spoken(shown[:-1])
    if way == "ask":
        assert (outcome.reward, outcome.metrics["asked_what_was_missing"]) == (1.0, True)
    if way == "guess":
        assert outcome.reward == 0.0
