"""Recorded answers by prompt, read from a file of JSON lines or from the folder of an earlier run.

Each line is one of these, and may have a "task" (an object, as in a task file) to attempt:

    {"messages": [..., {"role": "assistant", ...}]}        a chat: each of the assistant's messages answers those before it
    {"messages": [...], "answer": TEXT or MESSAGE}         a prompt and its answer
    {"task": {...}, "answers": [TEXT or MESSAGE, ...]}     answers to the task's calls in order, whatever is asked
    the output of `swarmq inspect RUN EPISODE --json`      of an episode that was not trained; of others, name the run's folder

A prompt with several answers gets them in turn. Tools and sampling parameters are not compared.
"""

from __future__ import annotations

import difflib
import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from swarmq.client.data.tasks import SwarmTask, as_task
from swarmq.errors import ConfigError, TaskError
from swarmq.observe.episodes import TurnView
from swarmq.observe.open_run import open_run
from swarmq.runtime.wording import count_of
from swarmq.testing.scripted_engine import chat_template, spell_answer

MAX_EPISODES = 2000
"""Maximum number of a run's episodes that are read, the newest ones."""
COMPARED_CHARACTERS, COMPARED_MESSAGES = 1000, 16
"""Maximum numbers of characters of a message, and of messages that seem similar, that are compared exactly."""
SHOWN_BEFORE, SHOWN_AFTER = 24, 72
"""Number of characters that an error shows before and after the first difference."""
END_OF_MESSAGE = "<|end|>\n"

Message = dict[str, Any]


class Recording(msgspec.Struct, kw_only=True):
    """All recorded answers."""

    source: str
    answers: dict[str, list[str]] = {}
    """Rendered prompt -> answers, as the scripted engine samples them."""
    tasks: list[SwarmTask] = []
    scripts: dict[str, list[str]] = {}
    """Task id -> answers to its calls in order."""

    def explain_missing(self, prompt: str) -> str:
        """Return what distinguishes a prompt that was not recorded from the recorded one that is most like it."""
        if not self.answers:
            some = ", ".join(itertools.islice(self.scripts, 5))
            return f"{self.source} has no answers for this task, only for {count_of(len(self.scripts), 'other')} (ids {some})"
        asked = _split(prompt)
        nearest = _split(find_nearest(prompt, self.answers))
        same = count_equal(asked, nearest)
        head = f"{self.source} has no answer to this prompt. Message {same + 1} of {len(asked)} differs from the nearest recorded prompt"
        if same == len(nearest):
            return f"{head}, which ends before it: {_shorten(asked[same], 0)}"
        if same == len(asked):
            return f"{self.source} has no answer to this prompt. The nearest recorded prompt continues with {_shorten(nearest[same], 0)}"
        at = len(_common_prefix(asked[same], nearest[same]))
        return f"{head}:\n  asked:    {_shorten(asked[same], at)}\n  recorded: {_shorten(nearest[same], at)}"


def read_recording(source: str) -> Recording:
    """Read a file or the folder of a run. Raises ConfigError that names the line, or if nothing is recorded there."""
    path = Path(source)
    found = _Reader(source)
    if path.is_dir():
        run = open_run(path)
        for row in itertools.islice(run.episodes(), MAX_EPISODES):
            found.add_turns(run.episode(row.id).turns)
    else:
        for number, line in enumerate(_read_lines(path), 1):
            if line.strip():
                found.add_line(line, f"{path} line {number}")
    if not (found.answers or found.scripts):
        raise ConfigError(f"{source}: no answer is recorded there")
    return Recording(source=source, answers=dict(found.answers), tasks=found.tasks, scripts=found.scripts)


def find_nearest(prompt: str, known: Mapping[str, Any]) -> str:
    """Return the known prompt with the most equal leading messages; among several, the one whose next message is most like
    the prompt's."""
    asked = _split(prompt)
    equal = {one: count_equal(asked, _split(one)) for one in known}
    most = max(equal.values())
    nearest = {_next_message(_split(one), most): one for one, count in equal.items() if count == most}
    matcher = difflib.SequenceMatcher(b=_next_message(asked, most), autojunk=False)

    def quick_likeness(message: str) -> float:
        matcher.set_seq1(message)
        return matcher.quick_ratio()

    def likeness(message: str) -> float:
        matcher.set_seq1(message)
        return matcher.ratio()

    return nearest[max(heapq.nlargest(COMPARED_MESSAGES, nearest, quick_likeness), key=likeness)]


