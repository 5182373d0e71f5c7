"""Search for a client's invite: the text itself, a file, a run folder, or `$SWARMQ_INVITE`."""

from __future__ import annotations

import os
from pathlib import Path

from swarmq.config import RunFolder
from swarmq.errors import KeyRefusedError
from swarmq.keys import Invite

VARIABLE = "SWARMQ_INVITE"
_PREFIX = "swarmq-invite"


def find_invite(source: Invite | str | os.PathLike[str] | None = None) -> Invite:
    """Return the invite that `source` holds or points to; None: `$SWARMQ_INVITE`.

    Raises KeyRefusedError with the place and the remedy; the message never contains the invite.
    """
    if isinstance(source, Invite):
        return source
    where = "the invite"
    if source is None:
        source, where = os.environ.get(VARIABLE) or None, f"${VARIABLE}"
    if source is None:
        raise KeyRefusedError(
            f"no invite: pass its text, a file or a run folder, or set ${VARIABLE}; `swarmq up` writes an invite to "
            "<run folder>/invite"
        )
    text = os.fspath(source).strip()
    return Invite.decode(text) if text.startswith(_PREFIX) else _read_invite(Path(text).expanduser(), where)


def _read_invite(path: Path, where: str) -> Invite:
    if "\n" in str(path) or len(str(path)) > os.pathconf("/", "PC_PATH_MAX"):
        raise KeyRefusedError(f"{where} is neither an invite (it starts with `{_PREFIX}.`) nor a path")
    try:
        if path.is_dir():
            path = RunFolder(path).invite
            if not path.exists():
                raise KeyRefusedError(f"{path} does not exist: start the run with `swarmq up JOB`, which writes it")
        text = path.read_text()
    except FileNotFoundError as error:
        raise KeyRefusedError(
            f"{where} is neither an invite (it starts with `{_PREFIX}.`) nor a file or run folder: {path} does not exist"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise KeyRefusedError(f"the invite in {path} cannot be read: {error}") from error
    try:
        return Invite.decode(text)
    except KeyRefusedError as error:
        raise KeyRefusedError(f"{path}: {error}; `swarmq up` renews the invite of a run folder") from error
