# ruff: noqa: RUF001 (one family has full-width bars in its markup)
"""Seven families of chat templates with tokenizers of their own, behind an engine whose answers a test chooses.

Each template has the public form of its family: where markup stands, what is trimmed, dropped, moved or refused when
history is written again. The words in it are ours. Tokenizers are byte-level BPE, but for one in the manner of
SentencePiece (a space before the first word, characters that it has no piece for in bytes), trained here on a few
sentences, so every text has many spellings and a model that samples one of them drifts when its answer is encoded again.
"""

from __future__ import annotations

import asyncio
import functools
import json
import random
import re
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import jinja2
import msgspec
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from swarmq.engine.client.protocol import CompleteAnswer, Delta, EngineIdentity, EngineInfo, Json, RenderedPrompt
from swarmq.errors import EngineRefusedError
from swarmq.messages import VersionSpan

VOCABULARY = 700
SPACE = "\u2581"
"""As SentencePiece writes it."""
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SENTENCES = """
The weather in Paris is mild today, and it will rain at 17:30. What is 12 + 345? It's 357, isn't it?
def add(a, b):\n    return a + b\n\n\nprint(add(1, 2))   # 3
{"name": "add", "arguments": {"a": 1, "b": 2}} {"city": "Zürich", "temperature": 21.5}
I think that the answer is in the second file. Let me read it first, then I will say what to do. Don't worry!
"""

CHATML = """
{%- if tools %}
<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}
# Tools
<tools>
{% for tool in tools %}
{{ tool | tojson }}
{% endfor %}
</tools>
Answer with <tool_call></tool_call> to call one.<|im_end|>
{% elif messages[0].role == 'system' %}
<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- set last = namespace(question=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.question = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% elif m.role == 'assistant' %}
<|im_start|>assistant
{% if loop.index0 > last.question and (m.reasoning or loop.last) %}
<think>
{{ (m.reasoning or '').strip('\n') }}
</think>

{{ (m.content or '').lstrip('\n') }}
{%- else %}{{ m.content or '' }}{% endif %}
{%- for call in m.tool_calls or [] %}
{%- if m.content or not loop.first %}{{ '\n' }}{% endif %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% elif m.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}

<tool_response>
{{ m.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- endif %}
{%- endfor %}
<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}"""

LLAMA3 = """
{{- '<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n' }}
{%- if tools %}{{ 'Environment: ipython\n' }}{% endif %}
{{- 'Today Date: 26 Jul 2024\n\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% set messages = messages[1:] %}{% endif %}
{{- '<|eot_id|>' }}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + m.content | tojson + '<|eot_id|>' }}
{%- elif m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one tool call at a time') }}{% endif %}
{%- set call = m.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name + '", ' }}
{{- '"parameters": ' + call.arguments | tojson + '}<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}
{%- if tools and loop.first %}{% for tool in tools %}{{ tool | tojson(indent=4) + '\n\n' }}{% endfor %}{% endif %}
{{- m.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"""

MISTRAL = """
{%- if messages[0].role == 'system' %}
{%- set system = messages[0].content %}{% set messages = messages[1:] %}
{%- endif %}
{%- set last = namespace(question=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.question = loop.index0 %}{% endif %}{% endfor %}
{{- '<s>' }}
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if tools and loop.index0 == last.question %}
{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
{%- endif %}
{{- '[INST] ' }}
{%- if system is defined and loop.index0 == last.question %}{{ system + '\n\n' }}{% endif %}
{{- m.content + '[/INST]' }}
{%- elif m.tool_calls %}
{{- '[TOOL_CALLS] [' }}
{%- for call in m.tool_calls %}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + (', ' if not loop.last else ']</s>') }}
{%- endfor %}
{%- elif m.role == 'assistant' %}
{{- ' ' + m.content | trim + '</s>' }}
{%- else %}
{{- '[TOOL_RESULTS] {"content": ' + m.content | tojson + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- endif %}
{%- endfor %}"""

