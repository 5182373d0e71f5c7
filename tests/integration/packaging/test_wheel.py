"""The wheel that users install: it has every file, and the client and each extra work from it in an empty environment.

What is small is installed. For torch and vLLM the packages of the test environment are made visible instead.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from support.clients import install_into
from support.stored import STORED

ROOT = Path(__file__).parents[3]

LIGHT = {
    "client": ("", ("client", "cli", "broker", "config", "keys", "messages", "outcome", "registries", "runtime")),
    "proxy": ("[proxy]", ("proxy", "engine.client")),
    "collector": ("[collector]", ("collector", "transcripts")),
    "dashboard": ("[dashboard]", ("dashboard.serving", "cli.dashboard")),
    "traces": ("[proxy,traces]", ("proxy",)),
    "data": ("[data]", ("client.data",)),
    "environments": ("[environments]", ("environments",)),
}
"""Each extra that is installed whole, with the modules and packages of swarmq that it is for."""
HEAVY = {
    "learner": ("learner", "timeline", "weights.push", "weights.format"),
    "vllm": ("weights.vllm_plugin", "engine.server"),
    "demo": ("demo", "observe.curves"),
    "host": ("up",),
}

EXCEPT = {
    "proxy": "swarmq.proxy.http.tracing",  # the extra `traces`
    "learner": "swarmq.learner.model.logprob_kernel",  # Triton, which only a CUDA build of torch brings
}
IMPORT_ALL = """
import importlib, pkgutil, sys
for name in sys.argv[2:]:
    module = importlib.import_module("swarmq." + name)
    for found in pkgutil.walk_packages(getattr(module, "__path__", ()), module.__name__ + "."):
        if found.name != sys.argv[1]:
            importlib.import_module(found.name)
    assert module.__file__.startswith(sys.prefix), module.__file__
"""
IMPORT_REQUIREMENTS = """
import importlib, re, sys
from importlib.metadata import distribution, requires
needs = [need for need in requires("swarmq") if need.endswith(f"extra == '{sys.argv[1]}'")]
assert needs
for need in needs:
    name = re.match("[a-zA-Z0-9_-]+", need)[0]
    package = min((file.parts[:-1] for file in distribution(name).files if file.name == "__init__.py"), key=len)
    importlib.import_module(".".join(package))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT)
    (built,) = folder.glob("swarmq-*.whl")
    return built


@pytest.fixture(scope="module")
def client(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment that has the client and what it needs, nothing else."""
    return install(tmp_path_factory.mktemp("client"), wheel)


@pytest.fixture
def stored_run(tmp_path: Path) -> Path:
    with tarfile.open(STORED / "run.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "faults"


def test_the_wheel_has_every_file_of_the_package(wheel):
    source = ROOT / "src"
    files = {str(path.relative_to(source)) for path in (source / "swarmq").rglob("*") if path.is_file()}
    files = {name for name in files if "__pycache__" not in name}
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert packed == files
    assert {
        "swarmq/py.typed",
        "swarmq/starter/job.toml",
        "swarmq/starter/tasks.jsonl",
        "swarmq/dashboard/static/app.js",
    } <= packed


def test_the_client_runs_without_extras(client):
    assert "Usage: swarmq" in run(client.with_name("swarmq"), "--help")
    program = (
        "import sys; from swarmq import AsyncSwarmClient, SwarmClient, SwarmTask, Invite; "
        "print({'torch', 'numpy', 'aiohttp', 'litestar', 'vllm'} & sys.modules.keys())"
    )
    assert run(client, "-c", program) == "set()\n"


def test_a_command_without_its_extra_names_what_to_install(client, stored_run):
    command = [client.with_name("swarmq"), "inspect", stored_run]
    done = subprocess.run(command, env=bare(), capture_output=True, text=True, check=False)
    assert done.returncode
    assert "swarmq[inspect]" in done.stderr


@pytest.mark.parametrize("extra", LIGHT)
def test_a_light_extra_brings_what_its_modules_import(wheel, client, tmp_path, extra):
    extras, modules = LIGHT[extra]
    python = install(tmp_path, wheel, extras) if extras else client
    run(python, "-c", IMPORT_ALL, EXCEPT.get(extra, ""), *modules)
    if extras:
        run(python, "-c", IMPORT_REQUIREMENTS, extra)


def test_inspect_needs_no_torch(wheel, stored_run, tmp_path):
    python = install(tmp_path, wheel, "[inspect]")
    run(python, "-c", IMPORT_ALL, "", "observe.inspect")
    run(python, "-c", IMPORT_REQUIREMENTS, "inspect")
    assert run(python, "-c", "import importlib.util; print(importlib.util.find_spec('torch'))") == "None\n"
    swarmq = python.with_name("swarmq")
    steps = run(swarmq, "inspect", stored_run).split("\n")
    assert [line.split()[0] for line in steps[1:18]] == [str(step) for step in range(1, 18)]
    assert "8abeb03d" in steps[17]
    assert "398a5e529787" in run(swarmq, "inspect", stored_run, "--step", "17")


@pytest.mark.parametrize("extra", HEAVY)
def test_the_modules_of_a_heavy_extra_can_be_imported(wheel, tmp_path, extra):
    python = install(tmp_path, wheel, needs=False)
    pure, binary = sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]
    site = next((python.parent.parent / "lib").glob("python3*/site-packages"))
    (site / "test-environment.pth").write_text(f"{pure}\n{binary}\n")
    run(python, "-c", IMPORT_ALL, EXCEPT.get(extra, ""), *HEAVY[extra])


def install(folder: Path, wheel: Path, extras: str = "", *, needs: bool = True) -> Path:
    """Make a virtual environment and install the wheel with its requirements, in tested versions; return its Python."""
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv")
    python = folder / "venv" / "bin" / "python"
    options = ("-c", ROOT / "requirements" / "tested.txt") if needs else ("--no-deps",)
    run(*install_into(python), *options, f"{wheel}{extras}")
    return python


def run(*command: object) -> str:
    done = subprocess.run(list(map(str, command)), env=bare(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def bare() -> dict[str, str]:
    """Return this environment without what would let a program find the checkout."""
    return {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
