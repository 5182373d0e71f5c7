"""Checkpoints: a folder that `from_pretrained` loads, and beside the weights all that continues the run exactly.

    <folder>/step-00000020/   config.json, model.safetensors, tokenizer files   Hugging Face's, FP32 weights
                              state/   accelerate's: optimizer (whole, also of ranks that share it out), random numbers
                              manifest.json   schema, identity, version, size and SHA-256 of every file

    draw ──> draft ──> training goes on
               └──> finish: weights and optimizer, checksums, fsync, rename, older ones removed; beside training

Written under another name, fsynced, then renamed: a folder of that name is whole. The newest one whose checksums
hold is used; one that is damaged is passed over, aloud.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import structlog
import torch
from accelerate.checkpointing import load_accelerator_state, save_accelerator_state
from safetensors import SafetensorError

from swarmq.errors import SetUpError
from swarmq.learner import host
from swarmq.learner.files import DiskFullError, fsync_folder, fsync_tree, mapped, sha256
from swarmq.learner.memory import GIB, WHOLE_BYTES
from swarmq.learner.model_files import HostCopies, num_bytes, outlines
from swarmq.learner.records import SCHEMA, Identity
from swarmq.learner.sharding import WholeState, is_sharded
from swarmq.learner.trainer import Trainer

log = structlog.get_logger()

MANIFEST = "manifest.json"
STATE = "state"
OPTIMIZER = "optimizer.bin"
"""As accelerate calls it."""
DRAFT = ".draft-"
TORCH_CANNOT_WRITE = ("inline_container", "iostream")
"""What stands in a RuntimeError of `torch.save` that is one of the disk; it gives no other sign."""
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.jinja",
    "*.model",
)


class File(msgspec.Struct, frozen=True, kw_only=True):
    size: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    schema: int
    identity: Identity
    version: int
    """Weight version; the batch log goes on after it."""
    files: dict[str, File]
    written_at: float
    swarmq: str


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that was found and checked."""

    path: Path
    version: int


def save(folder: Path, trainer: Trainer, identity: Identity, *, model: str, keep: int) -> int:
    """Both, at once: on rank 0 the version of the oldest checkpoint kept. Every rank calls it. Raises LearnerError."""
    draft = draw(folder, trainer, identity, model=model)
    oldest = finish(draft, keep=keep) if trainer.accelerator.is_main_process else 0
    trainer.accelerator.wait_for_everyone()
    return oldest


