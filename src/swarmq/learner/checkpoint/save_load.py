"""Writes and restores checkpoints: folders that `from_pretrained` loads, with the state from which a run continues exactly.

  <folder>/step-00000020/   config.json, model.safetensors, tokenizer files   Hugging Face's, FP32 weights
                            state/   optimizer.bin: its whole state, even if ranks shard it; critic.bin, if there is a critic
                            manifest.json   schema, identity, version, size and SHA-256 of every file

  draft_checkpoint ──> draft ──> training goes on
                         └──> finish_checkpoint: weights and optimizer, checksums, fsync, rename, prune; beside training

A checkpoint is written under a unique draft name, fsynced, then renamed, so a folder of the final name is complete. The newest
one with valid checksums is used; damaged ones are skipped with a warning. Complete checkpoints are never replaced, and a damaged
one is removed when a new one takes its place. A folder that cannot be removed is left, with one warning.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
import structlog
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from safetensors import SafetensorError

from swarmq.errors import LearnerError, SetUpError
from swarmq.learner.checkpoint.discovery import (
    MANIFEST,
    Checkpoint,
    DamagedError,
    File,
    Manifest,
    list_checkpoints,
    verify,
    version_of,
)
from swarmq.learner.checkpoint.model_files import HostCopies, ModelFiles, NotGrantedError, num_bytes, outline_copies
from swarmq.learner.distributed.send_from_rank0 import send_optimizer_state
from swarmq.learner.distributed.sharding import gather_optimizer_state, is_sharded
from swarmq.learner.memory import host
from swarmq.learner.memory.estimate import GIB, WHOLE_BYTES
from swarmq.learner.memory.model_copies import copy_tokenizer
from swarmq.learner.model.attention_check import broadcast_from_rank0
from swarmq.learner.store.durable_files import DiskFullError, fsync_tree, map_os_errors, sha256
from swarmq.learner.store.records import SCHEMA, RunIdentity
from swarmq.runtime.files import fsync_folder
from swarmq.version import __version__
from swarmq.weights.format.packing import NamedTensors

log = structlog.get_logger()

STATE = "state"
OPTIMIZER = "optimizer.bin"
CRITIC = "critic.bin"
"""File of what is trained of the critic, which is small, and of its optimizer."""
DRAFT = ".draft-"
OLD = f"{DRAFT}old-"
"""Prefix of a checkpoint that is being removed."""
TORCH_CANNOT_WRITE = ("inline_container", "iostream", "Parent directory")
"""Texts in a RuntimeError of `torch.save` that mean a disk error; only the text distinguishes such an error."""


class TrainerState(Protocol):
    """Part of the trainer's interface that checkpoints use."""

    accelerator: Accelerator
    model: Any
    """The prepared (possibly wrapped or sharded) model."""
    optimizer: Any
    version: int
    """Weight version."""
    num_parameters: int

    def critic_state(self) -> dict[str, Any] | None:
        """Return what is trained of the critic, with tensors on rank 0 alone; None without critic. Every rank calls it."""
        ...

    def load_critic(self, saved: Mapping[str, Any]) -> None:
        """Load what `critic_state` returned on rank 0. Every rank calls it."""
        ...

    def files(self, copies: HostCopies | None = None) -> ModelFiles | None:
        """Return the model's files on rank 0, None elsewhere; every rank calls it."""
        ...

    def weights_to_write(self) -> NamedTensors:
        """Return the weights that are among the model's `files`."""
        ...


def save_checkpoint(folder: Path, trainer: TrainerState, identity: RunIdentity, *, model: str, keep: int) -> int:
    """Draft and finish a checkpoint. Returns, on rank 0, the version of the oldest checkpoint kept. Every rank calls it. Raises
    LearnerError."""
    draft = draft_checkpoint(folder, trainer, identity, model=model)
    oldest = finish_checkpoint(draft, keep=keep) if trainer.accelerator.is_main_process else 0
    trainer.accelerator.wait_for_everyone()
    return oldest