DEEPSEEK = """
{{- '<｜begin▁of▁sentence｜>' }}
{%- for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}
{%- if tools %}{{ '\n\n## Tools\n' + tools | tojson }}{% endif %}
{%- set at = namespace(asked=false) %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<｜User｜>' + m.content }}{% set at.asked = true %}
{%- elif m.role == 'assistant' %}
{%- if at.asked %}{{ '<｜Assistant｜></think>' }}{% set at.asked = false %}{% endif %}
{{- (m.content or '').split('</think>')[-1] }}
{%- for call in m.tool_calls or [] %}
{%- if loop.first %}{{ '<｜tool▁calls▁begin｜>' }}{% endif %}
{{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + call.function.arguments | tojson }}
{{- '<｜tool▁call▁end｜>' }}
{%- if loop.last %}{{ '<｜tool▁calls▁end｜>' }}{% endif %}
{%- endfor %}
{{- '<｜end▁of▁sentence｜>' }}
{%- elif m.role == 'tool' %}{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
{%- endif %}
{%- endfor %}
{%- if at.asked %}{{ '<｜Assistant｜>' + ('<think>' if thinking else '</think>') }}{% endif %}"""

GEMMA = """
{{- '<bos>' }}
{%- set first = '' %}
{%- if messages[0].role == 'system' %}
{%- set first = messages[0].content + '\n\n' %}{% set messages = messages[1:] %}
{%- endif %}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}
{{- (first if loop.first else '') + m.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{{- '<start_of_turn>model\n' }}"""

HARMONY = """
{{- '<|start|>system<|message|>You answer on channels.<|end|>' }}
{%- if tools or messages[0].role == 'system' %}
{{- '<|start|>developer<|message|>' }}
{%- if messages[0].role == 'system' %}
{{- '# Instructions\n\n' + messages[0].content + '\n\n' }}{% set messages = messages[1:] %}
{%- endif %}
{%- if tools %}{{ '# Tools\n\n' + tools | tojson }}{% endif %}
{{- '<|end|>' }}
{%- endif %}
{%- set last = namespace(final=-1) %}
{%- for m in messages %}
{%- if m.role == 'assistant' and not m.tool_calls %}{% set last.final = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}
{%- elif m.role == 'tool' %}
{{- '<|start|>functions.' + m.tool_call_id.split(':')[0] + ' to=assistant<|channel|>commentary<|message|>' }}
{{- m.content | tojson + '<|end|>' }}
{%- elif m.tool_calls %}
{%- if m.reasoning and loop.index0 > last.final %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.reasoning + '<|end|>' }}
{%- endif %}
{%- set call = m.tool_calls[0].function %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson + '<|call|>' }}
{%- else %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{{- '<|start|>assistant' }}"""

Call = tuple[str, Json]


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """A template, the markup that its tokenizer knows, and how its models write and are read."""

    name: str
    template: str
    ends: tuple[str, ...]
    """Tokens that end a turn; the first is the usual one."""
    special: tuple[str, ...]
    """All other markup that is one token."""
    split: str | None
    """How text is cut before byte pairs are merged; None: as SentencePiece does, at spaces, which are part of pieces."""
    say: Callable[[str, str, Sequence[Call]], str]
    """(content, thought, tool calls) -> what the model writes, the end included."""
    parse_answer: Callable[[str], Json]
    """Content, reasoning and tool calls of what the model wrote, the end left out."""
    chat: Json = {}
    """Fields that every request of this family has."""

    def __str__(self) -> str:
        return self.name

    @property
    def controls(self) -> tuple[str, ...]:
        return (*self.ends, *self.special)


