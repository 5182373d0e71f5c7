"""What parsing a streamed answer costs the engine, and how smoothly it arrives: with vLLM's own parsers, on the CPU.

An answer arrives token by token, and each portion goes through vLLM's derender on one thread, which in an engine also renders
the prompts of other calls. `eager` parses whatever has arrived as soon as the thread is free, `paced` as the proxy does. A call
that comes every `PROBE_S` tells how long it waits for the thread. HTTP is left out of both. Needs vLLM; example:

    python -m benchmarks.derender --tokens 1200 --rate 100
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from statistics import median, quantiles
from types import SimpleNamespace
from typing import Any

import msgspec

from benchmarks import report
from swarmq.engine.client.protocol import Delta
from swarmq.proxy.deltas import extend
from swarmq.proxy.engines.stream_coalescing import CoalescingPace, coalesce
from swarmq.toy_model.tokenizer import build_tokenizer

WORDS = "What is the sum of 17 and 25? The sum is 42, and that is that. "
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 17, "b": 25}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ANSWERS = {
    "tools": ({"tool_parser": "hermes", "enable_auto_tools": True}, "", CALL),
    "thoughts": ({"reasoning_parser": "qwen3"}, "<think>\n", "\n</think>\n\n42"),
    "both": (
        {"tool_parser": "hermes", "enable_auto_tools": True, "reasoning_parser": "qwen3"},
        "<think>\n",
        "\n</think>\n\n" + CALL,
    ),
}
"""Parsers, and how an answer begins and ends around its words."""
PROBE_S = 0.025


class Eager(CoalescingPace):
    """No rest."""

    @property
    def rest_s(self) -> float:
        return 0.0


class ReceivedAnswer(msgspec.Struct):
    """One streamed answer."""

    parsing_s: float = 0.0
    """Processor seconds."""
    at: list[float] = []
    """When each portion was parsed; seconds since the first token."""
    waits: list[float] = []
    """Of the calls beside it, for the thread."""
    message: dict[str, Any] = {}


class Parser:
    """vLLM's derender on a thread of its own."""

    def __init__(self, tokenizer: Any, options: dict[str, Any]) -> None:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest  # noqa: PLC0415
        from vllm.renderers.online_derenderer import OnlineDerenderer  # noqa: PLC0415

        self.thread = ThreadPoolExecutor(1)
        config = SimpleNamespace(hf_config=SimpleNamespace(model_type="qwen3"), model="main", max_model_len=1 << 20)
        renderer = SimpleNamespace(get_tokenizer=lambda: tokenizer, tokenizer=tokenizer, _executor=self.thread)
        self._derenderer = OnlineDerenderer(
            config, renderer, request_logger=None, chat_template=tokenizer.chat_template,
            chat_template_content_format="string", **options,
        )  # fmt: skip
        tools = [TOOL] if "tool_parser" in options else None
        said = [{"role": "user", "content": ""}]
        self._request = ChatCompletionRequest.model_validate({"model": "main", "messages": said, "tools": tools})
        self._prompt = tokenizer(WORDS * 10)["input_ids"]

    def parse(self, token_ids: list[int], finish_reason: str | None, state: Any) -> tuple[Any, Any, float]:
        """Delta, next state and processor seconds."""
        from vllm.entrypoints.scale_out.token_in_token_out.protocol import (  # noqa: PLC0415
            DerenderStreamState,
            GenerateTokensStreamResponse,
        )

        began = time.thread_time()
        choice = {"index": 0, "token_ids": token_ids, "finish_reason": finish_reason}
        chunk = GenerateTokensStreamResponse.model_validate(
            {"request_id": "derender", "output_mode": "tokens", "choices": [choice]}
        )
        told, state = self._derenderer._derender_chat_stream_parsed(  # noqa: SLF001 - without FastAPI around it
            self._derenderer.parser, "main", chunk, state or DerenderStreamState(), self._request, None, self._prompt
        )
        return told.choices[0].delta.model_dump(exclude_none=True), state, time.thread_time() - began


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--tokens", type=int, default=1200, help="of the answer")
    parser.add_argument("--rate", type=float, default=100.0, help="tokens sampled a second")
    arguments = parser.parse_args()
    tokenizer = build_tokenizer([*(f" {word}" for word in WORDS.split()), CALL])  # a word is a token
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    figures, rows = {}, []
    for name, (options, begin, end) in ANSWERS.items():
        ids = _answer(tokenizer, begin, end, arguments.tokens)
        parse = Parser(tokenizer, options)
        messages = []
        for way, pace in (("eager", Eager()), ("paced", CoalescingPace())):
            heard = asyncio.run(listen(parse, ids, 1 / arguments.rate, pace))
            gaps = [later - sooner for sooner, later in zip(heard.at, heard.at[1:], strict=False)]
            told = {
                "portions": len(heard.at),
                "parsing_s": heard.parsing_s,
                "longest_gap_s": max(gaps),
                "last_token_late_s": heard.at[-1] - (len(ids) - 1) / arguments.rate,
                "wait_p50_ms": median(heard.waits) * 1e3,
                "wait_p99_ms": quantiles(heard.waits, n=100)[-1] * 1e3,
            }
            figures |= {f"{key}_{name}_{way}": value for key, value in told.items()}
            rows.append([name, way, *told.values()])
            messages.append(heard.message)
        if messages[0] != messages[1]:
            raise SystemExit(f"{name}: the two ways differ: {messages}")
    heads = [
        "answer",
        "way",
        "portions",
        "processor s",
        "longest gap s",
        "last token late s",
        "others wait ms",
        "p99",
    ]
    print(report.table(heads, rows))
    detail = {"tokens": arguments.tokens, "rate": arguments.rate, "answers": list(ANSWERS)}
    report.save("derender", figures, detail=detail, out=arguments.out)


