"""Supervised warm start: a model learns the format of answers from demonstrations, before reinforcement learning.

  demonstrations (JSON lines of chats) --template--> turns --fold, pack--> the trainer's own steps with the `sft` loss --> folder

The assistant's messages are trained as if the model had sampled them after the prompt that the chat template renders from the
messages before. Folding, sharding, accumulation and memory limits therefore work as in training. Under `accelerate launch` every
process is a rank.
"""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
from safetensors import SafetensorError

from swarmq.config import Loss, Train, is_own_method
from swarmq.errors import LearnerError, TaskError
from swarmq.learner.demonstrations import find_ends, load_tokenizer, longest_call, read_demonstrations
from swarmq.learner.distributed.processes import is_main
from swarmq.learner.memory.outline import load_config
from swarmq.learner.store.durable_files import map_os_errors
from swarmq.learner.store.records import BatchIndex, BatchRecord
from swarmq.learner.store.writer_lock import hold_lock
from swarmq.learner.train.trainer import Trainer
from swarmq.messages import Rollout

RATE = 2e-5
"""Learning rate of a warm start, whatever the run's learning rate: supervised training tolerates far larger steps than a policy
gradient."""
ADAPTERS_RATE = 2e-4
"""Learning rate of a warm start with adapters, which tolerate still larger steps."""
RISE = 10
"""The learning rate warms up over at most 1 / RISE of the steps."""


class WarmStart(msgspec.Struct, frozen=True, kw_only=True):
    """Plan of a warm start."""

    model: str
    demonstrations: Path
    """JSON lines, as `read_demonstrations` reads them."""
    out: Path
    """New folder that every engine and learner can load."""
    max_model_len: int | None = None
    """Context length of the engine that will serve the model; None: the model's own."""
    train: Train
    """Optimizer, precision, sharding and micro-batch size. The loss is always `sft`. Settings that compare with an engine are
    ignored, because no engine sampled the tokens."""
    epochs: int = 1
    batch: int = 32
    """Number of demonstrations in an optimizer step."""


class WarmStartProgress(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    steps: int
    loss: float
    """Mean negative log-probability of the assistant's tokens, in nats."""
    left_out: int
    """Number of demonstrations longer than `max_length`."""
    max_length: int
    """Maximum length of a demonstration in tokens, set by the model and by `train.micro_batch_tokens`."""


def warm(plan: WarmStart, report: Callable[[WarmStartProgress], None]) -> None:
    """Train the model and write `out`; rank 0 calls `report` after every step. Raises TaskError for unusable demonstrations, and
    LearnerError for an unusable model, a skipped step, or if `out` cannot be written."""
    if plan.out.exists():
        raise TaskError(f"{plan.out} exists already: name a new folder")
    config = load_config(plan.model)  # checked first, because it gives the clearest error for an unusable model
    tokenizer = load_tokenizer(plan.model)
    episodes = list(read_demonstrations(plan.demonstrations, tokenizer, ends=find_ends(plan.model, config)))
    if not episodes:
        raise TaskError(f"{plan.demonstrations}: the file has no demonstrations")
    with _draft(plan.out) as draft:
        trainer = Trainer(plan.model, _supervise(plan.train), max_model_len=plan.max_model_len)
        if is_main():
            _check_room(draft, 4 * trainer.num_parameters)
        _train(trainer, episodes, plan, report if is_main() else lambda _: None)
        try:
            trainer.save_weights(draft)
            if is_main():
                tokenizer.save_pretrained(draft)
        except (OSError, SafetensorError) as error:
            raise LearnerError(f"{plan.out} cannot be written ({error}): free space there, and start again") from error


@contextlib.contextmanager
def _draft(out: Path) -> Iterator[Path]:
    """Provide a folder that is renamed to `out` on success. Raises LearnerError if it cannot be created, or if another process
    creates `out`."""
    workshop = out.with_name(f".{out.name}.partial")
    draft = workshop / "model"
    if not is_main():
        yield draft
        return
    with hold_lock(workshop / "lock"):
        with map_os_errors(draft):
            shutil.rmtree(draft, ignore_errors=True)  # a killed process may have left it
            draft.mkdir()
        try:
            yield draft
        except BaseException:
            shutil.rmtree(workshop, ignore_errors=True)
            raise
        try:
            draft.rename(out)
        except OSError as error:
            raise TaskError(f"{out} cannot be created ({error.strerror}): the trained model is in {draft}") from error
        shutil.rmtree(workshop)


def _check_room(folder: Path, needed: int) -> None:
    """Raise LearnerError if the disk has less than `needed` bytes free, before anything is trained."""
    if (free := shutil.disk_usage(folder).free) < needed:
        raise LearnerError(
            f"{folder}: {free / 1e9:.3g} GB are free, but the model takes {needed / 1e9:.3g} GB: free space, or name another folder"
        )


def _train(
    trainer: Trainer, episodes: list[Rollout], plan: WarmStart, report: Callable[[WarmStartProgress], None]
) -> None:
    short = [episode for episode in episodes if longest_call(episode) <= trainer.max_length]
    if not short:
        raise TaskError(
            f"{plan.demonstrations}: every demonstration is longer than {trainer.max_length} tokens, the limit set by the model's "
            "context and by train.micro_batch_tokens"
        )
    batches = list(_batches(short, plan, seed=trainer.train.seed))
    rise = min(trainer.train.warmup_steps, len(batches) // RISE)
    train = msgspec.structs.replace(trainer.train, warmup_steps=rise)
    for number, batch in enumerate(batches, start=1):
        index = BatchIndex(record=number, version=number)
        fields = trainer.step(BatchRecord(index=index, episodes=tuple(batch), settings=train))
        if skipped := fields.get("skipped"):
            raise LearnerError(
                f"step {number} of {len(batches)} changed nothing ({skipped}), and {plan.out} is not written: "
                f"try a smaller learning_rate than {train.learning_rate:g}, or other demonstrations"
            )
        report(
            WarmStartProgress(
                step=number,
                steps=len(batches),
                loss=-fields["logprob"],
                left_out=len(episodes) - len(short),
                max_length=trainer.max_length,
            )
        )


def _supervise(train: Train) -> Train:
    return msgspec.structs.replace(
        train,
        loss=Loss(name="sft"),
        teacher=None,
        teacher_tokenizer=None,
        reference=None,
        row_k3_max=0.0,
        ratio_band=None,
        steps_per_batch=1,
        token_log=False,
        sft=None,
        schedule="constant",
        advantage="rloo",
        advantages={},
        grouping="slot",
        reward_transform=None,
        token_filter=None,
        optimizer="adamw" if is_own_method(train.optimizer) else train.optimizer,
    )


def _batches(episodes: Sequence[Rollout], plan: WarmStart, *, seed: int) -> Iterator[list[Rollout]]:
    dice = random.Random(seed)
    for _ in range(plan.epochs):
        order = dice.sample(list(episodes), len(episodes))
        yield from (order[at : at + plan.batch] for at in range(0, len(order), plan.batch))