def _message(content: str, calls: Sequence[Call] = (), ids: Sequence[str] = ()) -> Json:
    made = [
        {
            "id": ids[i] if ids else f"call-{i}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)},
        }
        for i, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": content} | ({"tool_calls": made} if made else {})


def _write_chatml(content: str, thought: str, calls: Sequence[Call]) -> str:
    said = f"<think>\n{thought}\n</think>\n\n{content}" if thought else content
    for number, (name, arguments) in enumerate(calls):
        said += "\n" if content or number else ""
        said += f'<tool_call>\n{{"name": "{name}", "arguments": {_dumps(arguments)}}}\n</tool_call>'
    return said + "<|im_end|>"


def _parse_chatml(text: str) -> Json:
    thought, closed, rest = text.rpartition("</think>")
    calls = [json.loads(found) for found in re.findall(r"<tool_call>\n(.*?)\n</tool_call>", rest, re.DOTALL)]
    content = re.split(r"\n?<tool_call>", rest)[0] if calls else rest
    message = _message(content, [(call["name"], call["arguments"]) for call in calls])
    return message | ({"reasoning": thought.removeprefix("<think>")} if closed else {})


def _write_llama3(content: str, _: str, calls: Sequence[Call]) -> str:
    said = "; ".join(f'{{"name": "{name}", "parameters": {_dumps(arguments)}}}' for name, arguments in calls)
    return (said or content) + "<|eot_id|>"


def _parse_llama3(text: str) -> Json:
    if not text.startswith('{"name"'):
        return _message(text)
    calls = [json.loads(call) for call in text.split("; ")]
    return _message("", [(call["name"], call["parameters"]) for call in calls])


def _write_mistral(content: str, _: str, calls: Sequence[Call]) -> str:
    listed = [{"name": name, "arguments": arguments, "id": f"call{i:05}"} for i, (name, arguments) in enumerate(calls)]
    return f"[TOOL_CALLS] {_dumps(listed)}</s>" if listed else f" {content}</s>"


def _parse_mistral(text: str) -> Json:
    if not text.startswith("[TOOL_CALLS] "):
        return _message(text)
    calls = json.loads(text.removeprefix("[TOOL_CALLS] "))
    return _message("", [(c["name"], c["arguments"]) for c in calls], ids=[c["id"] for c in calls])


def _write_deepseek(content: str, thought: str, calls: Sequence[Call]) -> str:
    said = (f"{thought}</think>" if thought else "") + content
    for number, (name, arguments) in enumerate(calls):
        said += "" if number else "<｜tool▁calls▁begin｜>"
        said += f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_dumps(arguments)}<｜tool▁call▁end｜>"
    return said + ("<｜tool▁calls▁end｜>" if calls else "") + "<｜end▁of▁sentence｜>"


def _parse_deepseek(text: str) -> Json:
    thought, closed, rest = text.rpartition("</think>")
    found = re.findall(r"<｜tool▁call▁begin｜>(.*?)<｜tool▁sep｜>(.*?)<｜tool▁call▁end｜>", rest, re.DOTALL)
    calls = [(name, json.loads(arguments)) for name, arguments in found]
    message = _message(rest.partition("<｜tool▁calls▁begin｜>")[0], calls)
    return message | ({"reasoning": thought} if closed else {})


def _write_gemma(content: str, _: str, calls: Sequence[Call]) -> str:
    assert not calls, "the template has no tools"
    return content + "<end_of_turn>"


def _write_harmony(content: str, thought: str, calls: Sequence[Call]) -> str:
    said = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant" if thought else ""
    if not calls:
        return f"{said}<|channel|>final<|message|>{content}<|return|>"
    ((name, arguments),) = calls
    return f"{said} to=functions.{name}<|channel|>commentary json<|message|>{_dumps(arguments)}<|call|>"


def _parse_harmony(text: str) -> Json:
    parts = re.findall(
        r"([^<]*)<\|channel\|>(\w+)[^<]*<\|message\|>(.*?)(?:<\|end\|><\|start\|>assistant|$)", text, re.DOTALL
    )
    message = _message("")
    for head, channel, said in parts:
        if channel == "analysis":
            message["reasoning"] = said
        elif channel == "final":
            message["content"] = said
        else:
            name = head.strip().removeprefix("to=functions.")
            message |= _message("", [(name, json.loads(said))], ids=[f"{name}:0"])
    return message


