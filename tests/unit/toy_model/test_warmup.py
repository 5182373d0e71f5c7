"""Warm-up of a toy model on a recipe of seconds: what is learned, and what is left behind."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from swarmq.toy_model import Architecture, Recipe
from swarmq.toy_model.warmup import make_toy_model, render_chats, warm_up

pytestmark = pytest.mark.slow

MICRO = Recipe(
    architecture=Architecture(hidden=32, layers=1, heads=1, feed_forward=32, max_tokens=64),
    steps=4,
    settling_steps=1,
    batch=4,
    rise=2,
    tokenizer_chats=8,
)
CALL = {"type": "function", "function": {"name": "look", "arguments": '{"at":"é<x>"}'}}
CHAT = [
    {"role": "user", "content": "Where?"},
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "content": "here"},
    {"role": "assistant", "content": "There"},
]


def test_arguments_of_tool_calls_are_learned_as_the_engine_renders_them():
    stretches = next(render_chats([CHAT]))
    assert stretches[1] == '<tool_call>\n{"name": "look", "arguments": {"at": "é<x>"}}\n</tool_call><|im_end|>'
    assert stretches[3] == "There<|im_end|>"


def test_the_tools_of_a_request_are_part_of_what_is_given():
    tool = {
        "type": "function",
        "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {}}}},
    }
    assert "look(at)" in next(render_chats([CHAT], [tool]))[0]
    assert "look(at)" not in next(render_chats([CHAT]))[0]
    assert "look(at)" not in next(render_chats([{"messages": CHAT, "tools": []}], [tool]))[0]


def test_a_demonstration_longer_than_the_context_is_refused_with_its_length():
    long = [{"role": "user", "content": "0" * 100}, CHAT[-1]]
    with pytest.raises(ValueError, match=r"more than architecture.max_tokens \(64\)"):
        warm_up(itertools.repeat(long), MICRO, report=lambda _: None)


def test_a_stream_that_ends_early_is_refused():
    with pytest.raises(ValueError, match="ended after 10 chats; the recipe needs 28"):
        warm_up([CHAT] * 10, MICRO, report=lambda _: None)


def test_what_is_given_is_not_learned():
    """The loss is that of the assistant's tokens alone: after enough steps on one chat it goes to zero, whatever is asked."""
    questions = ([{"role": "user", "content": str(n)}, CHAT[-1]] for n in itertools.count(1000))
    losses = []
    warm_up(
        questions,
        Recipe(**{f: getattr(MICRO, f) for f in MICRO.__struct_fields__} | {"steps": 60, "learning_rate": 0.01}),
        report=lambda now: losses.append(now.loss),
    )
    assert losses[-1] < 0.05 < losses[0]


def test_a_model_is_made_once(tmp_path: Path):
    seen = []
    folder = make_toy_model(tmp_path / "cache" / "model", itertools.repeat(CHAT), MICRO, report=seen.append)
    assert make_toy_model(folder, iter(()), MICRO, report=seen.append) == folder
    assert len(seen) == 5
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_the_command_makes_the_model_of_a_module_and_links_to_it(tmp_path: Path):
    recipe = json.loads(json.dumps({"steps": 2, "settling_steps": 1, "batch": 2, "tokenizer_chats": 4}))
    (tmp_path / "lessons.py").write_text(
        f"import itertools\nRECIPE = {recipe}\nCHAT = {CHAT}\ndef demonstrations(dice):\n    return itertools.repeat(CHAT)\n"
    )
    command = [sys.executable, "-m", "swarmq.toy_model", "lessons", "runs/toy/lessons", "--cache", "cache"]
    said = [subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout for _ in range(2)]
    assert (tmp_path / "runs" / "toy" / "lessons" / "config.json").exists()
    assert "warm-up step 3 of 3" in said[0]
    assert "warm-up" not in said[1]
    wrong = subprocess.run([*command[:3], "nowhere", "x"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert wrong.returncode == 1
    assert wrong.stderr.startswith("error: nowhere: there is no module 'nowhere'")