class CheckpointDraft(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that is being written and that a crash may lose."""

    path: Path
    identity: RunIdentity
    version: int
    writing: tuple[Callable[[], None], ...] = ()
    """Functions that write the missing files; empty on all ranks but rank 0."""
    whole: bool = False
    """Whether a valid checkpoint of this version exists, so that nothing is written."""

    @property
    def target(self) -> Path:
        return self.path.with_name(f"step-{self.version:08d}")


def draft_checkpoint(
    folder: Path, trainer: TrainerState, identity: RunIdentity, *, model: str, copies: HostCopies | None = None
) -> CheckpointDraft:
    """Draft a checkpoint of the trainer's state, after removing earlier drafts. Every rank calls it.

    With `copies`, training may go on afterwards: data is copied and written later, or written now if the host has no memory for a
    copy. Raises LearnerError on every rank if it cannot be written, DiskFullError if it can be tried again; earlier checkpoints
    are then unchanged.
    """
    accelerator = trainer.accelerator
    draft = _begin_draft(folder, trainer.version, identity, accelerator)
    if draft.whole:
        return draft
    writing: list[Callable[[], None]] = []
    with _fail_together(accelerator, draft):
        # both are gathered before rank 0 writes, because a write that fails leaves the block on rank 0 alone
        state, critic = _optimizer_state(trainer), trainer.critic_state()
        if accelerator.is_main_process:
            writing += _write_or_defer_optimizer(state, draft.path / STATE / OPTIMIZER, trainer, copies)
            if critic:
                torch.save(critic, draft.path / STATE / CRITIC)
        del state, critic
    with _fail_together(accelerator, draft):
        writing += _write_or_defer_model(draft.path, trainer, copies, before=writing)
        if accelerator.is_main_process:
            copy_tokenizer(model, draft.path)
    return msgspec.structs.replace(draft, writing=tuple(writing))


def _begin_draft(folder: Path, version: int, identity: RunIdentity, accelerator: Accelerator) -> CheckpointDraft:
    """Return an empty draft, the same on every rank, in a unique folder, because another learner of the run may be writing,
    too."""
    path = folder / f"{DRAFT}step-{version:08d}-{secrets.token_hex(4)}"
    draft = CheckpointDraft(path=path, identity=identity, version=version)
    with _fail_together(accelerator, draft):
        if accelerator.is_main_process:
            remove_drafts(folder)
            draft = msgspec.structs.replace(draft, whole=_is_whole(draft))
            if not draft.whole:
                (path / STATE).mkdir(parents=True)
    same: list[CheckpointDraft] = broadcast_object_list([draft])
    return same[0]


def _write_or_defer_optimizer(
    state: Mapping[str, Any], file: Path, trainer: TrainerState, copies: HostCopies | None
) -> list[Callable[[], None]]:
    """Write the optimizer's state now, or return the function that writes it."""
    if copies is not None:
        if not (short := _short_of_room(copies, state, trainer)):
            try:
                return [partial(torch.save, state if is_sharded(trainer.model) else copies.of_optimizer(state), file)]
            except NotGrantedError as error:
                short = str(error)
        log.info("checkpoint_waited_for", reason=short, action="the optimizer is written while training waits")
    torch.save(state, file)
    return []


def _write_or_defer_model(
    folder: Path, trainer: TrainerState, copies: HostCopies | None, *, before: list[Callable[[], None]]
) -> list[Callable[[], None]]:
    """Write the weights now, or return the function that writes them. Every rank calls it.

    `before`: functions that have yet to write other files; if memory for the weights is short, they are called first, because
    they hold copies.
    """
    try:
        files = trainer.files(copies)
    except NotGrantedError as error:  # only an unsharded model is copied, so no other rank waits in a collective
        log.info("checkpoint_waited_for", reason=str(error), action="all files are written while training waits")
        while before:
            before.pop()()
        if (files := trainer.files()) is not None:
            files.write(folder)
        return []
    return [partial(files.write, folder)] if files is not None else []


def reserve_copies(trainer: TrainerState, copies: HostCopies) -> Callable[[], None]:
    """Return a function that allocates memory for the next checkpoint's copies, as far as the host has room, to be called in
    another thread. Rank 0 alone calls it."""
    if is_sharded(trainer.model):  # gathering shards allocates memory of its own
        return lambda: None
    state = trainer.optimizer.state_dict()
    wanted = [] if _short_of_room(copies, state, trainer) else outline_copies(trainer.weights_to_write(), state)

    def get() -> None:
        with contextlib.suppress(NotGrantedError):  # the checkpoint tries again and logs it
            copies.reserve(wanted)

    return get


def _short_of_room(copies: HostCopies, state: Mapping[str, Any], trainer: TrainerState) -> str | None:
    """Return the reason if the host's free memory is less than twice what copies of optimizer state and weights take, else
    None."""
    moments = num_bytes(outline_copies((), state))
    gathered = moments if is_sharded(trainer.model) else 0  # the gathered state is already allocated
    needed = moments + WHOLE_BYTES * trainer.num_parameters - copies.nbytes
    short = next((room for room in host.measure_rooms() if room.free + gathered < 2 * needed), None)
    if short is None:
        return None
    return f"{(short.free + gathered) / GIB:.1f} GiB are free in {short.source}, but a copy takes {needed / GIB:.1f}"


def finish_checkpoint(draft: CheckpointDraft, *, keep: int, check: Callable[[], None] = lambda: None) -> int:
    """Complete a draft, remove all but the `keep` newest checkpoints, and return the version of the oldest one kept.

    Rank 0 alone calls it, without a trainer. `check`: called before each write and before the final rename; raises
    to end the work.
    Raises LearnerError if it cannot be written, DiskFullError if it can be tried again; earlier checkpoints are then unchanged.
    """
    try:
        with _explain_write_errors(draft):
            if not draft.whole:
                _write(draft, check)
    except LearnerError:
        shutil.rmtree(draft.path, ignore_errors=True)  # because it may fill the disk
        raise
    return _prune(draft.path.parent, draft.version, keep)


def _write(draft: CheckpointDraft, check: Callable[[], None]) -> None:
    for write in draft.writing:
        check()
        write()
    _seal(draft)
    check()
    _publish(draft)


def restore(trainer: TrainerState, checkpoint: Checkpoint) -> None:
    """Restore optimizer and critic on every rank from the files that rank 0 reads. The trainer's weights were already loaded from
    `checkpoint.path`. Every rank calls it."""
    saved = _read_optimizer(checkpoint.path / STATE) if trainer.accelerator.is_main_process else None
    if saved is not None:
        _check_same_optimizer(saved, trainer, checkpoint)
    send_optimizer_state(trainer.optimizer, saved, trainer.accelerator.device)
    critic = broadcast_from_rank0(
        _read_critic(checkpoint.path / STATE) if trainer.accelerator.is_main_process else None
    )
    if critic is not None:
        trainer.load_critic(critic)
    trainer.version = checkpoint.version


def _check_same_optimizer(saved: Mapping[str, Any], trainer: TrainerState, checkpoint: Checkpoint) -> None:
    """Raise SetUpError if the state is that of another optimizer. Checkpoints of earlier versions do not name theirs, AdamW."""
    before, now = (
        groups[0].get("method", "adamw") for groups in (saved["param_groups"], trainer.optimizer.param_groups)
    )
    if before != now:
        raise SetUpError(
            f"train.optimizer is {now!r}, but the checkpoint {checkpoint.path} continues {before!r}: set it back, or begin another run "
            "from the weights: policies.<name>.model = this checkpoint's folder"
        )


def _read_optimizer(state: Path) -> dict[str, Any]:
    if not (state / OPTIMIZER).is_file():
        raise SetUpError(
            f"{state}: the optimizer was saved in parts, one for each rank, by an earlier swarmq; resume with that version, "
            "or begin another run from the weights: policies.<name>.model = this checkpoint's folder"
        )
    saved: dict[str, Any] = torch.load(state / OPTIMIZER, map_location="cpu", weights_only=True)
    return saved


def _read_critic(state: Path) -> dict[str, Any] | None:
    """Return the critic's state, or None for a checkpoint of a policy without critic."""
    if not (state / CRITIC).is_file():
        return None
    saved: dict[str, Any] = torch.load(state / CRITIC, map_location="cpu", weights_only=True)
    return saved


def remove_drafts(folder: Path) -> None:
    """Remove drafts that a crash left. Only the holder of the policy's lock may call it."""
    for draft in folder.glob(f"{DRAFT}*"):
        _remove(draft)


@contextlib.contextmanager
def _fail_together(accelerator: Accelerator, draft: CheckpointDraft) -> Iterator[None]:
    """Raise an error of one rank on every rank, so that none waits forever, and remove the draft."""
    own: LearnerError | None = None
    try:
        with _explain_write_errors(draft):
            yield
    except LearnerError as error:
        own = error
    errors = [error for error in gather_object([own]) if error]
    if not errors:
        return
    if accelerator.is_main_process:
        shutil.rmtree(draft.path, ignore_errors=True)  # because it may fill the disk
    raise next((error for error in errors if not isinstance(error, DiskFullError)), errors[0])


@contextlib.contextmanager
def _explain_write_errors(draft: CheckpointDraft) -> Iterator[None]:
    """Map errors of writing a draft to LearnerError. Errors of torch and safetensors do not distinguish a full disk from
    others."""
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
                    f"{draft.path}: removed while the checkpoint was written ({error}): let no other process change the folder, "
                    "and start the learner again; earlier checkpoints and the batch log are unchanged, so nothing is lost"
                ) from error
            if isinstance(error, OSError):
                raise
            raise DiskFullError(
                f"{draft.path.parent}: the checkpoint cannot be written ({error}): free space there; earlier checkpoints "
                "and the batch log are unchanged, nothing is lost"
            ) from error


