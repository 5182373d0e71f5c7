"""An `Engine` with scripted answers and a tokenizer that drifts.

The vocabulary contains every character and many pairs of characters. Encoding takes pairs greedily from the left, whereas a
sampled answer may spell the same text in single characters, so encoding the answer again gives other ids. Special tokens are
single ids. Nothing is random; tests set the weight version.
"""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Any

import msgspec

from swarmq.engine.client.protocol import (
    CompleteAnswer,
    Delta,
    EngineIdentity,
    EngineInfo,
    Json,
    Logprob,
    RenderedPrompt,
    RoutedExperts,
)
from swarmq.errors import EngineError, EngineRefusedError
from swarmq.messages import VersionSpan

SPECIAL = ("<|start|>", "<|end|>", "<tool_call>", "</tool_call>", "<think>", "</think>")
END = 1
"""Id of `<|end|>`, the end-of-turn token."""
PARAMETERS = (
    *(
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "logit_bias",
        "seed",
        "stop",
        "n",
        "stream_interval",
    ),
    *("structured_outputs", "watermarking", "invented_later"),
)
_CHARACTERS = 1000
_PAIRS = 2_000_000
_PAIR_RANGE = 128
"""Number of characters (ASCII) of which any two neighbours form one token."""
_SPLIT = re.compile("(" + "|".join(re.escape(token) for token in SPECIAL) + ")")
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_THOUGHT = re.compile(r"\A<think>(.*?)</think>", re.DOTALL)

Template = Callable[[Json], str]


class ScriptedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """An answer that a ScriptedEngine gives to one request: at once, after a pause, or broken off by an error."""

    token_ids: list[int]
    finish_reason: str = "stop"
    gate: asyncio.Event | None = None
    """Event for which sampling waits after the first token; None: no pause."""
    error: str | None = None
    """Message of the error with which sampling fails after the first token; None: no error."""


def encode(text: str) -> list[int]:
    """Return the canonical ids: special tokens, then pairs from the left, then single characters."""
    ids: list[int] = []
    for part in _SPLIT.split(text):
        if part in SPECIAL:
            ids.append(SPECIAL.index(part))
            continue
        at = 0
        while at < len(part):
            pair = part[at : at + 2]
            if len(pair) == 2 and all(ord(c) < _PAIR_RANGE for c in pair):
                ids.append(_PAIRS + ord(pair[0]) * _PAIR_RANGE + ord(pair[1]))
            else:
                ids.append(_CHARACTERS + ord(pair[0]))
                pair = pair[0]
            at += len(pair)
    return ids


def decode(ids: Iterable[int]) -> str:
    return "".join(_spell(token) for token in ids)


def encode_characters(text: str) -> list[int]:
    """Return an id for each character of the text. They decode to the same text as the ids of `encode`."""
    parts = _SPLIT.split(text)
    return [i for p in parts for i in ([SPECIAL.index(p)] if p in SPECIAL else [_CHARACTERS + ord(c) for c in p])]


def chat_template(chat: Json) -> str:
    """Render messages with roles, tools and tool calls in the style of ChatML."""
    head = f"<|start|>system\n{json.dumps(chat['tools'])}<|end|>\n" if chat.get("tools") else ""
    return head + "".join(map(_render_message, chat["messages"])) + "<|start|>assistant\n"