FAMILIES = (
    Family(
        name="chatml",
        template=CHATML,
        ends=("<|im_end|>",),
        special=("<|im_start|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>"),
        split=r"'(?:s|t|re|ve|m|ll|d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        say=_write_chatml,
        parse_answer=_parse_chatml,
    ),
    Family(
        name="llama3",
        template=LLAMA3,
        ends=("<|eot_id|>",),
        special=("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
        split=r"'(?:s|t|re|ve|m|ll|d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+",
        say=_write_llama3,
        parse_answer=_parse_llama3,
    ),
    Family(
        name="mistral",
        template=MISTRAL,
        ends=("</s>",),
        special=("<s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]"),
        split=r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+",
        say=_write_mistral,
        parse_answer=_parse_mistral,
    ),
    Family(
        name="deepseek",
        template=DEEPSEEK,
        ends=("<｜end▁of▁sentence｜>",),
        special=(
            *("<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "<｜tool▁sep｜>"),
            *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
            *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
        ),
        split=r"\p{N}{1,3}|[!-/:-~]?\p{L}+|\s?[^\s\p{L}\p{N}]+|\s+",
        say=_write_deepseek,
        parse_answer=_parse_deepseek,
    ),
    Family(
        name="gemma",
        template=GEMMA,
        ends=("<end_of_turn>",),
        special=("<bos>", "<start_of_turn>"),
        split=r" ?[^ \n]+|\n+| +",
        say=_write_gemma,
        parse_answer=_message,
    ),
    Family(
        name="sentencepiece",
        template=GEMMA,
        ends=("<end_of_turn>",),
        special=("<bos>", "<start_of_turn>"),
        split=None,
        say=_write_gemma,
        parse_answer=_message,
    ),
    Family(
        name="harmony",
        template=HARMONY,
        ends=("<|return|>", "<|call|>"),
        special=("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>"),
        split=r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}]*[\p{Ll}]+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+|.",
        say=_write_harmony,
        parse_answer=_parse_harmony,
    ),
)  # fmt: skip
BY_NAME = {family.name: family for family in FAMILIES}


