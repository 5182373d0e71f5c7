"""Checkpoints: a folder that `from_pretrained` loads, and beside the weights all that continues the run exactly.

    <folder>/step-00000020/   config.json, model.safetensors, tokenizer files   Hugging Face's, FP32 weights
                              state/   accelerate's: optimizer (whole, also of ranks that share it out), random numbers
                              manifest.json   schema, identity, version, size and SHA-256 of every file

    draw ──> draft ──> training goes on
               └──> finish: weights and optimizer, checksums, fsync, rename, older ones removed; beside training

Written under a name that no other draft has, fsynced, then renamed: a folder of that name is whole. The newest one whose checksums
hold is used; one that is damaged is passed over, aloud. Nothing that is whole is replaced, and what is damaged goes when another
stands in its place. What cannot be removed stays, and is said once.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import msgspec
import structlog
import torch
from accelerate import Accelerator
from accelerate.checkpointing import load_accelerator_state, save_accelerator_state
from accelerate.utils import broadcast_object_list, gather_object
from safetensors import SafetensorError

from swarmq.errors import LearnerError, SetUpError
from swarmq.learner.checkpoint.discovery import (
    MANIFEST,
    Checkpoint,
    DamagedError,
    File,
    Manifest,
    all_of,
    check,
    version_of,
)
from swarmq.learner.checkpoint.model_files import HostCopies, ModelFiles, NotGrantedError, num_bytes, outlines
from swarmq.learner.distributed.sharding import WholeState, is_sharded
from swarmq.learner.memory import host
from swarmq.learner.memory.estimate import GIB, WHOLE_BYTES
from swarmq.learner.store.durable_files import DiskFullError, fsync_tree, map_os_errors, sha256
from swarmq.learner.store.records import SCHEMA, RunIdentity
from swarmq.runtime.files import fsync_folder
from swarmq.weights.format.packing import NamedTensors

log = structlog.get_logger()

STATE = "state"
OPTIMIZER = "optimizer.bin"
"""As accelerate calls it."""
DRAFT = ".draft-"
OLD = f"{DRAFT}old-"
"""What was a checkpoint, and is on its way out."""
TORCH_CANNOT_WRITE = ("inline_container", "iostream", "Parent directory")
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


class TrainerState(Protocol):
    """What a checkpoint needs of a trainer."""

    accelerator: Accelerator
    model: Any
    """The prepared (possibly wrapped or sharded) model."""
    optimizer: Any
    version: int
    """Weight version."""
    num_parameters: int

    def files(self, copies: HostCopies | None = None) -> ModelFiles | None:
        """Return the model's files on rank 0, None elsewhere; every rank calls it."""
        ...

    def weights_to_write(self) -> NamedTensors:
        """Return the weights that `files` writes."""
        ...


def save(folder: Path, trainer: TrainerState, identity: RunIdentity, *, model: str, keep: int) -> int:
    """Both, at once: on rank 0 the version of the oldest checkpoint kept. Every rank calls it. Raises LearnerError."""
    draft = draw(folder, trainer, identity, model=model)
    oldest = finish(draft, keep=keep) if trainer.accelerator.is_main_process else 0
    trainer.accelerator.wait_for_everyone()
    return oldest