def _is_whole(draft: CheckpointDraft) -> bool:
    """Return whether a valid checkpoint of this version exists."""
    try:
        return draft.target.is_dir() and not draft.identity.difference(verify(draft.target).identity)
    except DamagedError:
        return False


def _optimizer_state(trainer: TrainerState) -> dict[str, Any]:
    """Return the optimizer's state as a single process would have it, gathered from all ranks."""
    if is_sharded(trainer.model):
        return gather_optimizer_state(trainer.optimizer, keep=trainer.accelerator.is_main_process)
    state: dict[str, Any] = trainer.optimizer.state_dict()
    return state


def _seal(draft: CheckpointDraft) -> None:
    path = draft.path
    names = sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())
    manifest = Manifest(
        schema=SCHEMA,
        identity=draft.identity,
        version=draft.version,
        files={name: File(size=(path / name).stat().st_size, sha256=sha256(path / name)) for name in names},
        written_at=time.time(),
        swarmq=__version__,
    )
    (path / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2))
    fsync_tree(path)


def _publish(draft: CheckpointDraft) -> None:
    # an existing checkpoint of this version is damaged, otherwise nothing would be written
    damaged = _aside(draft.target) if draft.target.exists() else None
    draft.path.rename(draft.target)
    fsync_folder(draft.path.parent)
    if damaged:
        _remove(damaged)