@functools.cache
def tokenizer_of(name: str) -> Tokenizer:
    family = BY_NAME[name]
    if family.split is None:
        return _sentencepiece(family)
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(family.split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        show_progress=False,
        special_tokens=[AddedToken(token, normalized=False, special=True) for token in family.controls],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([SENTENCES] * 2, trainer)
    return tokenizer


def _sentencepiece(family: Family) -> Tokenizer:
    """What comes first in a text gets a space before it when encoded, and loses it when decoded."""
    controls = [AddedToken(token, normalized=False, special=True) for token in family.controls]
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    learned.train_from_iterator([SENTENCES] * 2, trainers.BpeTrainer(vocab_size=VOCABULARY, show_progress=False))
    model = json.loads(learned.to_str())["model"]
    words = [*BYTES, *(word for word in model["vocab"] if word != "\n")]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={word: number for number, word in enumerate(words)},
            merges=[tuple(pair) for pair in model["merges"] if "\n" not in "".join(pair)],
            byte_fallback=True,
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(controls)
    return tokenizer


@functools.cache
def _pieces(name: str) -> dict[str, int]:
    """Byte-level spelling of every ordinary token -> its id."""
    controls = BY_NAME[name].controls
    return {piece: number for piece, number in tokenizer_of(name).get_vocab().items() if piece not in controls}


def spell(family: Family, text: str, rng: random.Random, *, markup_in_pieces: bool = False) -> list[int]:
    """Tokens that decode to `text`, chosen at random at every step as a sampling model may."""
    tokenizer, pieces = tokenizer_of(family.name), _pieces(family.name)
    ids: list[int] = []
    for part in re.split("(" + "|".join(map(re.escape, family.controls)) + ")", text):
        if part in family.controls and (part in family.ends or not markup_in_pieces):
            ids.append(tokenizer.token_to_id(part))
        elif part:
            rest = _spelled(family, part)
            while rest:
                fitting = [rest[:size] for size in range(1, 9) if rest[:size] in pieces]
                if not fitting:
                    ids += in_bytes(family, rest[0])
                    rest = rest[1:]
                    continue
                chosen = rng.choice(fitting)
                ids.append(pieces[chosen])
                rest = rest[len(chosen) :]
    return ids


def in_bytes(family: Family, text: str) -> list[int]:
    """A token for every byte of `text`."""
    letters = [BYTES[byte] for byte in text.encode()] if family.split is None else _spelled(family, text)
    return [_pieces(family.name)[letter] for letter in letters]


def _spelled(family: Family, text: str) -> str:
    """In the letters of which the family's pieces are made."""
    if family.split is None:
        return text.replace(" ", SPACE)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(piece for piece, _ in byte_level.pre_tokenize_str(text))


class FamilyEngine:
    """Renders with the family's template and tokenizer; answers with the tokens it was given, in order."""

    def __init__(self, family: Family) -> None:
        self.url = f"scripted://{family.name}"
        self.family = family
        self.tokenizer = tokenizer_of(family.name)
        self.lines: deque[tuple[list[int], str]] = deque()
        self.prompts: list[list[int]] = []
        """What was sampled from, in order."""
        self._template = _environment().from_string(family.template.lstrip("\n"))

    def say(self, ids: Sequence[int], *, finish_reason: str = "stop") -> None:
        self.lines.append((list(ids), finish_reason))

    def write(self, chat: Json) -> str:
        """The text of a request. Raises EngineRefusedError where the template refuses it."""
        messages = [_with_arguments(message) for message in chat["messages"]]
        fields = {**(chat.get("chat_template_kwargs") or {}), "tools": chat.get("tools")}
        try:
            return str(self._template.render(messages=messages, **fields))
        except jinja2.TemplateError as error:
            raise EngineRefusedError(str(error), status=400) from error

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    async def info(self) -> EngineInfo:
        return EngineInfo(model=self.family.name, max_model_len=100_000)

    async def is_healthy(self) -> bool:
        return True

    async def render(self, chat: Json) -> RenderedPrompt:
        await asyncio.sleep(0)  # requests in flight overtake each other
        given = {"n": chat["n"]} if "n" in chat else {}
        return RenderedPrompt(token_ids=self.encode(self.write(chat)), sampling=given, needs_parsing=True)

    async def generate(
        self, rendered: RenderedPrompt, *, stream: bool, detailed: bool = False
    ) -> AsyncGenerator[list[Delta], None]:
        assert not stream
        self.prompts.append(rendered.token_ids)
        lines = [self.lines.popleft() for _ in range(rendered.sampling.get("n", 1))]
        yield [
            Delta(
                index=index,
                text="",
                token_ids=ids,
                logprobs=[-0.5] * len(ids),
                finish_reason=finish_reason,
                versions=(VersionSpan(version=0, start=0, end=len(ids)),),
            )
            for index, (ids, finish_reason) in enumerate(lines)
        ]

    async def derender(self, chat: Json, _prompt_ids: Sequence[int], answers: Sequence[CompleteAnswer]) -> list[Json]:
        return [self.family.parse_answer(self.decode(answer.token_ids)) for answer in answers]

    async def derender_delta(self, *_: Any, **__: Any) -> tuple[Json, Any]:
        raise NotImplementedError("answers come whole")

    async def identity(self) -> EngineIdentity:
        return EngineIdentity()

    async def tokenize(self, text: str) -> list[int]:
        return self.encode(text)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        await asyncio.sleep(0)
        return self.decode(token_ids)


@functools.cache
def _environment() -> jinja2.Environment:
    def refuse(message: str) -> str:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = _dumps
    environment.globals["raise_exception"] = refuse
    return environment


def _dumps(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _with_arguments(message: Json) -> Json:
    """Tool arguments as an object, the way engines hand them to a template."""
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}
