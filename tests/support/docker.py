"""A docker daemon of a test's own, with compose and buildx: Debian's packages, its own data, socket and bridge.

The packages are trixie's, unpacked into a folder, because those of older releases are too old for docker-compose.yml.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache" / "docker"
SUITE = "trixie"
PACKAGES = ("docker.io", "docker-cli", "containerd", "docker-buildx", "docker-compose")
HOST_PACKAGES = ("mmdebstrap", "runc", "iptables", "tini")
START_S = 120.0


def why_not() -> str:
    """Return why no daemon can be run here, or ""."""
    if os.geteuid() != 0:
        return "a docker daemon needs root"
    if not shutil.which("apt-get"):
        return "the packages are Debian's"
    return "" if "\toverlay" in Path("/proc/filesystems").read_text() else "docker needs the overlay file system"


@contextlib.contextmanager
def private_docker(folder: Path) -> Iterator[dict[str, str]]:
    """Run a daemon with its data in `folder`; yields the environment in which `docker` and `docker compose` use it.

    $SWARMQ_TEST_DOCKER names a folder in which such a daemon runs already, with what it has built.
    """
    programs = _install()
    if running := os.environ.get("SWARMQ_TEST_DOCKER"):
        folder = Path(running)
    plugins = folder / "config" / "cli-plugins"
    plugins.mkdir(parents=True, exist_ok=True)
    for plugin in (programs / "usr/libexec/docker/cli-plugins").iterdir():
        if not (plugins / plugin.name).exists():
            (plugins / plugin.name).symlink_to(plugin)
    path = os.pathsep.join([f"{programs}/usr/bin", f"{programs}/usr/sbin", os.environ["PATH"], "/usr/sbin", "/sbin"])
    # a socket's path has at most 107 characters
    environment = {
        **os.environ,
        "PATH": path,
        "DOCKER_HOST": f"unix://{folder}/s",
        "DOCKER_CONFIG": str(folder / "config"),
    }
    if running:
        yield environment
        return
    data = folder / "data"
    command = ["dockerd", f"--data-root={data}", f"--exec-root={folder}/x", f"--pidfile={folder}/pid"]
    with (folder / "log").open("wb") as log:
        daemon = subprocess.Popen(
            [*command, "-H", environment["DOCKER_HOST"]],
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        until = time.monotonic() + START_S
        while subprocess.run(["docker", "info"], env=environment, capture_output=True, check=False).returncode:
            assert daemon.poll() is None, (folder / "log").read_text()[-3000:]
            assert time.monotonic() < until, (folder / "log").read_text()[-3000:]
            time.sleep(0.2)
        yield environment
    finally:
        daemon.send_signal(signal.SIGTERM)
        daemon.wait(60)
        shutil.rmtree(data)


def _install() -> Path:
    """Return the folder with docker's programs, unpacked there once."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if missing := [name for name in HOST_PACKAGES if not _is_installed(name)]:
            _run("apt-get", "update", "-q")
            _run("apt-get", "install", "-q", "-y", "--no-install-recommends", *missing)
        programs = CACHE / SUITE
        if not programs.exists():
            draft = CACHE / "new"
            shutil.rmtree(draft, ignore_errors=True)
            (draft / "lists" / "partial").mkdir(parents=True)
            (draft / "sources.list").write_text(f"deb http://deb.debian.org/debian {SUITE} main\n")
            options = {
                "Dir::Etc::SourceList": draft / "sources.list",
                "Dir::Etc::SourceParts": os.devnull,
                "Dir::State::Lists": draft / "lists",
                "Dir::Cache::pkgcache": "",
                "Dir::Cache::srcpkgcache": "",
                "APT::Sandbox::User": "root",
            }
            apt = ["apt-get", "-q", *(word for key, value in options.items() for word in ("-o", f"{key}={value}"))]
            _run(*apt, "update")
            _run(*apt, "download", *PACKAGES, cwd=draft)
            for archive in draft.glob("*.deb"):
                _run("dpkg-deb", "-x", str(archive), str(draft / "root"))
            init = draft / "root" / "usr" / "bin" / "docker-init"  # a link to a neighbour that another package has
            init.unlink(missing_ok=True)
            init.symlink_to("/usr/bin/tini-static")
            (draft / "root").rename(programs)
            shutil.rmtree(draft)
    return programs


def _is_installed(package: str) -> bool:
    return not subprocess.run(["dpkg", "-s", package], capture_output=True, check=False).returncode


def _run(*command: str, cwd: Path | None = None) -> None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert not done.returncode, f"{' '.join(command)}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"


def make_base_images(environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/base_images.py")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr[-3000:]
