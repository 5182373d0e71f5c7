"""Discovery of a policy's newest valid checkpoint, and the check that a learner's settings continue it. Without torch."""

from __future__ import annotations

from pathlib import Path

import msgspec
import structlog
from safetensors import safe_open

from swarmq.config import Lora
from swarmq.errors import SetUpError
from swarmq.learner.store.durable_files import sha256
from swarmq.learner.store.records import ADAPTER_FILE, ADAPTER_SETTINGS_KEY, SCHEMA, RunIdentity

log = structlog.get_logger()

MANIFEST = "manifest.json"


class File(msgspec.Struct, frozen=True, kw_only=True):
    size: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    schema: int
    identity: RunIdentity
    version: int
    """Weight version; the batch log continues after it."""
    files: dict[str, File]
    written_at: float
    swarmq: str


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that was found and verified."""

    path: Path
    version: int


def find_newest(folder: Path, identity: RunIdentity, *, hashed: bool = True) -> Checkpoint | None:
    """Return the newest valid checkpoint, or None. `hashed` as for `verify`.

    Raises LearnerError for a checkpoint of another run, policy or model, or of a newer format version; such a checkpoint is not
    damaged.
    """
    for path in reversed(list_checkpoints(folder)):
        try:
            manifest = verify(path, hashed=hashed)
        except DamagedError as error:
            log.warning(
                "checkpoint_damaged", path=str(path), reason=str(error), action="the checkpoint before it is used"
            )
            continue
        if difference := identity.difference(manifest.identity):
            raise SetUpError(
                f"{path}: the checkpoint is of another run, policy or model: {difference}; nothing was changed. "
                "Use another run name or folder"
            )
        return Checkpoint(path=path, version=manifest.version)
    return None


class DamagedError(Exception):
    """A checkpoint folder is incomplete or was changed; the message says where."""


def verify(path: Path, *, hashed: bool = True) -> Manifest:
    """Return the manifest of an undamaged checkpoint. Without `hashed`, files are compared by size alone.

    Raises DamagedError if a file differs, and LearnerError for a newer schema.
    """
    try:
        manifest = msgspec.json.decode((path / MANIFEST).read_bytes(), type=Manifest)
        if manifest.schema > SCHEMA:
            raise SetUpError(f"{path}: written by a newer swarmq (schema {manifest.schema}): upgrade swarmq")
        for name, file in manifest.files.items():
            if (path / name).stat().st_size != file.size or (hashed and sha256(path / name) != file.sha256):
                raise DamagedError(f"{name} is not as it was written")
    except OSError as error:
        raise DamagedError(f"{error.filename}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise DamagedError(f"{MANIFEST}: {error}") from error
    return manifest


def check_continues(folder: Path, lora: Lora | None) -> None:
    """Raise LearnerError if the settings `lora` differ from those with which the checkpoint's adapters were trained."""
    was = None
    if (file := folder / ADAPTER_FILE).is_file():
        with safe_open(file, framework="np") as opened:
            stored = (opened.metadata() or {}).get(ADAPTER_SETTINGS_KEY)
        was = msgspec.json.decode(stored, type=Lora) if stored else lora  # older checkpoints do not record it
    if was != lora:
        raise SetUpError(
            f"{folder} was trained with {_words(was)}, not with {_words(lora)}: restore that setting, or start another run "
            "from these weights (policies.<name>.model = this folder)"
        )


def _words(lora: Lora | None) -> str:
    if lora is None:
        return "no train.lora"
    modules = "" if lora.modules is None else f", modules = {list(lora.modules)}"
    return f"train.lora = {{rank = {lora.rank}, alpha = {lora.alpha:g}{modules}}}"


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoint folders, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir() and path.name[5:].isdecimal())


def version_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))
