"""Roles, talk, vote and agent of examples/werewolves."""

import itertools
import random

import pytest

from support.scripted_chat import scripted_chat

pytest.importorskip("openai")
from examples.werewolves import agent, characters, demonstrations, environment
from examples.werewolves.environment import Game

TASK = {"size": "toy", "wolves": ["Ben"], "seer": "Cleo", "seen": "Ben", "seed": 1, "side": "wolves"}


def game(*speeches, **changes):
    played = Game({**TASK, **changes})
    for player, text in zip(played.players, speeches, strict=False):
        played.speak(player, text)
    return played


def count(votes):
    played = game()
    for player, name in zip(played.players, votes, strict=True):
        played.vote(player, name)
    return played.out, played.winner


@pytest.mark.parametrize(
    ("votes", "out", "winner"),
    [
        (("Ben", "Ada", "Ben", "Ben"), "Ben", "villagers"),
        (("Ben", "Ada", "Ada", "Ben"), "", "wolves"),
        (("Dan", "Dan", "Dan", "Ben"), "Dan", "wolves"),
        (("Ada", "Ben", "Cleo", "Dan"), "", "wolves"),
        (("", "Ada or Ben", "Ben.", "Zoe"), "Ben", "villagers"),
    ],
    ids=["the wolf", "a tie", "a villager", "votes for oneself", "one valid vote"],
)
def test_the_village_wins_if_a_wolf_alone_has_most_votes(votes, out, winner):
    assert count(votes) == (out, winner)


def test_only_claims_are_heard_at_toy_size_and_last_lines_at_full_size():
    toy = game("Ben is a wolf", "I am no wolf", "Dan is good", "Ben is a wolf. Ada is good")
    assert toy.said == [("Ada", "Ben is a wolf"), ("Ben", "nothing"), ("Cleo", "Dan is good"), ("Dan", "nothing")]
    assert toy.claims() == [("Ada", "Ben", True), ("Cleo", "Dan", False)]
    full = game("Hm.\nI think that Ben is a wolf!", "x" * 1000, "", size="full")
    assert [text for _, text in full.said] == ["I think that Ben is a wolf!", "x" * environment.LONGEST, "nothing"]
    assert full.claims() == [("Ada", "Ben", True)]


def test_every_player_knows_its_role_and_no_more_than_it_may():
    played = game()
    assert [played.secret(name) for name in played.players] == [
        "villager.",
        "wolf.",
        "seer. Ben is a wolf.",
        "villager.",
    ]
    pack = game(size="full", wolves=["Ben", "Eva"], seen="Ada")
    assert (pack.secret("Eva"), pack.secret("Cleo")) == ("wolf. Ben is a wolf.", "seer. Ada is good.")


def test_roles_are_dealt_evenly_and_the_seer_is_never_a_wolf():
    for size in ("toy", "full"):
        drawn = [environment.draw(random.Random(seed), size) for seed in range(400)]
        assert {name for one in drawn for name in one["wolves"]} == set(environment.NAMES[: environment.PLAYERS[size]])
        assert not any(one["seer"] in (*one["wolves"], one["seen"]) for one in drawn)
        assert 0.65 < sum(one["seen"] in one["wolves"] for one in drawn) / len(drawn) < 0.85
    held_out = list(environment.held_out())
    assert len({task["id"] for task in [*held_out, *environment.train()]}) == 2096
    assert [task["side"] for task in held_out].count("wolves") == 48


@pytest.mark.parametrize(
    ("character", "player", "voted"),
    [
        ("sure", "Cleo", {"Ben"}),
        ("sure", "Dan", {"Ada"}),
        ("gullible", "Ada", {"Cleo"}),
        ("gullible", "Cleo", {"Ada"}),
        ("wary", "Ada", {"Dan"}),
        ("wary", "Dan", {"Ben", "Ada"}),
        ("careless", "Dan", {"Ada", "Ben", "Cleo"}),
    ],
)
def test_characters_vote_by_what_they_heard(character, player, voted):
    played = game("Cleo is a wolf", "Cleo is good", "nothing", "Ada is a wolf")
    dice = random.Random(0)
    assert {characters.vote(character, played, player, dice) for _ in range(50)} == voted


def test_the_script_is_beaten_by_players_that_the_toy_model_has_copied():
    """Villagers who tell and believe, and a wolf who lies, win far more often than players of mixed characters."""
    mixed = (tuple(demonstrations.SPEECHES), tuple(demonstrations.VOTES))
    assert wins("villagers", (("honest",), ("sure",))) > wins("villagers", mixed) + 0.25
    assert wins("wolves", (("loud",), ("gullible",))) > wins("wolves", mixed) + 0.25


def wins(side, chosen):
    """Return how often a side of some characters for speech and vote wins against the script."""
    dice, won = random.Random(0), 0
    plans = {**agent.SCRIPT, side: chosen}
    for task in environment.tasks("train", "toy", 400):
        played = Game(task)
        for name in played.players:
            played.speak(name, characters.speak(dice.choice(plans[played.side(name)][0]), played, name, dice))
        for name in played.players:
            played.vote(name, characters.vote(dice.choice(plans[played.side(name)][1]), played, name, dice))
        won += played.winner == side
    return won / 400


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_each_side_asks_its_own_policy_and_gets_its_own_reward():
    says = ["nothing", "Ada is a wolf", "Ben is a wolf", "nothing", "Ben", "Ada", "Ben", "Ada"]
    with scripted_chat(says) as chat:
        outcome = agent.attempt(chat.episode(TASK))
    assert [one["model"] for one in chat.requests] == ["villagers", "wolves", "villagers", "villagers"] * 2
    assert outcome.rewards == {"wolves": 1.0, "villagers": 0.0}, "two votes each are a tie"
    assert outcome.metrics == {"accusations": 2, "lies": 1, "votes_for_wolves": 2}
    assert [message["content"] for message in chat.requests[-1]["messages"]] == [
        "You are Dan, villager.",
        "Ada: nothing\nBen: Ada is a wolf\nCleo: Ben is a wolf\nSpeak.",
        "nothing",
        "Vote.",
    ]


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize(
    ("side", "says", "reward"),
    [
        ("wolves", ["Ada is a wolf", "Ada"], 0.0),
        ("villagers", ["nothing", "Ben is a wolf", "nothing", *["Ben"] * 3], 1.0),
    ],
)
def test_against_the_script_only_one_side_is_asked(side, says, reward):
    with scripted_chat(says) as chat:
        outcome = agent.attempt_against_script(chat.episode({**TASK, "side": side}))
    assert {one["model"] for one in chat.requests} == {side}
    assert len(chat.requests) == len(says)
    assert (outcome.reward, outcome.metrics[f"{side}_won"]) == (reward, reward)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_demonstrations_show_what_the_agent_sends():
    talks = demonstrations.play(Game(TASK), random.Random(3), demonstrations.SPEECHES, demonstrations.VOTES)
    said = [[message["content"] for message in talk if message["role"] == "assistant"] for talk in talks]
    with scripted_chat([*(speech for speech, _ in said), *(vote for _, vote in said)]) as chat:
        agent.attempt(chat.episode(TASK))
    assert [one["messages"] for one in chat.requests[4:]] == [talk[:-1] for talk in talks]


def test_demonstrations_differ():
    shown = list(itertools.islice(demonstrations.demonstrations(random.Random(0)), 60))
    assert len({str(chat) for chat in shown}) > 50
    assert {len(chat) for chat in shown} == {5}