def _prune(folder: Path, version: int, keep: int) -> int:
    """Remove all but the `keep` newest checkpoints up to `version`, and return the version of the oldest one kept. Checkpoints
    newer than `version` were skipped as damaged."""
    paths = [path for path in list_checkpoints(folder) if version_of(path) <= version]
    for path in paths[:-keep]:
        with _keep_on_failure(path):
            _remove(_aside(path))
    return version_of(paths[-keep:][0])


def _aside(path: Path) -> Path:
    """Rename a checkpoint to a unique name and return the new path."""
    return path.rename(path.with_name(f"{OLD}{path.name}-{secrets.token_hex(4)}"))


def _remove(path: Path) -> None:
    """Remove as much of the folder as possible; it may contain files of other users."""
    with _keep_on_failure(path):
        shutil.rmtree(path, ignore_errors=True)
        if path.exists():
            shutil.rmtree(path)


@contextlib.contextmanager
def _keep_on_failure(path: Path) -> Iterator[None]:
    """Warn, instead of raising, if the block cannot remove `path`."""
    try:
        yield
    except OSError as error:
        _warn_not_removed(path, f"{error.filename or path}: {error.strerror}")


@cache
def _warn_not_removed(path: Path, what: str) -> None:
    """Warn once about a path that cannot be removed."""
    log.warning("checkpoint_not_removed", path=str(path), reason=what, action="remove it to free disk space")
