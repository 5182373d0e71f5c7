"""A demo that cannot begin leaves nothing behind."""

import io

import pytest
from rich.console import Console

from swarmq.demo.run import DemoOptions, run_demo
from swarmq.errors import EngineError, SetUpError


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
