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
    "_uv",
    "_torch_cpu",
    "_vllm_cpu",
    "_vllm_cuda",
    "_packages",
    "_install_exactly",
    "_torchvision",
    "_chromium",
    "_bubblewrap",
    "_rabbitmq",
)
STEPS = 12
"""`_install_exactly` is three of them: the tools, the generator of the site, and swarmq itself."""


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
    assert script.done == ["_make_venv", "_uv", "_torch_cpu", "_vllm_cpu"]
    monkeypatch.setattr(script, "_packages", packages)
    script.done.clear()
    script._install(cuda=False)
    exactly = "_install_exactly"
    rest = [exactly, exactly, "_torchvision", exactly, "_chromium", "_bubblewrap", "_rabbitmq"]
    assert script.done == ["_packages", *rest]


def test_an_environment_whose_python_is_gone_is_made_again(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    script._install(cuda=False)
    monkeypatch.setattr(script, "PYTHON", Path("/nowhere/bin/python"))
    assert script._install(cuda=False) == STEPS


def test_pip_installs_what_uv_does_not_and_a_broken_download_is_tried_again(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    tried = []

    def way(name: str, *statuses: int) -> None:
        left = iter(statuses)
        monkeypatch.setattr(script, name, lambda *words: tried.append((name, *words)) or next(left))

    way("_try_uv", 2)
    way("_try_pip", 1, 0)
    script._install_exactly("a==1")
    assert [name for name, *_ in tried] == ["_try_uv", "_try_pip", "_try_pip"]
    assert {tuple(words) for _, *words in tried} == {("--no-deps", "a==1")}

    tried.clear()
    way("_try_uv", 0)
    script._install_exactly("a==1")
    assert [name for name, *_ in tried] == ["_try_uv"]


def test_uv_looks_where_pip_does(script: ModuleType) -> None:
    settings = """\
:env:.find-links='/wheels'
:env:.cert='/of/mine.pem'
global.cert='/of/all.pem'
global.timeout='60'
global.index-url='https://pypi.example/simple'
global.extra-index-url='file:///one/simple file:///two/simple'
"""
    variables, options = script._translate(settings)
    indexes = ["--index", "file:///one/simple", "--index", "file:///two/simple"]
    expected = ["--default-index", "https://pypi.example/simple", *indexes, "--find-links", "/wheels"]
    assert options[: len(expected)] == expected
    assert variables == ["SSL_CERT_FILE=/of/mine.pem"]
    assert script._translate("") == ([], ["--index-strategy", "unsafe-best-match"])


def test_images_are_built_with_the_same_uv(script: ModuleType) -> None:
    assert f" {script.UV}\n" in (ROOT / "Dockerfile").read_text()


def test_everybody_speaks_of_the_same_pythons(script: ModuleType) -> None:
    names = [f"{major}.{minor}" for major, minor in script.PYTHONS]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [line.rpartition(" ")[2] for line in project["classifiers"] if ":: Python :: 3." in line] == names
    assert project["requires-python"] == f">={names[0]}"
    assert f"PYTHONS = {tuple(names)}".replace("'", '"') in (ROOT / "scripts" / "pin.py").read_text()
    assert f"with Python {' or '.join(names)}," in (ROOT / "README.md").read_text()
    assert script.__doc__ is not None
    assert f"a Python {' or '.join(names)} is needed" in script.__doc__