class ScriptedEngine:
    """Engine that returns the scripted answers in order. It parses `<think>` and `<tool_call>` in answers."""

    def __init__(
        self, *, url: str = "scripted://0", template: Template = chat_template, max_model_len: int = 4096
    ) -> None:
        self.url = url
        self.template = template
        self.max_model_len = max_model_len
        self.lines: deque[ScriptedAnswer] = deque()
        self.version = 0
        self.reports_versions = True
        """Whether the engine reports the weight version that sampled each token."""
        self.returns_routed_experts = False
        """Whether the engine returns the experts of tokens: two layers with one expert each, which depend on the token."""
        self.down = False
        self.has_parsers = False
        self.accepts_images = False
        """Whether the engine accepts images."""
        self.requests: list[RenderedPrompt] = []
        """Prompts that were sampled from, in order."""
        self.sampling_began = asyncio.Event()
        """Event that is set when sampling begins."""
        self.cancelled = asyncio.Event()
        """Event that is set when the caller abandons sampling."""

    def say(self, text: str, *, tokens: Sequence[int] | None = None, finish_reason: str = "stop", **more: Any) -> None:
        """Queue an answer: `text` in canonical tokens, or in `tokens` if given, with the end-of-turn token for the reason
        `stop`."""
        ids = list(tokens) if tokens is not None else encode(text)
        ids += [END] if finish_reason == "stop" else []
        self.lines.append(ScriptedAnswer(token_ids=ids, finish_reason=finish_reason, **more))

    async def info(self) -> EngineInfo:
        self._answer_or_fail()
        return EngineInfo(model="scripted", max_model_len=self.max_model_len)

    async def is_healthy(self) -> bool:
        return not self.down

    async def weight_version(self) -> int | None:
        return self.version

    async def render(self, chat: Json) -> RenderedPrompt:
        self._answer_or_fail()
        prompt = chat.get("prompt")
        try:
            ids = list(prompt) if isinstance(prompt, list) else encode(prompt or self.template(chat))
            parts = [part for message in chat["messages"] for part in _content_parts(message)]
            images = [part for part in parts if part.get("type") == "image_url"]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise EngineRefusedError(f"the messages cannot be rendered: {error!r}", status=400) from error
        if len(ids) >= self.max_model_len:
            raise EngineRefusedError(
                f"maximum context length is {self.max_model_len}", status=400, code="context_length_exceeded"
            )
        given: Json = {key: chat[key] for key in PARAMETERS if key in chat}
        if not isinstance(given.get("stop", []), (str, list)) or not isinstance(given.get("logit_bias", {}), dict):
            raise EngineRefusedError("stop is text or a list, logit_bias an object", status=400)
        if images and not self.accepts_images:
            raise EngineRefusedError("the model takes no images", status=400)
        return RenderedPrompt(
            token_ids=ids,
            sampling=given,
            passthrough={"features": images} if images else {},
            needs_parsing=prompt is None and (self.has_parsers or bool(chat.get("tools"))),
        )

    async def generate(
        self, rendered: RenderedPrompt, *, stream: bool, detailed: bool = False
    ) -> AsyncGenerator[list[Delta], None]:
        self._answer_or_fail()
        self.requests.append(rendered)
        self.sampling_began.set()
        lines = [self.lines.popleft() for _ in range(rendered.sampling.get("n", 1))]
        try:
            if stream:
                async for deltas in self._stream(rendered, lines, detailed=detailed):
                    yield deltas
            else:
                for line in lines:
                    await self._pause(line)
                yield [self._whole(rendered, i, line) for i, line in enumerate(lines)]
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.set()
            raise

    async def derender(self, _chat: Json, _prompt_ids: Sequence[int], answers: Sequence[CompleteAnswer]) -> list[Json]:
        return [_parse_message(decode(answer.token_ids)) for answer in answers]

    async def derender_delta(
        self, _chat: Json, _prompt: Sequence[int], token_ids: Sequence[int], *, finish_reason: str | None, state: Any
    ) -> tuple[Json, Any]:
        """Yield text as it arrives; reasoning and tool calls follow at the end of the answer."""
        seen = [*(state or ()), *token_ids]
        text = decode(seen)
        if "<" not in text:
            return {"content": decode(token_ids)}, seen
        if finish_reason is None:
            return {}, seen
        message = _parse_message(text)
        message["content"] = (message["content"] or "").removeprefix(_before_markup(decode(state or ())))
        calls = [{"index": i, **call} for i, call in enumerate(message.pop("tool_calls", []))]
        return {**message, **({"tool_calls": calls} if calls else {})}, seen

    async def identity(self) -> EngineIdentity:
        return EngineIdentity()

    async def tokenize(self, text: str) -> list[int]:
        return encode(text)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return decode(token_ids)

    def _answer_or_fail(self) -> None:
        if self.down:
            raise EngineError(f"the engine at {self.url} cannot be reached")

    async def _stream(
        self, rendered: RenderedPrompt, lines: Sequence[ScriptedAnswer], *, detailed: bool
    ) -> AsyncGenerator[list[Delta], None]:
        for index, line in enumerate(lines):
            whole = self._whole(rendered, index, line)
            for at, token in enumerate(whole.token_ids):
                if at == 1:
                    await self._pause(line)
                last = at == len(whole.token_ids) - 1
                yield [
                    Delta(
                        index=index,
                        text="" if token == END else _spell(token),
                        token_ids=[token],
                        logprobs=[whole.logprobs[at]],
                        entries=[whole.entries[at]] if detailed else [],
                        finish_reason=whole.finish_reason if last else None,
                        versions=whole.versions if last else (),
                        routed_experts=whole.routed_experts if last else None,
                    )
                ]

    async def _pause(self, line: ScriptedAnswer) -> None:
        if line.gate is not None:
            await line.gate.wait()
        if line.error is not None:
            raise EngineError(line.error)

    def _whole(self, rendered: RenderedPrompt, index: int, line: ScriptedAnswer) -> Delta:
        ids = line.token_ids[: rendered.sampling["max_tokens"]]
        return Delta(
            index=index,
            text=decode(token for token in ids if token != END),
            token_ids=ids,
            logprobs=[-0.5] * len(ids),
            entries=[Logprob(token=_spell(token), logprob=-0.5) for token in ids],
            finish_reason=line.finish_reason if len(ids) == len(line.token_ids) else "length",
            versions=(VersionSpan(version=self.version, start=0, end=len(ids)),) if self.reports_versions else (),
            routed_experts=self._route(rendered, ids) if self.returns_routed_experts else None,
        )

    def _route(self, rendered: RenderedPrompt, sampled: Sequence[int]) -> RoutedExperts:
        first = rendered.sampling.get("routed_experts_prompt_start", 0)
        tokens = [*rendered.token_ids[first:], *sampled[:-1]]
        return RoutedExperts(num_tokens=len(tokens), ids=bytes(i for t in tokens for i in (t % 256, t // 256 % 256)))


def _spell(token: int) -> str:
    if token < len(SPECIAL):
        return SPECIAL[token]
    if token < _PAIRS:
        return chr(token - _CHARACTERS)
    return chr((token - _PAIRS) // _PAIR_RANGE) + chr((token - _PAIRS) % _PAIR_RANGE)


def spell_answer(message: Json) -> str:
    """Return the text that is parsed into this message of the assistant: thought, content, tool calls."""
    thought = f"<think>{message['reasoning']}</think>" if message.get("reasoning") else ""
    return thought + _spell_message(message)


def _spell_message(message: Json) -> str:
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = "".join(
        f"<tool_call>{json.dumps({'name': one['name'], 'arguments': _parse_arguments(one['arguments'])})}</tool_call>"
        for one in functions
    )
    return f"{message.get('content') or ''}{calls}"


def _parse_arguments(text: str) -> Any:
    """Return the arguments of a tool call as data, or as they are if the model wrote no valid JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _render_message(message: Json) -> str:
    return f"<|start|>{message['role']}\n{_spell_message(message)}<|end|>\n"


def _content_parts(message: Json) -> list[Json]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _before_markup(text: str) -> str:
    return text.partition("<")[0]


def _parse_message(text: str) -> Json:
    """Return the message that a reasoning and tool-call parser makes of an answer."""
    message: Json = {"role": "assistant"}
    if thought := _THOUGHT.match(text):
        message["reasoning"] = thought[1]
        text = text[thought.end() :]
    calls = [json.loads(call) for call in _CALL.findall(text)]
    message["content"] = _CALL.sub("", text)
    if calls:
        message["tool_calls"] = [
            {
                "id": f"call-{uuid.uuid4().hex}",  # clients drop a call whose id an earlier answer had
                "type": "function",
                "function": {
                    "name": call["name"],
                    "arguments": one if isinstance(one := call["arguments"], str) else json.dumps(one),
                },
            }
            for call in calls
        ]
    return message