class Draft(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint in the making, which a crash may still take away."""

    path: Path
    identity: RunIdentity
    version: int
    writing: tuple[Callable[[], None], ...] = ()
    """What puts the files there that are not there yet. On rank 0 alone."""
    whole: bool = False
    """There is a sound one of this version already, and nothing is to be written."""

    @property
    def target(self) -> Path:
        return self.path.with_name(f"step-{self.version:08d}")


def draw(
    folder: Path, trainer: TrainerState, identity: RunIdentity, *, model: str, copies: HostCopies | None = None
) -> Draft:
    """A draft of the trainer's state. Drafts that are there already are removed.

    Training may go on where there are `copies`: what they hold is written later, and what the host has no memory for is written
    now. Every rank calls it. Raises LearnerError when it cannot be written, DiskFullError where it can be tried again: on every
    rank, and then all checkpoints are as they were.
    """
    accelerator = trainer.accelerator
    draft = _begun(folder, trainer.version, identity, accelerator)
    if draft.whole:
        return draft
    writing: list[Callable[[], None]] = []
    with _agreed(accelerator, draft):
        state = _optimizer(trainer).state_dict()
        save_accelerator_state(str(draft.path / STATE), [], [], [], [], accelerator.process_index, accelerator.step)
        if accelerator.is_main_process:
            writing += _optimizer_written(state, draft.path / STATE / OPTIMIZER, trainer, copies)
        del state
    with _agreed(accelerator, draft):
        writing += _model_written(draft.path, trainer, copies, before=writing)
        if accelerator.is_main_process:
            copy_tokenizer(model, draft.path)
    return msgspec.structs.replace(draft, writing=tuple(writing))


def _begun(folder: Path, version: int, identity: RunIdentity, accelerator: Accelerator) -> Draft:
    """The same on every rank: nothing yet, in a folder of its own, for another learner of the same run may be writing, too."""
    path = folder / f"{DRAFT}step-{version:08d}-{secrets.token_hex(4)}"
    draft = Draft(path=path, identity=identity, version=version)
    with _agreed(accelerator, draft):
        if accelerator.is_main_process:
            clean(folder)
            draft = msgspec.structs.replace(draft, whole=_is_whole(draft))
            if not draft.whole:
                (path / STATE).mkdir(parents=True)
    same: list[Draft] = broadcast_object_list([draft])
    return same[0]


def _optimizer_written(
    state: Mapping[str, Any], file: Path, trainer: TrainerState, copies: HostCopies | None
) -> list[Callable[[], None]]:
    """Now, or by what is given back."""
    if copies is not None:
        if not (short := _short_of_room(copies, state, trainer)):
            try:
                return [partial(torch.save, state if is_sharded(trainer.model) else copies.of_optimizer(state), file)]
            except NotGrantedError as error:
                short = str(error)
        log.info("checkpoint_waited_for", what=short, consequence="the optimizer is written while training waits")
    torch.save(state, file)
    return []


def _model_written(
    folder: Path, trainer: TrainerState, copies: HostCopies | None, *, before: list[Callable[[], None]]
) -> list[Callable[[], None]]:
    """The same of the weights. `before`: what is to be written already, which is done now where it has the memory. Every rank calls it."""
    try:
        files = trainer.files(copies)
    except NotGrantedError as error:  # on the one rank that copies, with nobody to wait for it
        log.info("checkpoint_waited_for", what=str(error), consequence="all of it is written while training waits")
        while before:
            before.pop()()
        if (files := trainer.files()) is not None:
            files.write(folder)
        return []
    return [partial(files.write, folder)] if files is not None else []


def reserve(trainer: TrainerState, copies: HostCopies) -> Callable[[], None]:
    """What gets memory for the copies of the next checkpoint, as far as the host has room: beside training, so that none of it has to
    be waited for then. Rank 0 alone calls it."""
    if is_sharded(trainer.model):  # whose parts are gathered into other memory
        return lambda: None
    state = trainer.optimizer.state_dict()
    wanted = [] if _short_of_room(copies, state, trainer) else outlines(trainer.weights_to_write(), state)

    def get() -> None:
        with contextlib.suppress(NotGrantedError):  # the checkpoint asks again, and says so
            copies.reserve(wanted)

    return get


def _short_of_room(copies: HostCopies, state: Mapping[str, Any], trainer: TrainerState) -> str | None:
    """Why there is no room on the host for a copy of the optimizer's state and of the weights, and as much again for others."""
    moments = num_bytes(outlines((), state))
    gathered = moments if is_sharded(trainer.model) else 0  # which is there by now
    needed = moments + WHOLE_BYTES * trainer.num_parameters - copies.nbytes
    short = next((room for room in host.rooms() if room.free + gathered < 2 * needed), None)
    if short is None:
        return None
    return f"{(short.free + gathered) / GIB:.1f} GiB are free of {short.whose}, and a copy takes {needed / GIB:.1f}"


def finish(draft: Draft, *, keep: int, check: Callable[[], None] = lambda: None) -> int:
    """Make a checkpoint of a draft, remove all but the `keep` newest; the version of the oldest one kept.

    Rank 0 alone calls it; it needs no trainer. `check` may refuse, before each file and before any checkpoint is touched.
    Raises LearnerError when it cannot be written, DiskFullError where it can be tried again; then the ones before are as they were.
    """
    try:
        with _told(draft):
            if not draft.whole:
                _write(draft, check)
    except LearnerError:
        shutil.rmtree(draft.path, ignore_errors=True)  # the disk may be full of it
        raise
    return _prune(draft.path.parent, draft.version, keep)


def _write(draft: Draft, check: Callable[[], None]) -> None:
    for write in draft.writing:
        check()
        write()
    _seal(draft)
    check()
    _publish(draft)


def restore(trainer: TrainerState, checkpoint: Checkpoint) -> None:
    """Optimizer and random numbers; the weights are the trainer's already, loaded from `checkpoint.path`."""
    state = checkpoint.path / STATE
    if not (state / OPTIMIZER).is_file():
        raise SetUpError(
            f"{state}: the optimizer was saved in parts, one for each rank, by an earlier swarmq; resume with that version, "
            "or begin another run from the weights: policies.<name>.model = this checkpoint's folder"
        )
    load_accelerator_state(str(state), [], [_optimizer(trainer)], [], [], trainer.accelerator.process_index)
    trainer.version = checkpoint.version


def clean(folder: Path) -> None:
    """Remove drafts that a crash left. Only for the holder of the policy's lock."""
    for draft in folder.glob(f"{DRAFT}*"):
        _remove(draft)


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
def _agreed(accelerator: Accelerator, draft: Draft) -> Iterator[None]:
    """What one rank cannot do, each raises, and the draft is removed: the others would go on, and wait for that one for ever."""
    own: LearnerError | None = None
    try:
        with _told(draft):
            yield
    except LearnerError as error:
        own = error
    errors = [error for error in gather_object([own]) if error]
    if not errors:
        return
    if accelerator.is_main_process:
        shutil.rmtree(draft.path, ignore_errors=True)  # the disk may be full of it
    raise next((error for error in errors if not isinstance(error, DiskFullError)), errors[0])


@contextlib.contextmanager
def _told(draft: Draft) -> Iterator[None]:
    """Raises LearnerError for what keeps a draft from being written, also where torch and safetensors say so in errors of their
    own, neither of which tells a full disk from another."""
    with map_os_errors(draft.path.parent):
        try:
            yield
        except (OSError, SafetensorError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not any(word in str(error) for word in TORCH_CANNOT_WRITE):
                raise
            if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
                raise
            if not draft.path.is_dir():
                raise LearnerError(
                    f"{draft.path}: removed while the checkpoint was written ({error}): leave the folder to this learner and start "
                    "it again; the checkpoints before it and the batch log are as they were, nothing is lost"
                ) from error
            if isinstance(error, OSError):
                raise
            raise DiskFullError(
                f"{draft.path.parent}: the checkpoint cannot be written ({error}): free space there; the checkpoints before it "
                "and the batch log are as they were, nothing is lost"
            ) from error


def _is_whole(draft: Draft) -> bool:
    """Whether there is a sound checkpoint already of what is drawn."""
    try:
        return draft.target.is_dir() and not draft.identity.difference(check(draft.target).identity)
    except DamagedError:
        return False


def _optimizer(trainer: TrainerState) -> Any:
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
    damaged = _aside(draft.target) if draft.target.exists() else None  # were it whole, nothing would be written
    draft.path.rename(draft.target)
    fsync_folder(draft.path.parent)
    if damaged:
        _remove(damaged)


def _prune(folder: Path, version: int, keep: int) -> int:
    """Remove all but the `keep` newest up to `version`; that of the oldest one kept. Newer ones were passed over as damaged."""
    paths = [path for path in all_of(folder) if version_of(path) <= version]
    for path in paths[:-keep]:
        with _left(path):
            _remove(_aside(path))
    return version_of(paths[-keep:][0])


def _aside(path: Path) -> Path:
    """The checkpoint under a name that is none's."""
    return path.rename(path.with_name(f"{OLD}{path.name}-{secrets.token_hex(4)}"))


def _remove(path: Path) -> None:
    """As much of it as can be: somebody may have put files of his own there."""
    with _left(path):
        shutil.rmtree(path, ignore_errors=True)
        if path.exists():
            shutil.rmtree(path)


@contextlib.contextmanager
def _left(path: Path) -> Iterator[None]:
    """What cannot be removed is no reason to end."""
    try:
        yield
    except OSError as error:
        _say_left(path, f"{error.filename or path}: {error.strerror}")


@cache
def _say_left(path: Path, what: str) -> None:
    """Once, not at each checkpoint."""
    log.warning(
        "checkpoint_not_removed", path=str(path), what=what, consequence="it takes room until somebody removes it"
    )
