"""Setting a checkout up: a second run does nothing, an interrupted one goes on where it stopped."""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "scripts" / "install.py"
ACTIONS = (
    "_make_venv",
    "_torch_cpu",
    "_vllm_cpu",
    "_vllm_cuda",
    "_packages",
    "_pip",
    "_torchvision",
    "_chromium",
    "_bubblewrap",
    "_rabbitmq",
)
STEPS = 11
"""`_pip` is two of them: the tools, and swarmq itself."""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with actions that only note that they were asked for in `done`."""
    spec = importlib.util.spec_from_file_location("install_script", SCRIPT)
    assert spec
    assert spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.done = []
    for name in ACTIONS:
        monkeypatch.setattr(script, name, lambda *_, name=name: script.done.append(name))
    monkeypatch.setattr(script, "STAMPS", tmp_path / "stamps.json")
    monkeypatch.setattr(script, "PYTHON", Path(sys.executable))
    return script


def test_a_second_run_does_nothing(script: ModuleType) -> None:
    assert script._install(cuda=False) == STEPS
    script.done.clear()
    assert script._install(cuda=False) == 0
    assert script.done == []


def test_vllm_for_cuda_brings_its_own_torchvision(script: ModuleType) -> None:
    script._install(cuda=True)
    assert not {"_torch_cpu", "_vllm_cpu", "_torchvision"} & set(script.done)
    assert "_vllm_cuda" in script.done


def test_only_what_has_changed_is_done_again(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    script._install(cuda=False)
    script.done.clear()
    monkeypatch.setattr(script, "TORCH", "0.0.0")
    assert script._install(cuda=False) == 1
    assert script.done == ["_torch_cpu"]


def test_an_interrupted_run_goes_on_where_it_stopped(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    packages = script._packages
    monkeypatch.setattr(script, "_packages", interrupted)
    with pytest.raises(KeyboardInterrupt):
        script._install(cuda=False)
    assert script.done == ["_make_venv", "_torch_cpu", "_vllm_cpu"]
    monkeypatch.setattr(script, "_packages", packages)
    script.done.clear()
    script._install(cuda=False)
    assert script.done == ["_packages", "_pip", "_pip", "_torchvision", "_pip", "_chromium", "_bubblewrap", "_rabbitmq"]


def test_an_environment_whose_python_is_gone_is_made_again(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    script._install(cuda=False)
    monkeypatch.setattr(script, "PYTHON", Path("/nowhere/bin/python"))
    assert script._install(cuda=False) == STEPS


def test_everybody_speaks_of_the_same_pythons(script: ModuleType) -> None:
    names = [f"{major}.{minor}" for major, minor in script.PYTHONS]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [line.rpartition(" ")[2] for line in project["classifiers"] if ":: Python :: 3." in line] == names
    assert project["requires-python"] == f">={names[0]}"
    assert f"PYTHONS = {tuple(names)}".replace("'", '"') in (ROOT / "scripts" / "pin.py").read_text()
    assert f"with Python {' or '.join(names)}," in (ROOT / "README.md").read_text()
    assert script.__doc__ is not None
    assert f"a Python {' or '.join(names)} is needed" in script.__doc__
