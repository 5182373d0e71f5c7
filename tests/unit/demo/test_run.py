"""A demo that cannot begin leaves nothing behind; one that runs says what it does, also where its output is no terminal."""

import asyncio
import io

import pytest
from rich.console import Console

from swarmq.demo.run import DemoOptions, run_demo
from swarmq.errors import EngineError, SetUpError
from swarmq.messages import Event
from swarmq.observe.monitor import Follower
from swarmq.whole_run.session import progress_display


async def test_a_model_that_there_is_not_leaves_no_run_folder(tmp_path):
    options = DemoOptions(folder=str(tmp_path / "runs"), model="/nonexistent")
    with pytest.raises(EngineError, match="model folder /nonexistent does not exist"):
        await run_demo(options, Console(file=io.StringIO()))
    assert list((tmp_path / "runs").iterdir()) == []


async def test_a_tracker_that_is_not_installed_is_said_before_a_model_is_made(tmp_path):
    sets = ('policies.main.train.trackers=["swanlab"]',)
    options = DemoOptions(folder=str(tmp_path / "runs"), cache=tmp_path / "models", sets=sets)
    with pytest.raises(SetUpError, match="policies.main.train.trackers: not installed: swanlab"):
        await run_demo(options, Console(file=io.StringIO()))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("terminal", [False, True])
async def test_where_the_output_is_no_terminal_each_step_is_a_line(terminal):
    follower, lines, told = Follower("demo"), list[str](), asyncio.Event()

    def report(line):
        lines.append(line)
        if "step 4" in line:
            told.set()

    console = Console(file=io.StringIO(), force_terminal=terminal)
    async with asyncio.timeout(60), progress_display(follower, console, report) as say:
        for version, reward in ((1, 0.25), (2, None), (3, -0.5), (4, 1.0)):
            fields = {"version": version, "reward": reward, "episodes": 64, "step_s": 5.25}
            follower.fold(Event(run="demo", source="learner.main", name="step", at=0.0, fields=fields))
            await asyncio.sleep(0)
        if not terminal:
            await told.wait()
        say("killing client a")
    steps = [
        "step 1: reward 0.250, 64 episodes, 5.2 s",
        "step 2: reward -, 64 episodes, 5.2 s",
        "step 3: reward -0.500, 64 episodes, 5.2 s",
        "step 4: reward 1.000, 64 episodes, 5.2 s",
    ]
    assert lines == [*([] if terminal else steps), "killing client a"]
