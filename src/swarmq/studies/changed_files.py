"""Files that differ for one arm: edits of a planner, and the folder in which a trial with changed files runs."""

from __future__ import annotations

import difflib
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

import msgspec

from swarmq.errors import StudyError
from swarmq.runtime.files import write_atomically
from swarmq.studies.ledger import StudyFolder
from swarmq.studies.study import hash_json

LEFT_OUT = ("studies", "__pycache__")
"""Folders that no trial with changed files sees."""


class Edit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One text of a file that is replaced."""

    file: str
    old: str
    new: str


def apply_edits(root: Path, edits: Sequence[Edit], allowed: Sequence[str]) -> dict[str, str]:
    """Return the whole new content of each edited file. Raises StudyError for a file that is not in `allowed`, and for an
    old text that does not occur exactly once."""
    changed: dict[str, str] = {}
    for edit in edits:
        if edit.file not in allowed:
            raise StudyError(f"{edit.file!r} may not be changed; planner.files: {', '.join(allowed) or 'none'}")
        content = changed.get(edit.file)
        content = (root / edit.file).read_text() if content is None else content
        if not edit.old or (times := content.count(edit.old)) != 1:
            raise StudyError(
                f"{edit.file}: the text to replace occurs {times if edit.old else 'no'} times, not once: {edit.old[:80]!r}"
            )
        changed[edit.file] = content.replace(edit.old, edit.new)
    return changed


def show_diff(root: Path, changed: Mapping[str, str]) -> str:
    """Return the changes as a unified diff."""
    lines: list[str] = []
    for name, content in changed.items():
        old = (root / name).read_text()
        lines += difflib.unified_diff(old.splitlines(), content.splitlines(), f"a/{name}", f"b/{name}", lineterm="")
    return "\n".join(lines)


def lay_over(folder: StudyFolder, changed: Mapping[str, str]) -> Path:
    """Return the folder in which a trial runs: the study file's, or one of links to it beside the changed files."""
    if not changed:
        return folder.root
    over = folder.path / "code" / hash_json(changed)[:16]
    if not over.exists():
        over.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f"{over.name}-", dir=over.parent))
        _link(folder.root, made, [PurePosixPath(name) for name in changed])
        for name, content in changed.items():
            write_atomically(made / name, content.encode())
        try:
            made.rename(over)
        except OSError:
            if not over.exists():
                raise
            shutil.rmtree(made)  # another worker was faster
    return over


def _link(source: Path, target: Path, changed: Sequence[PurePosixPath]) -> None:
    """Fill a folder with links to a folder's entries; folders on the way to a changed file are real."""
    target.mkdir(exist_ok=True)
    on_the_way = {path.parts[0] for path in changed}
    for entry in sorted(source.iterdir()):
        if entry.name in LEFT_OUT:
            continue
        if entry.name not in on_the_way:
            (target / entry.name).symlink_to(entry)
        elif entry.is_dir():
            below = [PurePosixPath(*path.parts[1:]) for path in changed if path.parts[0] == entry.name]
            _link(entry, target / entry.name, below)
