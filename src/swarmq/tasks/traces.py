"""Tasks from traces of an agent in production: what users asked, and what the agent answered.

Files are JSON or JSON lines, with
- logged OpenAI calls: {"request": {"messages": [...]}, "response": {"choices": [...]}}, or the fields of both in one object,
- OpenTelemetry spans in OTLP's JSON form ({"resourceSpans": [...]}) with the conventions of generative AI:
  `gen_ai.input.messages` and `gen_ai.output.messages`, or the older `gen_ai.prompt.N.*` and `gen_ai.completion.N.*`.

Such tasks have no check: the answer of the trace is a reference for a judge, not the truth.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from swarmq.errors import TaskError
from swarmq.runtime.wording import count_of
from swarmq.tasks.duplicates import Seen

_NUMBERED = re.compile(r"gen_ai\.(prompt|completion)\.(\d+)\.(role|content)")


class TracedTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task made from one conversation; one line of the output file."""

    id: str
    messages: list[dict[str, str]]
    """System prompt, if there was one, and the user's first message."""
    question: str
    """The user's first message."""
    reference: str
    """The agent's last answer in words; "" if the trace has none."""
    tools: list[str]
    """Names of the tools that the agent was offered or called."""
    source: str


class TraceReport(msgspec.Struct, kw_only=True):
    calls: int = 0
    kept: int = 0
    dropped: dict[str, int] = {}


def read_traces(paths: list[Path], report: TraceReport) -> Iterator[TracedTask]:
    """Yield one task for each conversation: its longest call has the final answer. Near duplicates and calls without a user's
    message are counted in `report`. Raises TaskError for a file that cannot be read, with its line, and if there is no task."""
    longest: dict[str, tuple[int, TracedTask]] = {}
    for path in paths:
        for where, call in _read_calls(path):
            report.calls += 1
            task = _to_task(where, call)
            if task is None:
                report.dropped["no user message"] = report.dropped.get("no user message", 0) + 1
                continue
            length = len(call["messages"])
            if task.id not in longest or length >= longest[task.id][0]:
                longest[task.id] = (length, task)
    seen = Seen()
    for _, task in longest.values():
        if seen.add(task.id, "\n".join(message["content"] for message in task.messages)):
            report.dropped["near duplicate"] = report.dropped.get("near duplicate", 0) + 1
            continue
        report.kept += 1
        yield task
    if not report.kept:
        raise TaskError(
            f"{', '.join(map(str, paths))}: {count_of(report.calls, 'call was', 'calls were')} found, and none has a user's message"
        )


def _read_calls(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield place and {"messages", "answer", "tools"} of each model call in a file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{path}: cannot be read: {error}") from error
    for where, value in _read_values(path, text):
        if not isinstance(value, dict):
            raise TaskError(f"{where}: a {type(value).__name__}, not a logged call or a trace")
        if "resourceSpans" in value:
            for span in _spans(value):
                yield f"{where}, span {span.get('spanId', '?')}", _read_span(span)
        else:
            yield where, _read_logged(where, value)


def _read_values(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    try:
        whole = json.loads(text)
    except ValueError:
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                try:
                    yield f"{path} line {number}", json.loads(line)
                except ValueError as error:
                    raise TaskError(f"{path} line {number}: not JSON: {error}") from error
        return
    for number, value in enumerate(whole if isinstance(whole, list) else [whole], 1):
        yield f"{path} item {number}", value


def _read_logged(where: str, value: dict[str, Any]) -> dict[str, Any]:
    request, response = value.get("request") or value, value.get("response") or value
    messages = request.get("messages") if isinstance(request, dict) else None
    if not isinstance(messages, list):
        raise TaskError(f"{where}: neither `resourceSpans` nor `messages`: give logged chat completions or OTLP JSON")
    choices = response.get("choices") if isinstance(response, dict) else None
    answer = (
        choices[0].get("message") if isinstance(choices, list) and choices and isinstance(choices[0], dict) else None
    )
    tools = [_get(tool, "function", "name") or _get(tool, "name") for tool in request.get("tools") or []]
    return {"messages": messages, "answer": _content(answer or {}), "tools": [str(name) for name in tools if name]}


def _spans(trace: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for resource in trace.get("resourceSpans") or []:
        for scope in resource.get("scopeSpans") or []:
            for span in scope.get("spans") or []:
                if any(str(a.get("key", "")).startswith("gen_ai.") for a in span.get("attributes") or []):
                    yield span


def _read_span(span: dict[str, Any]) -> dict[str, Any]:
    found = {a.get("key"): _attribute(a.get("value") or {}) for a in span.get("attributes") or []}
    messages = _as_messages(found.get("gen_ai.input.messages"))
    answers = _as_messages(found.get("gen_ai.output.messages"))
    numbered: defaultdict[tuple[str, int], dict[str, str]] = defaultdict(dict)
    for key, value in found.items():
        if match := _NUMBERED.fullmatch(str(key)):
            numbered[match[1], int(match[2])][match[3]] = str(value)
    messages = messages or [numbered[key] for key in sorted(numbered) if key[0] == "prompt"]
    answers = answers or [numbered[key] for key in sorted(numbered) if key[0] == "completion"]
    system = _as_text(found.get("gen_ai.system_instructions"))
    if system and not any(message.get("role") == "system" for message in messages):
        messages = [{"role": "system", "content": system}, *messages]
    tools = [str(found["gen_ai.tool.name"])] if found.get("gen_ai.tool.name") else []
    return {"messages": messages, "answer": _content(answers[-1]) if answers else "", "tools": tools}


def _attribute(value: dict[str, Any]) -> Any:
    if "arrayValue" in value:
        return [_attribute(item) for item in value["arrayValue"].get("values") or []]
    if "kvlistValue" in value:
        return {item["key"]: _attribute(item["value"]) for item in value["kvlistValue"].get("values") or []}
    return next(iter(value.values()), None)


def _as_messages(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return []
    return [message for message in value if isinstance(message, dict)] if isinstance(value, list) else []


def _as_text(value: Any) -> str:
    if isinstance(value, str) and value[:1] in "[{":
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    if isinstance(value, list):
        return "\n".join(filter(None, map(_as_text, value)))
    if isinstance(value, dict):
        return str(value.get("content") or value.get("text") or "")
    return value if isinstance(value, str) else ""


def _content(message: dict[str, Any]) -> str:
    """Return a message's text: `content` as text or parts, or the `parts` of OpenTelemetry."""
    content = message.get("content")
    return _as_text(content if content is not None else message.get("parts"))


def _get(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _to_task(where: str, call: dict[str, Any]) -> TracedTask | None:
    messages: list[dict[str, Any]] = [message for message in call["messages"] if isinstance(message, dict)]
    user = next((message for message in messages if message.get("role") == "user" and _content(message).strip()), None)
    if user is None:
        return None
    system = [message for message in messages if message.get("role") in ("system", "developer") and _content(message)]
    opening = [{"role": "system", "content": _content(message)} for message in system[:1]]
    opening.append({"role": "user", "content": _content(user)})
    called = [_get(c, "function", "name") for message in messages for c in message.get("tool_calls") or []]
    digest = hashlib.sha256(json.dumps(opening).encode()).hexdigest()[:16]
    return TracedTask(
        id=digest,
        messages=opening,
        question=opening[-1]["content"],
        reference=str(call["answer"] or ""),
        tools=sorted({str(name) for name in [*call["tools"], *called] if name}),
        source=where,
    )
