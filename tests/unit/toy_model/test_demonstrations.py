"""Loading of a module of demonstrations, and the splitting of rendered chats."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

from swarmq.errors import ConfigError
from swarmq.toy_model import load_lessons
from swarmq.toy_model.command import link
from swarmq.toy_model.demonstrations import split_stretches

GAME = "GREETING = 'Hello'\n"
LESSONS = """
from {package}.game import GREETING
RECIPE = {{"steps": 3, "batch": 2, "tokenizer_chats": 4}}
TOOLS = [{{"type": "function", "function": {{"name": "wait", "parameters": {{"type": "object", "properties": {{}}}}}}}}]

def chat(said):
    return [{{"role": "user", "content": GREETING}}, {{"role": "assistant", "content": said}}]

def copying(dice):
    while True:
        yield chat("first")

def demonstrations(dice):
    while True:
        yield chat(dice.choice(["one", "other"]))
"""
START, END = "<|im_start|>assistant\n", "<|im_end|>"


@pytest.fixture
def tutorial(tmp_path: Path, monkeypatch):
    """Write a tutorial's modules into a package, and return its name and folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    package = tmp_path / f"lessons_{tmp_path.name.replace('-', '_')}"
    package.mkdir()
    (package / "game.py").write_text(GAME)
    (package / "demonstrations.py").write_text(LESSONS.format(package=package.name))

    def forget():
        for name in set(sys.modules) - before:
            if name.startswith(package.name):
                del sys.modules[name]

    yield package, forget
    forget()


def load(tutorial, **overrides):
    package, forget = tutorial
    forget()
    return load_lessons(f"{package.name}.demonstrations", overrides=overrides)


def test_the_first_chats_are_those_for_copying_and_then_comes_the_final_mix(tutorial):
    lessons = load(tutorial)
    said = [chat[-1]["content"] for chat in itertools.islice(lessons.chats(), 60)]
    assert said[:10] == ["first"] * 10, "four for the tokenizer, and two for each of three steps"
    assert set(said[10:]) == {"one", "other"}
    assert lessons.tools[0]["function"]["name"] == "wait"


def test_the_same_seed_gives_the_same_chats(tutorial):
    one, same, other = (load(tutorial, seed=seed) for seed in (0, 0, 1))
    read = [list(itertools.islice(lessons.chats(), 60)) for lessons in (one, same, other)]
    assert read[0] == read[1] != read[2]
    assert one.digest == same.digest != other.digest


@pytest.mark.parametrize("edited", ["game.py", "demonstrations.py"])
def test_an_edited_game_or_demonstration_is_another_model(tutorial, edited):
    before = load(tutorial).folder(Path("cache"))
    path = tutorial[0] / edited
    path.write_text(path.read_text() + "# edited\n")
    assert load(tutorial).folder(Path("cache")) != before


def test_edited_demonstrations_of_another_tutorial_that_are_mixed_in_are_another_model(tutorial):
    package, forget = tutorial
    (package / "mixed").mkdir()
    mixed = f"from {package.name} import demonstrations as other\ndemonstrations = other.demonstrations\n"
    (package / "mixed" / "demonstrations.py").write_text(mixed)

    def digest():
        forget()
        return load_lessons(f"{package.name}.mixed.demonstrations").digest

    before = digest()
    assert digest() == before
    other = package / "demonstrations.py"
    other.write_text(other.read_text() + "# edited\n")
    assert digest() != before


def test_a_file_that_the_demonstrations_do_not_import_changes_nothing(tutorial):
    before = load(tutorial).digest
    (tutorial[0] / "agent.py").write_text("")
    assert load(tutorial).digest == before


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "has no function demonstrations"),
        ("def demonstrations(dice): ...\nRECIPE = {'stepz': 3}", "stepz"),
        ("def demonstrations(dice): ...\nRECIPE = {'steps': 'many'}", "steps"),
        ("import no_such_module", "'no_such_module'"),
    ],
)
def test_a_wrong_module_is_refused_by_name(tutorial, text, wrong):
    (tutorial[0] / "demonstrations.py").write_text(text)
    with pytest.raises(ConfigError, match=wrong) as refused:
        load(tutorial)
    assert tutorial[0].name in str(refused.value)


def test_a_chat_is_split_at_what_the_assistant_says():
    chat = [{"role": "user"}, {"role": "assistant"}, {"role": "tool"}, {"role": "assistant"}, {"role": "user"}]
    text = f"ask{START}call{END}\nresult{START}done{END}\nthanks"
    assert split_stretches(text, chat) == [f"ask{START}", f"call{END}", f"\nresult{START}", f"done{END}"]


@pytest.mark.parametrize("text", ["nothing said", f"{START}a{END}{START}b{END}"])
def test_a_chat_whose_text_has_other_stretches_than_messages_is_refused(text):
    with pytest.raises(ValueError, match="1 assistant messages"):
        split_stretches(text, [{"role": "assistant"}])


def test_a_chat_without_an_assistant_is_refused():
    with pytest.raises(ValueError, match="0 assistant messages"):
        split_stretches("hello", [{"role": "user"}])


def test_a_link_is_renewed_and_a_folder_is_left_alone(tmp_path: Path):
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        link(tmp_path / name, tmp_path / "runs" / "model")
    assert (tmp_path / "runs" / "model").resolve() == tmp_path / "new"
    with pytest.raises(ConfigError, match="is not a link"):
        link(tmp_path / "old", tmp_path / "new")
