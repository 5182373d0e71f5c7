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
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError

from swarmq.config import Loss, Train, is_own_method
from swarmq.errors import LearnerError, TaskError
from swarmq.learner.distributed.processes import is_main
from swarmq.learner.memory.outline import load_config
from swarmq.learner.store.durable_files import map_os_errors
from swarmq.learner.store.records import BatchIndex, BatchRecord
from swarmq.learner.store.writer_lock import hold_lock
from swarmq.learner.train.trainer import Trainer
from swarmq.messages import Rollout, Slot, Turn, VersionSpan, pack_floats, pack_ids

WARM_START = "warm"
"""Name of run and policy in records of a warm start, which belong to no run."""
RATE = 2e-5
"""Learning rate of a warm start, whatever the run's learning rate: supervised training tolerates far larger steps than a policy
gradient."""
ADAPTERS_RATE = 2e-4
"""Learning rate of a warm start with adapters, which tolerate still larger steps."""
RISE = 10
"""The learning rate warms up over at most 1 / RISE of the steps."""
ROLES = {"system", "user", "assistant", "tool"}
"""Roles that chat templates know."""


class ChatDemonstration(msgspec.Struct, frozen=True):
    """A demonstration as stored in the file."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


class WarmStart(msgspec.Struct, frozen=True, kw_only=True):
    """Plan of a warm start."""

    model: str
    demonstrations: Path
    """JSON lines, each with `messages` as in chat completions, and `tools` if the assistant has any."""
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
    tokenizer = _tokenizer(plan.model)
    episodes = list(read_demonstrations(plan.demonstrations, tokenizer, ends=_ends(plan.model, config)))
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
        reference=None,
        row_k3_max=0.0,
        ratio_band=None,
        steps_per_batch=1,
        token_log=False,
        schedule="constant",
        advantage="rloo",
        advantages={},
        optimizer="adamw" if is_own_method(train.optimizer) else train.optimizer,
    )


def read_demonstrations(path: Path, tokenizer: Any, *, ends: Collection[int] = ()) -> Iterator[Rollout]:
    """Yield one episode per line. Raises TaskError that names file and line."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # JSON strings may hold other line separators
    except OSError as error:
        raise TaskError(f"{path} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise TaskError(f"{path}: not UTF-8 text: {error}") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield parse_demonstration(line, tokenizer, where=f"{path}, line {number}", ends=ends)


def parse_demonstration(line: str, tokenizer: Any, *, where: str, ends: Collection[int] = ()) -> Rollout:
    """Return an episode with one turn per assistant message; its prompt is what the chat template renders before that message.

    `ends`: tokens that end an answer, besides the tokenizer's end token. Raises TaskError, which begins with `where`.
    """
    try:
        chat = msgspec.json.decode(line, type=ChatDemonstration)
    except msgspec.MsgspecError as error:
        raise TaskError(f'{where}: not a JSON object with "messages" ({error})') from error
    spelling = _Spelling(tokenizer, chat, where)
    turns: list[Turn] = []
    for at, message in enumerate(chat.messages):
        if (role := message.get("role")) not in ROLES and spelling.leaves_out(at):
            raise TaskError(f"{where}: the chat template ignores message {at}, because its role is {role!r}")
        if role == "assistant":
            asked, sampled = _split(tokenizer, *spelling.around(at))
            answer = _cut_after_end(tokenizer, sampled, {tokenizer.eos_token_id, *ends})
            turns.append(_turn(where, len(turns), asked, answer))
    if not turns:
        raise TaskError(f"{where}: it has no message of the assistant")
    return Rollout(
        run=WARM_START,
        policy=WARM_START,
        episode_id=where,
        slot=Slot(task_id=where, repeat=0),
        kind=WARM_START,
        group_id=where,
        group_members=1,
        group_size=1,
        reward=1.0,
        turns=tuple(turns),
    )


class _Spelling:
    """A chat, rendered by the model's template. Raises TaskError if the template fails."""

    def __init__(self, tokenizer: Any, chat: ChatDemonstration, where: str) -> None:
        self._tokenizer, self._chat, self._where = tokenizer, chat, where

    def around(self, at: int) -> tuple[str, str]:
        """Return the prompt for the message with index `at`, and the prompt followed by the message."""
        messages = self._chat.messages
        prompt, whole = self._spelled(messages[:at], prompt=True), self._spelled(messages[: at + 1], prompt=False)
        if not whole.startswith(prompt):
            raise TaskError(
                f"{self._where}: the chat template does not render message {at} as a continuation of its generation prompt: {whole[-80:]!r}"
            )
        return prompt, whole

    def leaves_out(self, at: int) -> bool:
        """Return whether the template ignores the message with index `at`."""
        messages = self._chat.messages
        rest = messages[:at] + messages[at + 1 :]
        try:
            return self._spelled(messages, prompt=False) == self._spelled(rest, prompt=False)
        except TaskError:  # the template fails without the message, so it does not ignore it
            return False

    def _spelled(self, some: list[dict[str, Any]], *, prompt: bool) -> str:
        options = {"tools": self._chat.tools, "add_generation_prompt": prompt, "tokenize": False}
        try:
            return str(self._tokenizer.apply_chat_template(some, **options))
        except Exception as error:  # templates may raise any exception
            raise TaskError(
                f"{self._where}: the chat template cannot render the first {len(some)} messages: {error}"
            ) from error


def longest_call(episode: Rollout) -> int:
    """Return the number of tokens of the episode's longest model call, prompt and answer together."""
    return max(turn.num_prompt + turn.num_sampled for turn in episode.turns)


def _turn(where: str, number: int, prompt: list[int], sampled: list[int]) -> Turn:
    return Turn(
        run=WARM_START,
        episode_id=where,
        policy=WARM_START,
        call_id=str(number),
        request_id=str(number),
        prompt_ids=pack_ids(prompt),
        sampled_ids=pack_ids(sampled),
        logprobs=pack_floats([0.0] * len(sampled)),
        versions=(VersionSpan(version=0, start=0, end=len(sampled)),),
    )


def _split(tokenizer: Any, prompt: str, whole: str) -> tuple[list[int], list[int]]:
    """Return the tokens of the prompt and of the text after it. Both are encoded together, because some tokenizers put a space
    before the first word of a text."""
    asked, ids = _ids(tokenizer, prompt), _ids(tokenizer, whole)
    if ids[: len(asked)] == asked:
        return asked, ids[len(asked) :]
    return asked, _ids(tokenizer, whole[len(prompt) :])


def _cut_after_end(tokenizer: Any, sampled: list[int], ends: Collection[int]) -> list[int]:
    """Return the tokens up to and including the end of the turn; a model never samples what the template writes after it."""
    if (end := next((at for at, token in enumerate(sampled, start=1) if token in ends), None)) is not None:
        return sampled[:end]
    # a base model names no end-of-turn token, but its template writes one, followed by white space
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    last = max((at for at, token in enumerate(sampled, start=1) if token in special), default=len(sampled))
    return sampled if tokenizer.decode(sampled[last:]).strip() else sampled[:last]


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def _tokenizer(model: str) -> Any:
    from transformers import AutoTokenizer  # noqa: PLC0415 - slow to import

    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise TaskError(f"model {model}: its tokenizer cannot be loaded: {error}") from error
    if not tokenizer.chat_template:
        raise TaskError(f"model {model}: its tokenizer has no chat template, so demonstrations cannot be rendered")
    return tokenizer


def _ends(model: str, config: Any) -> set[int]:
    """Return the tokens at which engines end an answer, besides the tokenizer's end token."""
    from transformers import GenerationConfig  # noqa: PLC0415 - slow to import

    try:
        named = GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:  # the model has no such file
        named = GenerationConfig.from_model_config(config).eos_token_id
    return set(named if isinstance(named, list) else [] if named is None else [named])


def _batches(episodes: Sequence[Rollout], plan: WarmStart, *, seed: int) -> Iterator[list[Rollout]]:
    dice = random.Random(seed)
    for _ in range(plan.epochs):
        order = dice.sample(list(episodes), len(episodes))
        yield from (order[at : at + plan.batch] for at in range(0, len(order), plan.batch))