def count_equal(one: Sequence[str], other: Sequence[str]) -> int:
    """Return the number of equal leading messages."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def render_prompt(chat: Mapping[str, Any]) -> str:
    """Return the text by which a prompt is recognised: its messages without tools."""
    return chat_template({"messages": chat["messages"]})


class _Reader:
    def __init__(self, source: str) -> None:
        self.source = source
        self.answers: defaultdict[str, list[str]] = defaultdict(list)
        self.scripts: dict[str, list[str]] = {}
        self.tasks: list[SwarmTask] = []

    def add_line(self, line: bytes, where: str) -> None:
        try:
            self._add_row(msgspec.json.decode(line))
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ConfigError(f"{where}: not JSON: {error}") from error
        except KeyError as error:
            raise ConfigError(f"{where}: a message or call has no {error}") from error
        except (ValueError, TypeError, AttributeError, TaskError) as error:
            raise ConfigError(f"{where}: {error}") from error

    def add_turns(self, turns: Sequence[TurnView]) -> None:
        """Add the calls of an episode. A turn holds only the messages that its parent lacks."""
        whole: dict[str, list[Message]] = {}
        for turn in turns:
            if turn.messages:
                before = whole.get(turn.parent or "", []) if not turn.begins else []
                whole[turn.call_id] = conversation = join_messages(before, turn.messages)
                self._add_answer(conversation[:-1], conversation[-1])

    def _add_row(self, row: Any) -> None:
        if not isinstance(row, dict):
            raise TypeError(f"a {type(row).__name__}, not an object with messages")
        if "turns" in row:
            self.add_turns(msgspec.convert(row["turns"], list[TurnView]))
            return
        if "tokens" in row:
            raise ValueError(
                "the tokens of a trained episode, without its messages: name the run's folder in place of this file"
            )
        task = as_task(row["task"], default_id=f"task-{len(self.tasks) + 1}") if "task" in row else None
        if task:
            self.tasks.append(task)
        if "answers" in row:
            if task is None:
                raise ValueError('"answers" needs the "task" whose calls they answer; or give "messages" and "answer"')
            self.scripts[task.id] = [spell_answer(_as_message(one)) for one in row["answers"]]
        elif "answer" in row:
            self._add_answer(row["messages"], _as_message(row["answer"]))
        elif answered := [n for n, one in enumerate(row.get("messages", ())) if one.get("role") == "assistant"]:
            for n in answered:
                self._add_answer(row["messages"][:n], row["messages"][n])
        else:
            raise ValueError(
                'it has no "answer", no "answers", and no "messages" among which one has the role assistant'
            )

    def _add_answer(self, prompt: Sequence[Message], answer: Message) -> None:
        self.answers[render_prompt({"messages": prompt})].append(spell_answer(answer))


def join_messages(before: Sequence[Message], own: Sequence[Message]) -> list[Message]:
    """Return the conversation of a turn from that of its parent and the turn's own messages, which begin where the parent's
    answer ends, at that answer (another choice, or an edited answer), or at the first message."""
    if not before or own[:1] == before[:1]:
        return [*own]
    if len(own) > 1 and list(own[:-1]) == list(before[-len(own) : -1]):  # the same request, sent again
        return [*before[:-1], own[-1]]
    kept = before[:-1] if own[0].get("role") == "assistant" else before
    return [*kept, *own]


def _as_message(answer: Any) -> Message:
    message = {"content": answer} if isinstance(answer, str) else answer
    if not isinstance(message, dict) or not (message.get("content") or message.get("tool_calls")):
        raise ValueError(f"an answer is text or a message with content or tool_calls, not {answer!r:.60}")
    return message


def _read_lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            yield from file
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error


def _split(prompt: str) -> list[str]:
    """Return the rendered messages of a prompt, without the opening of its answer."""
    return [part.removeprefix("<|start|>").replace("\n", ": ", 1) for part in prompt.split(END_OF_MESSAGE)[:-1]]


def _next_message(messages: Sequence[str], position: int) -> str:
    return messages[position][:COMPARED_CHARACTERS] if position < len(messages) else ""


def _common_prefix(one: str, other: str) -> str:
    return "".join(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _shorten(message: str, at: int) -> str:
    """Return the role of a message and its text around the character `at`."""
    role, _, _ = message.partition(": ")
    start = max(at - SHOWN_BEFORE, 0)
    part = message[start : at + SHOWN_AFTER]
    head = "" if not start else f"{role}: ..."
    return f"{head}{part}{'...' if len(message) > at + SHOWN_AFTER else ''}".replace("\n", "\\n")
