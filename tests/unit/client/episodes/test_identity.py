"""A code version changes with every file of the user's own that an agent is made of, and with nothing else."""

import importlib
import importlib.util
import sys
from types import ModuleType

import pytest

from swarmq.client.episodes.identity import _hash_with_modules, hash_source

AGENT = "from {package}.score import score\n\ndef attempt(ep):\n    return score()\n"


@pytest.fixture
def version_of(tmp_path, monkeypatch):
    """Write a package with an agent and its score, load it as a new process would, and return the agent's code version."""

    def make(agent=AGENT, score="def score():\n    return 1.0\n"):
        package = f"shop_{tmp_path.name.replace('-', '_')}"
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            del sys.modules[name]
        folder = tmp_path / package
        folder.mkdir(exist_ok=True)
        for name, text in {"__init__": "", "agent": agent.format(package=package), "score": score}.items():
            (folder / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        _hash_with_modules.cache_clear()
        make.loaded.append(importlib.import_module(f"{package}.agent"))
        return hash_source(make.loaded[-1].attempt)

    make.loaded = []
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return make


def test_an_edited_score_in_another_file_is_new_code(version_of):
    first = version_of()
    assert len(first) == 12
    assert version_of() == first
    assert version_of(score="def score():\n    return 0.5\n") != first
    assert version_of(agent=AGENT + "# edited\n") != first
    assert version_of() == first


def test_a_module_that_an_agent_loads_while_it_runs_is_no_new_code(version_of, tmp_path):
    first = version_of()
    (tmp_path / "loaded_later.py").write_text("x = 1\n")
    importlib.import_module("loaded_later")
    assert hash_source(version_of.loaded[-1].attempt) == first


def test_a_lazy_module_is_not_loaded(version_of, tmp_path, monkeypatch):
    file = tmp_path / "for_another_host.py"
    file.write_text("raise ImportError('needs a GPU')\n")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    spec.loader = importlib.util.LazyLoader(spec.loader)
    lazy = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, file.stem, lazy)
    spec.loader.exec_module(lazy)
    first = version_of()
    file.write_text("raise ImportError('needs another GPU')\n")
    assert version_of() != first


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages"])
def test_an_installed_package_is_not_the_user_s_code_wherever_it_is(version_of, tmp_path, monkeypatch, folder):
    first = version_of()
    file = tmp_path / ".local" / folder / "installed_elsewhere.py"
    file.parent.mkdir(parents=True)
    file.write_text("x = 1\n")
    monkeypatch.setitem(sys.modules, file.stem, ModuleType(file.stem))
    sys.modules[file.stem].__file__ = str(file)
    assert version_of() == first
