"""A demo that cannot begin leaves nothing behind."""

import io

import pytest
from rich.console import Console

from swarmq.demo.run import DemoOptions, run_demo
from swarmq.errors import EngineError


async def test_a_model_that_there_is_not_leaves_no_run_folder(tmp_path):
    options = DemoOptions(folder=str(tmp_path / "runs"), model="/nonexistent")
    with pytest.raises(EngineError, match="model folder /nonexistent does not exist"):
        await run_demo(options, Console(file=io.StringIO()))
    assert list((tmp_path / "runs").iterdir()) == []
