"""Fresh working copies of a task's folder or git repository.

A copy is a git repository with one commit and without history or remotes: agents expect a repository, a history may contain the
solution, and nothing that an agent does in the copy reaches the original.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from swarmq.errors import TaskError

COMMIT = (
    ("init", "-q"),
    ("config", "user.name", "agent"),
    ("config", "user.email", "agent@localhost"),
    ("config", "commit.gpgsign", "false"),
    ("add", "-A", "-f"),
    ("commit", "-q", "--allow-empty", "-m", "Task"),
)
"""Git commands that make a repository of a copy, in which agents can commit."""


@contextlib.asynccontextmanager
async def open_copy(source: Path | None, *, commit: str | None, parent: Path | None, keep: bool) -> AsyncIterator[Path]:
    """Yield the folder of an attempt, with the working copy in `work` and an empty home in `home`; remove it at the end.

    `source`: a folder; the top folder of a git repository is copied as of `commit` (default: HEAD), any other folder as it is;
    None: an empty copy. `keep`: leave the folder in place. Raises TaskError if there is no such folder or commit.
    """
    folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="swarmq-", dir=parent))
    try:
        await asyncio.to_thread(_prepare, folder, source, commit)
        yield folder
    finally:
        if not keep:
            await asyncio.shield(asyncio.to_thread(_remove, folder))


def _prepare(folder: Path, source: Path | None, commit: str | None) -> None:
    (folder / "home").mkdir()
    fill(folder / "work", source, commit=commit)
    _commit_all(folder / "work")


def fill(work: Path, source: Path | None, *, commit: str | None) -> None:
    """Create `work` with the content of `source`."""
    if source is None:
        work.mkdir()
        return
    if not source.is_dir():
        raise TaskError(f"{source}: the folder of the task does not exist")
    if (source / ".git").exists():
        work.mkdir()
        _extract(source, commit or "HEAD", work)
    elif commit:
        raise TaskError(
            f"{source}: the task names the commit {commit}, and the folder is not the top of a git repository"
        )
    else:
        shutil.copytree(source, work, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", ".pytest_cache"))


def restore(work: Path, paths: Sequence[str], source: Path, *, commit: str | None) -> None:
    """Put `paths`, relative to the copy, back as they are in the source; files that the agent added below them go away.

    Raises TaskError for a path that is outside of the copy, or is not in the source.
    """
    with tempfile.TemporaryDirectory(prefix="swarmq-") as folder:
        original = Path(folder) / "work"
        fill(original, source, commit=commit)
        for path in paths:
            if Path(path).is_absolute() or ".." in Path(path).parts:
                raise TaskError(f"--restore {path}: give a path inside the task's folder")
            before, now = original / path, work / path
            if not before.exists():
                raise TaskError(f"--restore {path}: not in {source}")
            for parent in reversed(now.relative_to(work).parents):  # the agent may have put a link or a file there
                if (step := work / parent).is_symlink() or step.is_file():
                    step.unlink()
            if now.is_dir() and not now.is_symlink():
                _remove(now)
            elif now.exists() or now.is_symlink():
                now.unlink()
            now.parent.mkdir(parents=True, exist_ok=True)
            if before.is_dir():
                shutil.copytree(before, now, symlinks=True)
            else:
                shutil.copy2(before, now, follow_symlinks=False)


def _extract(repository: Path, commit: str, work: Path) -> None:
    archive = subprocess.run(
        ["git", "-C", str(repository), "archive", "--format=tar", commit], capture_output=True, check=False
    )
    if archive.returncode:
        raise TaskError(f"{repository}: commit {commit}: {archive.stderr.decode(errors='replace').strip()}")
    unpacked = subprocess.run(["tar", "-x", "-C", str(work)], input=archive.stdout, capture_output=True, check=False)
    if unpacked.returncode:
        raise TaskError(f"{repository}: cannot be unpacked: {unpacked.stderr.decode(errors='replace').strip()}")


def _commit_all(work: Path) -> None:
    if not shutil.which("git"):
        return  # agents that need a repository say so
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    for command in COMMIT:
        done = subprocess.run(["git", *command], cwd=work, env=clean, capture_output=True, text=True, check=False)
        if done.returncode:
            raise TaskError(f"git {command[0]} in {work}: {done.stderr.strip()}")


def _remove(folder: Path) -> None:
    """Remove a folder, also where an agent has made folders in it unreadable."""
    for path, folders, _ in os.walk(folder):
        for name in folders:
            with contextlib.suppress(OSError):
                (Path(path) / name).chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)
