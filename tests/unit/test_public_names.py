"""`import swarmq` is light, and its names are where they say."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import swarmq

HEAVY = ("torch", "numpy", "vllm", "transformers", "litestar", "aiohttp", "uvicorn", "openai", "zstandard", "click")


def modules_after(code):
    script = f"{code}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    return set(done.stdout.split())


def test_importing_swarmq_imports_next_to_nothing():
    assert not modules_after("import swarmq") & {*HEAVY, "aio_pika", "structlog", "msgspec", "rich"}


def test_the_client_pulls_in_nothing_heavy():
    loaded = modules_after("from swarmq import SwarmClient, AsyncSwarmClient, SwarmTask, Outcome")
    assert "swarmq.client.async_client" in loaded
    assert not loaded & {*HEAVY, "aio_pika", "aiormq", "structlog", "rich", "reasoning_gym", "pyarrow", "datasets"}


def test_every_public_name_can_be_had_and_is_typed():
    tree = ast.parse(Path(swarmq.__file__).read_text())
    typed = {
        alias.asname: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module.startswith("swarmq")
        for alias in node.names
        if alias.asname
    }
    assert typed == swarmq._HOMES
    for name in swarmq.__all__:
        assert getattr(swarmq, name) is not None
        assert name in dir(swarmq)


@pytest.mark.parametrize("name", ["EvalReport", "Outcome", "RunSummary", "SwarmTask"])
def test_help_says_what_each_field_of_a_public_record_is(name):
    record = getattr(swarmq, name)
    told = [line.split()[0] for line in record.__doc__.splitlines() if line.startswith("    ") and line.strip()]
    assert told == list(record.__struct_fields__)


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'SwarmClints'"):
        swarmq.SwarmClints  # noqa: B018
    with pytest.raises(ImportError):
        from swarmq import nothing_of_this_name  # noqa: F401
