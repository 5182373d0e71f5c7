"""The tutorial `examples/frozen_lake`: rules of the game, splits, hostile answers, and the agent on a scripted model."""

from __future__ import annotations

import itertools
import random

import pytest
from examples.frozen_lake import agent, demonstrations
from examples.frozen_lake.environment import Lake, held_out, held_out_full, train, train_full

from support.scripted_chat import answers_of, scripted_chat, spoken

pytest.importorskip("openai")
#  S . O
#  O . .
#  . . G
TASK = {"rows": ["..O", "O..", "..."], "start": [0, 0], "goal": [2, 2], "moves": 5}


def play(*moves: str) -> Lake:
    lake = Lake(TASK)
    for move in moves:
        lake.step(move)
    return lake


def key(task):
    return str((task["rows"], task["start"], task["goal"]))


@pytest.mark.parametrize(("trained", "kept"), [(train, held_out), (train_full, held_out_full)])
def test_splits_share_no_lake_and_every_id_is_there_once(trained, kept):
    training, lakes = list(itertools.islice(trained(), 2500)), {key(task) for task in kept()}
    assert not {key(task) for task in training} & lakes
    assert len(lakes) == len(list(kept()))
    assert len({task["id"] for task in training}) == len(training)


def test_the_player_sees_the_four_neighbours_and_where_the_goal_is():
    assert play().describe() == "up: edge\nright: ice\ndown: hole\nleft: edge\ngoal: right and down"
    assert play("right", "down", "down").describe() == "up: ice\nright: goal\ndown: edge\nleft: ice\ngoal: right"


@pytest.mark.parametrize(
    ("moves", "at", "over"),
    [
        (["right", "down", "right", "down"], (2, 2), "goal"),
        (["down"], (1, 0), "hole"),
        (["up"], (0, 0), ""),
        ([""], (0, 0), ""),
        (["up"] * 5, (0, 0), "late"),
        (["up", "right", "down", "right", "down"], (2, 2), "goal"),
    ],
    ids=["goal", "hole", "edge", "no move", "out of moves", "goal with the last move"],
)
def test_a_walk_ends_in_a_hole_at_the_goal_or_after_its_moves(moves, at, over):
    lake = play(*moves)
    assert (lake.at, lake.over) == (at, over)


def test_every_lake_can_be_crossed_within_its_moves():
    for task in itertools.islice(train(), 300):
        ways = [Lake(task)]
        for _ in range(task["moves"]):
            if any(lake.over == "goal" for lake in ways):
                break
            ways = [
                walked
                for lake in ways
                for move in lake.towards()
                if (walked := _after(task, lake, move)).over != "hole"
            ]
        assert any(lake.over == "goal" for lake in ways), task


def _after(task, lake, move):
    walked = Lake(task)
    walked.at, walked.left = lake.at, lake.left
    walked.step(move)
    return walked


@pytest.mark.parametrize(
    ("text", "move"),
    [
        ("right", "right"),
        (" **Down**.\n", "down"),
        ("The goal is right of me.\nright", "right"),
        ("right down", ""),
        ("up\nright\ndown\nleft\nI walk", ""),
        ("goal", ""),
        ("", ""),
    ],
)
def test_a_reply_is_one_move_or_none(text, move):
    assert agent.read_move(text) == move


@pytest.mark.parametrize(
    ("script", "reward", "metrics"),
    [
        (["right", "down", "right", "down"], 1.0, {"moves": 4, "in_hole": False, "late": False}),
        (["down"], 0.0, {"moves": 1, "in_hole": True, "late": False}),
        (["goal"] * 5, 0.0, {"moves": 5, "in_hole": False, "late": True}),
    ],
)
def test_the_agent_walks_until_the_game_is_over(script, reward, metrics):
    with scripted_chat(script) as chat:
        outcome = agent.attempt(chat.episode(TASK))
    assert (outcome.reward, outcome.metrics) == (reward, metrics)


def test_demonstrations_send_the_prompts_exactly_as_the_agent_does_and_show_no_held_out_lake(monkeypatch):
    seen = []
    draw = demonstrations.lakes
    monkeypatch.setattr(demonstrations, "lakes", lambda *of: (seen.append(task) or task for task in draw(*of)))
    chats = list(itertools.islice(demonstrations.demonstrations(random.Random(1)), 50))
    assert not {key(task) for task in seen} & {key(task) for task in held_out()}
    for chat, task in zip(chats[:5], seen, strict=False):
        with scripted_chat(answers_of(chat)) as played:
            agent.attempt(played.episode(task))
        assert played.conversation() == spoken(chat[:-1])
