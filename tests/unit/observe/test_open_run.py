"""Opening a run imports what it needs, says what is missing, and costs `import swarmq` nothing."""

import subprocess
import sys

import pytest

import swarmq
from swarmq.errors import ConfigError, MissingExtraError
from swarmq.observe.open_run import open_run


def test_a_missing_package_is_named_with_the_command_that_installs_it():
    with pytest.raises(MissingExtraError, match=r"not installed: tokenizers; pip install 'swarmq\[inspect\]'"):
        open_run("runs/r", installed=lambda name: None if name == "tokenizers" else name)


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="not the folder of a run"):
        swarmq.open_run(tmp_path)


def test_importing_swarmq_loads_nothing_of_it():
    code = "import sys, swarmq; print(sorted(n for n in sys.modules if n in {'numpy', 'tokenizers', 'zstandard', 'swarmq.observe'}))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
