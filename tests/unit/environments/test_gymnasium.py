import math
import sys

import pytest

from support.scripted_model import scripted_model
from swarmq.environments import load_environment
from swarmq.errors import EpisodeError, OutcomeError, TaskError

gymnasium = pytest.importorskip("gymnasium")
LAKE = "gymnasium:FrozenLake-v1?is_slippery=false&actions=left,down,right,up"


class Words(gymnasium.Env):
    """Says a word and pays for its echo; ends after three."""

    observation_space = gymnasium.spaces.Text(8)
    action_space = gymnasium.spaces.Text(8)
    pays = 1.0

    def __init__(self, pays=1.0, breaks=False):
        self.pays, self.breaks = pays, breaks

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 3
        return f"w{seed}", {}

    def step(self, action):
        if self.breaks:
            raise OSError("the disk is gone")
        self.left -= 1
        return "next", self.pays, not self.left, False, {"is_success": not self.left}


class Points(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (2,))
    action_space = gymnasium.spaces.Box(0, 1, (1,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return [0.25, 0.5], {}

    def step(self, action):
        return [0, 0], float(action[0]), True, False, {}


def to_text(observation):
    return f"at {observation[0]}, {observation[1]}"


def to_action(text):
    import numpy as np

    return np.array([float(text)], dtype=np.float32)


def to_nothing(_observation):
    return 3


@pytest.fixture(autouse=True)
def registered():
    for kind in (Words, Points):
        gymnasium.register(f"{kind.__name__}-v0", entry_point=kind)
    yield
    for kind in (Words, Points):
        gymnasium.registry.pop(f"{kind.__name__}-v0")


async def play(target, *script, number=0):
    environment = load_environment(target)
    with scripted_model(*script) as model:
        async with environment.serving():
            tasks = list(environment.tasks("train"))
            return await environment.attempt(model.episode(tasks[number])), model.asked


async def test_a_lake_is_drawn_and_walked_by_the_names_of_actions():
    steps = ["down", "I go down.", "Not left but right", "right", "down", "fly", "right"]
    outcome, asked = await play(LAKE, *steps)
    assert (outcome.reward, outcome.metrics["steps"], outcome.metrics["illegal_actions"]) == (1.0, 6, 1)
    assert (outcome.metrics["terminated"], outcome.metrics["truncated"]) == (True, False)
    system, first = asked[0]["messages"]
    assert "left, down, right, up" in system["content"]
    assert first["content"].startswith("[S]FFF\nFHFH")
    assert asked[-1]["messages"][-1]["content"] == "Illegal action. Legal actions: left, down, right, up."


async def test_a_hole_pays_nothing_and_a_game_is_cut_at_its_limit():
    outcome, _ = await play(LAKE, "down", "right")
    assert (outcome.reward, outcome.metrics["steps"], outcome.metrics["terminated"]) == (0.0, 2, True)
    outcome, asked = await play(LAKE + "&max_steps=3", "up", "what?", "up", "up")
    assert (outcome.metrics["steps"], outcome.metrics["illegal_actions"], len(asked)) == (2, 1, 3)


async def test_text_spaces_need_no_code_and_seeds_are_tasks():
    outcome, asked = await play("gymnasium:Words-v0?tasks=5&seed=7", "a", "b", "c", number=2)
    assert (outcome.reward, outcome.success) == (3.0, True)
    assert [asked[0]["messages"][1]["content"], asked[1]["messages"][-1]["content"]] == ["w9", "next"]


async def test_functions_of_the_user_translate_other_spaces():
    mine = f"gymnasium:Points-v0?to_text={__name__}:to_text&to_action={__name__}:to_action"
    outcome, asked = await play(mine, "one half", "0.5")
    assert (outcome.reward, outcome.metrics["illegal_actions"]) == (0.5, 1)
    assert asked[0]["messages"][1]["content"] == "at 0.25, 0.5"
    assert "could not convert string to float" in asked[1]["messages"][-1]["content"]
    with pytest.raises(TaskError, match="to_text returned 3 of type int, not text"):
        await play(mine.replace("to_text&", "to_nothing&"), "1")


def test_the_splits_are_disjoint_and_sized():
    environment = load_environment(LAKE + "&tasks=20&eval_tasks=5")
    train, held_out = (list(environment.tasks(split)) for split in ("train", "eval"))
    assert (len(train), len(held_out)) == (20, 5)
    assert not {task["id"] for task in train} & {task["id"] for task in held_out}
    assert not {task["seed"] for task in train} & {task["seed"] for task in held_out}


async def test_what_breaks_is_no_reward():
    with pytest.raises(OSError, match="the disk is gone"):
        await play("gymnasium:Words-v0?breaks=true", "a")
    with pytest.raises(EpisodeError, match="scripted 400"):
        await play("gymnasium:Words-v0", "a", 400)


@pytest.mark.parametrize(
    ("pays", "says"), [("NaN", "is nan"), ('"much"', "is 'much' of type str"), ("null", "is None")]
)
async def test_a_reward_that_is_no_number_is_named(pays, says):
    target = f"gymnasium:Words-v0?pays={pays}"
    if pays == "NaN":
        gymnasium.registry["Words-v0"].kwargs["pays"] = math.nan
        target = "gymnasium:Words-v0"
    with pytest.raises(OutcomeError, match=f"the reward of step 1 of gymnasium:Words-v0 {says}"):
        await play(target, "a")


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("gymnasium:NoSuch-v1", "cannot be made: NameNotFound"),
        ("gymnasium:FrozenLake-v1?siz=3", "cannot be made: TypeError: .*unexpected keyword argument 'siz'"),
        ("gymnasium:FrozenLake-v1?max_steps=few", "max_steps is 'few': Expected `int`"),
        ("gymnasium:FrozenLake-v1?tasks=0", "tasks is 0: at least 1 is needed"),
        ("gymnasium:FrozenLake-v1?actions=left,right", "actions names 2 actions, but the environment has 4"),
        ("gymnasium:Points-v0", "observations of Box.* have no text of their own: write a function"),
        (f"gymnasium:Points-v0?to_text={__name__}:to_text", "actions of Box.* cannot be read from text"),
        (f"gymnasium:Points-v0?to_text={__name__}:LAKE", "to_text names .*:LAKE, which is no function"),
        ("gymnasium:Points-v0?to_text=no_module:f", "no module 'no_module'"),
    ],
)
def test_what_cannot_be_played_is_refused_before_any_episode(target, says):
    with pytest.raises(TaskError, match=says):
        load_environment(target)


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """The working directory, from which modules are imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    gymnasium.registry.pop("Maze-v0", None)


async def test_an_environment_is_registered_by_the_module_that_its_target_names(modules):
    (modules / "maze.py").write_text(
        "import gymnasium\ngymnasium.register('Maze-v0', entry_point=gymnasium.spec('Words-v0').entry_point)\n"
    )
    outcome, _ = await play("gymnasium:maze:Maze-v0", "a", "b", "c")
    assert outcome.reward == 3.0


def test_a_module_that_cannot_be_imported_is_one_line_with_its_error(modules):
    (modules / "broken_maze.py").write_text("raise OSError('the maps cannot be read:\\n  no such file')\n")
    for name, says in (
        ("broken_maze", "OSError: the maps cannot be read: no such file"),
        ("no_such_maze", "ModuleNotFoundError: No module named 'no_such_maze'"),
    ):
        with pytest.raises(TaskError, match=f"^gymnasium:{name}:Maze-v0: cannot be made: {says}$"):
            load_environment(f"gymnasium:{name}:Maze-v0")