async def listen(parser: Parser, ids: list[int], token_s: float, pace: CoalescingPace) -> ReceivedAnswer:
    loop, heard, state = asyncio.get_running_loop(), ReceivedAnswer(), None
    began = loop.time()
    async with asyncio.TaskGroup() as tasks:
        probing = tasks.create_task(_probe(parser.thread, heard.waits))
        async for portion in coalesce(_sampled(ids, token_s), pace):
            for delta in portion:
                with pace.work():
                    gain, state, spent_s = await loop.run_in_executor(
                        parser.thread, parser.parse, delta.token_ids, delta.finish_reason, state
                    )
                heard.parsing_s += spent_s
                heard.at.append(loop.time() - began)
                for call in gain.get("tool_calls", ()):
                    call.pop("id", None)
                extend(heard.message, gain)
        probing.cancel()
    return heard


async def _sampled(ids: list[int], token_s: float) -> AsyncGenerator[list[Delta], None]:
    """A token every `token_s`, whether or not anybody listens; all that are there at once, as from a socket."""
    loop = asyncio.get_running_loop()
    began, told = loop.time(), 0
    while told < len(ids):
        await asyncio.sleep(max(began + told * token_s - loop.time(), 0.0))
        due = min(int((loop.time() - began) / token_s) + 1, len(ids))
        if due > told:
            ended = "stop" if due == len(ids) else None
            new, told = ids[told:due], due
            yield [Delta(index=0, text="", token_ids=new, logprobs=[0.0] * len(new), finish_reason=ended)]


async def _probe(thread: ThreadPoolExecutor, waits: list[float]) -> None:
    loop = asyncio.get_running_loop()
    while True:
        began = loop.time()
        await loop.run_in_executor(thread, int)
        waits.append(loop.time() - began)
        await asyncio.sleep(PROBE_S)


def _answer(tokenizer: Any, begin: str, end: str, num_tokens: int) -> list[int]:
    head, tail = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (begin, end))
    words = tokenizer(WORDS, add_special_tokens=False)["input_ids"]
    room = num_tokens - len(head) - len(tail)
    return [*head, *(words * (room // len(words) + 1))[:room], *tail]


if __name__ == "__main__":
    main()
