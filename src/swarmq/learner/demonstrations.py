"""Demonstrations: conversations whose answers are trained as if the model had sampled them. A warm start trains them before a run, and
`train.sft` beside a run's batches.

  JSON lines ──chat template, tokenizer──> episodes ──draw by step and seed──> batch record
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from swarmq.config import Train
from swarmq.errors import SetUpError, TaskError, TimelineError
from swarmq.messages import Rollout, Slot, Turn, VersionSpan, pack_floats, pack_ids
from swarmq.timeline import resolve

DEMONSTRATION = "demonstration"
"""Name of run, policy and kind in the records of demonstrations, which belong to no run."""
ROLES = {"system", "user", "assistant", "tool"}
"""Roles that chat templates know."""


class Demonstration(msgspec.Struct, frozen=True):
    """A demonstration as stored in the file: `messages`, or `prompt` and `completion`, as TRL has them."""

    messages: list[dict[str, Any]] | None = None
    """A conversation, whose assistant's messages are all trained."""
    prompt: str | list[dict[str, Any]] | None = None
    completion: str | list[dict[str, Any]] | None = None
    """What follows the prompt: messages, of which the assistant's are trained; or a text, which is trained up to the end token that is
    added to it. Texts pass no chat template."""
    tools: list[dict[str, Any]] | None = None


class ChatDemonstration(msgspec.Struct, frozen=True):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    first: int
    """Index of the first message that may be trained."""


def load_demonstrations(model: str, train: Train) -> tuple[Rollout, ...]:
    """Return the demonstrations of `train.sft`; none if it is not set. Raises SetUpError, which begins with the setting and names
    file and line, for a demonstration that cannot be trained."""
    if train.sft is None:
        return ()
    from swarmq.learner.memory.outline import load_config  # noqa: PLC0415 - slow to import

    config, path = load_config(model), Path(train.sft.demonstrations)
    made_for = getattr(config.get_text_config(), "max_position_embeddings", None)
    limit = min(train.micro_batch_tokens, made_for or train.micro_batch_tokens)
    try:
        found = tuple(read_demonstrations(path, load_tokenizer(model), ends=find_ends(model, config)))
        if not found:
            raise TaskError(f"{path}: the file has no demonstrations")
        for one in found:
            if (length := longest_call(one)) > limit:
                raise TaskError(
                    f"{one.episode_id}: it has {length} tokens, more than {limit}, the limit set by the model's context and by "
                    "train.micro_batch_tokens: shorten it, or take it out"
                )
            resolve(one.turns, vocab_size=config.get_text_config().vocab_size)
    except (TaskError, TimelineError) as error:
        raise SetUpError(f"train.sft.demonstrations: {error}") from error
    return found


def draw_demonstrations(
    demonstrations: Sequence[Rollout], train: Train, *, step: int, num_episodes: int
) -> tuple[Rollout, ...]:
    """Return the demonstrations of a step with `num_episodes` episodes, at least one for each of its optimizer steps. The seed and the
    step alone decide which; none repeats before all have come."""
    if train.sft is None or not demonstrations:
        return ()
    count = max(math.ceil(train.sft.share * num_episodes), train.steps_per_batch)
    order = random.Random(f"{train.seed}/{step}").sample(range(len(demonstrations)), min(count, len(demonstrations)))
    return tuple(demonstrations[order[at % len(order)]] for at in range(count))


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
    """Return an episode with one turn per trained message; its prompt is what the chat template renders before that message.

    `ends`: tokens that end an answer, besides the tokenizer's end token. Raises TaskError, which begins with `where`.
    """
    try:
        given = msgspec.json.decode(line, type=Demonstration)
    except msgspec.MsgspecError as error:
        raise TaskError(
            f'{where}: not a JSON object with "messages", or "prompt" and "completion" ({error})'
        ) from error
    match given:
        case Demonstration(messages=list(messages), prompt=None, completion=None):
            turns = _read_chat(ChatDemonstration(messages, given.tools, 0), tokenizer, where, ends)
        case Demonstration(messages=None, prompt=list(prompt), completion=list(completion)):
            chat = ChatDemonstration([*prompt, *completion], given.tools, len(prompt))
            turns = _read_chat(chat, tokenizer, where, ends)
        case Demonstration(messages=None, prompt=str(text), completion=str(answer), tools=None) if text and answer:
            turns = [_read_text(text, answer, tokenizer, where)]
        case _:
            raise TaskError(
                f'{where}: it needs "messages", or "prompt" and "completion", both texts that are not empty or both lists of messages'
            )
    return Rollout(
        run=DEMONSTRATION,
        policy=DEMONSTRATION,
        episode_id=where,
        slot=Slot(task_id=where, repeat=0),
        kind=DEMONSTRATION,
        group_id=where,
        group_members=1,
        group_size=1,
        reward=1.0,
        turns=tuple(turns),
    )


def _read_chat(chat: ChatDemonstration, tokenizer: Any, where: str, ends: Collection[int]) -> list[Turn]:
    if not tokenizer.chat_template:
        raise TaskError(f"{where}: the model's tokenizer has no chat template, so messages cannot be rendered")
    spelling = _Spelling(tokenizer, chat, where)
    turns: list[Turn] = []
    for at, message in enumerate(chat.messages):
        if (role := message.get("role")) not in ROLES and spelling.leaves_out(at):
            raise TaskError(f"{where}: the chat template ignores message {at}, because its role is {role!r}")
        if role == "assistant" and at >= chat.first:
            asked, sampled = _split(tokenizer, *spelling.around(at))
            answer = _cut_after_end(tokenizer, sampled, {tokenizer.eos_token_id, *ends})
            turns.append(_turn(where, len(turns), asked, answer))
    if not turns:
        raise TaskError(f"{where}: it has no message of the assistant")
    return turns


def _read_text(prompt: str, completion: str, tokenizer: Any, where: str) -> Turn:
    """Return the turn of a prompt and a completion without chat template, as TRL tokenises them: with the tokens that the tokenizer puts
    before a text, and its end token after the completion."""
    asked = list(tokenizer(prompt).input_ids)
    whole = list(tokenizer(prompt + completion).input_ids)
    if whole[: len(asked)] != asked:
        raise TaskError(
            f"{where}: the tokenizer merges the end of the prompt with the beginning of the completion: move white space from the end "
            "of the prompt to the beginning of the completion"
        )
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return _turn(where, 0, asked, [*whole[len(asked) :], *end])


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
        run=DEMONSTRATION,
        episode_id=where,
        policy=DEMONSTRATION,
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


def load_tokenizer(model: str) -> Any:
    from transformers import AutoTokenizer  # noqa: PLC0415 - slow to import

    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise TaskError(f"model {model}: its tokenizer cannot be loaded: {error}") from error
    return tokenizer


def find_ends(model: str, config: Any) -> set[int]:
    """Return the tokens at which engines end an answer, besides the tokenizer's end token."""
    from transformers import GenerationConfig  # noqa: PLC0415 - slow to import

    try:
        named = GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:  # the model has no such file
        named = GenerationConfig.from_model_config(config).eos_token_id
    return set(named if isinstance(named, list) else [] if named is None else [named])