class Draft(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint in the making, which a crash may still take away."""

    path: Path
    identity: Identity
    version: int
    writing: tuple[Callable[[], None], ...]
    """What puts the files there that are not there yet. On rank 0 alone."""

    @property
    def target(self) -> Path:
        return self.path.with_name(self.path.name.removeprefix(DRAFT))


def draw(folder: Path, trainer: Trainer, identity: Identity, *, model: str, copies: HostCopies | None = None) -> Draft:
    """A draft of the trainer's state. Drafts that are there already are removed.

    Training may go on where there are `copies`: what they hold is written later, and the optimizer's state is written now where the
    host has no room for it. Every rank calls it. Raises LearnerError when it cannot be written; then all checkpoints are as they
    were.
    """
    accelerator = trainer.accelerator
    draft = folder / f"{DRAFT}step-{trainer.version:08d}"
    writing: list[Callable[[], None]] = []
    with mapped(folder), _drafting(draft):
        if accelerator.is_main_process:
            clean(folder)
            draft.mkdir(parents=True)
            (draft / STATE).mkdir()
        accelerator.wait_for_everyone()
        save_accelerator_state(str(draft / STATE), [], [], [], [], accelerator.process_index, accelerator.step)
        state = _optimizer(trainer).state_dict()
        if accelerator.is_main_process:
            if copies is None or (short := _short_of_room(copies, state, trainer)):
                if copies:
                    log.info(
                        "checkpoint_waited_for", what=short, consequence="the optimizer is written while training waits"
                    )
                torch.save(state, draft / STATE / OPTIMIZER)
            else:
                own = state if is_sharded(trainer.model) else copies.of_optimizer(state)
                writing.append(partial(torch.save, own, draft / STATE / OPTIMIZER))
        del state
        files = trainer.files(copies)
        if files is not None:
            writing.append(partial(files.write, draft))
            copy_tokenizer(model, draft)
        accelerator.wait_for_everyone()
    return Draft(path=draft, identity=identity, version=trainer.version, writing=tuple(writing))


def reserve(trainer: Trainer, copies: HostCopies) -> Callable[[], None]:
    """What gets memory for the copies of the next checkpoint, as far as the host has room: beside training, so that none of it has to
    be waited for then. Rank 0 alone calls it."""
    if is_sharded(trainer.model):  # whose parts are gathered into other memory
        return lambda: None
    state = trainer.optimizer.state_dict()
    wanted = [] if _short_of_room(copies, state, trainer) else outlines(trainer.weights_to_write(), state)
    return partial(copies.reserve, wanted)


def _short_of_room(copies: HostCopies, state: Mapping[str, Any], trainer: Trainer) -> str | None:
    """Why there is no room on the host for a copy of the optimizer's state and of the weights, and as much again for others."""
    needed = num_bytes(outlines((), state)) + WHOLE_BYTES * trainer.num_parameters - copies.nbytes
    short = next((room for room in host.rooms() if room.free < 2 * needed), None)
    if short is None:
        return None
    return f"{short.free / GIB:.1f} GiB are free of {short.whose}, and a copy takes {needed / GIB:.1f}"


def finish(draft: Draft, *, keep: int, check: Callable[[], None] = lambda: None) -> int:
    """Make a checkpoint of a draft, remove all but the `keep` newest; the version of the oldest one kept.

    Rank 0 alone calls it; it needs no trainer. `check` may refuse, before each file and before any checkpoint is touched.
    Raises LearnerError when it cannot be written; then the ones before are as they were.
    """
    with mapped(draft.path.parent), _drafting(draft.path):
        for write in draft.writing:
            check()
            write()
        _seal(draft)
        check()
        _publish(draft)
        return _prune(draft.path.parent, keep)


def newest(folder: Path, identity: Identity) -> Checkpoint | None:
    """The newest sound checkpoint, if any.

    Raises LearnerError when one is of another run, policy or model, or from a newer swarmq: that is no damage.
    """
    for path in reversed(_all(folder)):
        try:
            manifest = check(path)
        except DamagedError as error:
            log.warning("checkpoint_damaged", path=str(path), what=str(error), consequence="the one before is used")
            continue
        if difference := identity.difference(manifest.identity):
            raise SetUpError(
                f"{path}: the checkpoint belongs to something else: {difference}; nothing was changed. "
                "Use another run name or folder"
            )
        return Checkpoint(path=path, version=manifest.version)
    return None


def restore(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Optimizer and random numbers; the weights are the trainer's already, loaded from `checkpoint.path`."""
    state = checkpoint.path / STATE
    if not (state / OPTIMIZER).is_file():
        raise SetUpError(
            f"{state}: the optimizer was saved in parts, one for each rank, by an earlier swarmq; resume with that version, "
            "or begin another run from the weights: policies.<name>.model = this checkpoint's folder"
        )
    load_accelerator_state(str(state), [], [_optimizer(trainer)], [], [], trainer.accelerator.process_index)
    trainer.version = checkpoint.version


class DamagedError(Exception):
    """A checkpoint folder is incomplete or was changed; the message says where."""


def check(path: Path) -> Manifest:
    """The manifest, when every file is as it was written. Raises DamagedError; LearnerError for a newer schema."""
    try:
        manifest = msgspec.json.decode((path / MANIFEST).read_bytes(), type=Manifest)
        if manifest.schema > SCHEMA:
            raise SetUpError(f"{path}: written by a newer swarmq (schema {manifest.schema}): upgrade swarmq")
        for name, file in manifest.files.items():
            if (path / name).stat().st_size != file.size or sha256(path / name) != file.sha256:
                raise DamagedError(f"{name} is not as it was written")
    except OSError as error:
        raise DamagedError(f"{error.filename}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise DamagedError(f"{MANIFEST}: {error}") from error
    return manifest


def clean(folder: Path) -> None:
    """Remove drafts that a crash left. Only for the holder of the policy's lock."""
    for draft in folder.glob(f"{DRAFT}*"):
        shutil.rmtree(draft)


def copy_tokenizer(model: str, folder: Path) -> None:
    """Put the tokenizer's files beside the weights, unchanged where the model is a folder."""
    if Path(model).is_dir():
        for pattern in TOKENIZER_FILES:
            for file in Path(model).glob(pattern):
                shutil.copyfile(file, folder / file.name)
        return
    from transformers import AutoTokenizer  # noqa: PLC0415  (seldom needed and slow to import)

    AutoTokenizer.from_pretrained(model).save_pretrained(folder)


@contextlib.contextmanager
def _drafting(draft: Path) -> Iterator[None]:
    """A draft that cannot be finished is removed, since the disk may be full of it. Raises LearnerError where torch
    and safetensors say so in errors of their own, neither of which tells a full disk from another."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(word in str(error) for word in TORCH_CANNOT_WRITE):
            raise
        shutil.rmtree(draft, ignore_errors=True)
        if isinstance(error, OSError):
            raise
        raise DiskFullError(
            f"{draft.parent}: the checkpoint cannot be written ({error}): free space there and start again; "
            "the checkpoints before it and the batch log are as they were, nothing is lost"
        ) from error


def _optimizer(trainer: Trainer) -> Any:
    """Its state is that of one process, whatever the ranks hold of it."""
    if is_sharded(trainer.model):
        return WholeState(trainer.optimizer, keep=trainer.accelerator.is_main_process)
    return trainer.optimizer


def _seal(draft: Draft) -> None:
    path = draft.path
    names = sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())
    manifest = Manifest(
        schema=SCHEMA,
        identity=draft.identity,
        version=draft.version,
        files={name: File(size=(path / name).stat().st_size, sha256=sha256(path / name)) for name in names},
        written_at=time.time(),
        swarmq=metadata.version("swarmq"),
    )
    (path / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2))
    fsync_tree(path)


def _publish(draft: Draft) -> None:
    target = draft.target
    if target.exists():  # damaged, else we would not be making it again
        shutil.rmtree(target.rename(target.with_name(f"{DRAFT}damaged-{target.name}")))
    draft.path.rename(target)
    fsync_folder(target.parent)


def _prune(folder: Path, keep: int) -> int:
    paths = _all(folder)
    for path in paths[:-keep]:
        shutil.rmtree(path.rename(path.with_name(f"{DRAFT}old-{path.name}")))
    return int(paths[-keep:][0].name.removeprefix("step-"))


def _all(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step-*") if path.is_dir())
