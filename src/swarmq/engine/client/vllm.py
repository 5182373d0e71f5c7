"""Client of one vLLM server: render, generate, derender, tokenize (vLLM 0.30 to 0.33, started with `--enable-scale-out`)."""

from __future__ import annotations

import ast
import asyncio
import base64
import contextlib
import re
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any, Generic, TypeVar

import aiohttp
import msgspec

from swarmq.engine.auth import make_auth_headers
from swarmq.engine.client.protocol import (
    CompleteAnswer,
    Delta,
    EngineIdentity,
    EngineInfo,
    Json,
    Logprob,
    RenderedPrompt,
    RoutedExperts,
    merge,
)
from swarmq.engine.client.versions import check_server_version, strip_local_part
from swarmq.engine.client.vllm_errors import make_secret_error, map_connection_error, parse_refusal
from swarmq.errors import EngineAnswerError, EngineError, EngineRefusedError
from swarmq.messages import VersionSpan
from swarmq.weights.format.conventions import WORKER_FACTS_ROUTE

CONNECT_S = 5.0
KEEPALIVE_S = 3.0
"""Seconds after which an idle connection is closed; less than vLLM's 5 s, so that no request meets a closing connection."""
REQUEST_TIMEOUT_S = 30.0
"""Time limit in seconds for every request except sampling."""
INITIAL_LABEL = "default"
"""vLLM's label for the weights with which it was started."""
PASSTHROUGH_FIELDS = ("features", "reasoning_ended", "reasoning_parser_kwargs")
"""Fields of a rendering that are passed unchanged to `generate`."""
FINISH_REASONS = ("stop", "length", "repetition")
TOO_LONG = re.compile(r"maximum (context|model) length|max_model_len", re.IGNORECASE)


class EngineFaultError(EngineError):
    """The engine reports an internal failure."""


class EngineRouteError(EngineError):
    """The server does not have the requested route."""


class _PlainLogprob(msgspec.Struct, gc=False):
    """A log-probability entry without details."""

    logprob: float


Entry = TypeVar("Entry", _PlainLogprob, Logprob)


class _LogprobList(msgspec.Struct, Generic[Entry], gc=False):
    content: list[Entry] | None = None


class _VersionSpan(msgspec.Struct, gc=False):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct, Generic[Entry], gc=False):
    index: int
    text: str = ""
    token_ids: list[int] | None = None
    logprobs: _LogprobList[Entry] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    weight_versions: list[_VersionSpan] | None = None
    routed_experts: str | None = None


class _Chunk(msgspec.Struct, Generic[Entry], gc=False):
    choices: list[_Choice[Entry]] = []
    error: Json | None = None


# For each token only the needed fields are decoded, into objects that the garbage collector does not track.
_plain_decoder = msgspec.json.Decoder(_Chunk[_PlainLogprob])
_detailed_decoder = msgspec.json.Decoder(_Chunk[Logprob])


class VllmEngine:
    """`Engine` for a vLLM server. Create it with `VllmEngine.open`."""

    def __init__(self, url: str, session: aiohttp.ClientSession, *, deadline_s: float | None) -> None:
        self.url = url.rstrip("/")
        self._session = session
        self._deadline = aiohttp.ClientTimeout(total=deadline_s, sock_connect=CONNECT_S)
        lookup_s = min(REQUEST_TIMEOUT_S, deadline_s or REQUEST_TIMEOUT_S)
        self._lookup = aiohttp.ClientTimeout(total=lookup_s, sock_connect=CONNECT_S)
        self._brief = aiohttp.ClientTimeout(total=CONNECT_S)
        self._info: EngineInfo | None = None
        self._parsing = asyncio.Lock()

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, url: str, *, deadline_s: float | None, secret: str = "") -> AsyncIterator[VllmEngine]:
        """Open a client of the server at `url`. `deadline_s`: seconds for one answer; None if the caller limits it. `secret`: the
        secret that the server requires."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
        async with aiohttp.ClientSession(connector=connector, headers=make_auth_headers(secret)) as session:
            yield cls(url, session, deadline_s=deadline_s)

    async def info(self) -> EngineInfo:
        """Return the engine's facts, which are requested only once. Raises EngineError, also for an unsupported version of
        vLLM."""
        if self._info is None:
            with contextlib.suppress(EngineRouteError):  # a server without this route is accepted
                check_server_version(self.url, await self._fetch("/version"))
            models = await self._fetch("/v1/models")
            model = models["data"][0]
            self._info = EngineInfo(model=model["id"], max_model_len=model["max_model_len"])
        return self._info

    async def is_healthy(self) -> bool:
        try:
            async with self._session.get(self.url + "/health", timeout=self._brief) as response:
                return response.status == 200
        except (aiohttp.ClientError, OSError):
            return False

    async def weight_version(self) -> int | None:
        try:
            async with self._open_response("/weight_info", None, self._brief, method="GET") as response:
                return _parse_version(str(msgspec.json.decode(await response.read())["weight_version"]))
        except (msgspec.MsgspecError, KeyError, TypeError):
            return None

    async def render(self, chat: Json) -> RenderedPrompt:
        try:
            return await self._render(chat)
        except EngineFaultError as error:
            if await self.is_healthy():
                # A template or parser failed on the messages; it would also fail in another engine.
                raise EngineRefusedError(f"the engine cannot render this request: {error}", status=400) from error
            raise

    async def _render(self, chat: Json) -> RenderedPrompt:
        request = {**chat, "model": (await self.info()).model}
        if "prompt" in chat:
            del request["messages"]
            [prompt] = await self._request_json("POST", "/v1/completions/render", request)
            return RenderedPrompt(token_ids=prompt["token_ids"], sampling=prompt["sampling_params"])
        reply = await self._request_json("POST", "/v1/chat/completions/render", request)
        if tools := make_tools_strict(
            request
        ):  # a separate rendering, because templates would show the model the word `strict`
            held = await self._request_json("POST", "/v1/chat/completions/render", {**request, "tools": tools})
            reply["sampling_params"] = held["sampling_params"]
        passthrough = {key: reply[key] for key in PASSTHROUGH_FIELDS if reply.get(key) is not None}
        _check_image_placeholders(passthrough.get("features"), reply["token_ids"])
        calls_tools = bool(chat.get("tools")) and chat.get("tool_choice") != "none"
        return RenderedPrompt(
            token_ids=reply["token_ids"],
            sampling=reply["sampling_params"],
            passthrough=passthrough,
            needs_parsing=calls_tools or "reasoning_parser_kwargs" in passthrough,
        )

    async def generate(
        self, rendered: RenderedPrompt, *, stream: bool, detailed: bool = False
    ) -> AsyncGenerator[list[Delta], None]:
        body = {
            **rendered.passthrough,
            "token_ids": rendered.token_ids,
            "sampling_params": rendered.sampling,
            "output_mode": "text",
            "stream": stream,
        }
        try:
            async with self._open_response("/inference/v1/generate", body, self._deadline) as response:
                if not stream:
                    yield _parse_deltas([await response.read()], detailed=detailed)
                    return
                rest = b""
                while block := await response.content.readany():
                    # Yield all events received so far at once, so that a slow reader gets fewer, larger portions.
                    *events, rest = (rest + block).split(b"\n\n")
                    if chunks := [event[6:] for event in events if event.startswith(b"data: {")]:
                        yield _parse_deltas(chunks, detailed=detailed)
        except EngineFaultError as error:
            if rendered.sampling.get("structured_outputs") and await self.is_healthy():
                # vLLM reports a failed grammar compilation as an internal failure; another engine would fail, too.
                raise EngineRefusedError("the engine cannot compile the requested answer format", status=400) from error
            raise

    async def derender(self, chat: Json, prompt_ids: Sequence[int], answers: Sequence[CompleteAnswer]) -> list[Json]:
        body = {
            "chat_request": {**strip_messages(chat), "model": (await self.info()).model},
            "prompt_token_ids": prompt_ids,
            "generate_response": {
                "request_id": "derender",
                "output_mode": "tokens",
                "prompt_token_ids": prompt_ids,
                "choices": [
                    {"index": i, "token_ids": answer.token_ids, "finish_reason": answer.finish_reason}
                    for i, answer in enumerate(answers)
                ],
            },
        }
        reply = await self._request_json("POST", "/v1/chat/completions/derender", body)
        return [_drop_none_fields(choice["message"]) for choice in reply["choices"]]

    async def derender_delta(
        self, chat: Json, prompt_ids: Sequence[int], token_ids: Sequence[int], *, finish_reason: str | None, state: Any
    ) -> tuple[Json, Any]:
        choice = {"index": 0, "token_ids": token_ids, "finish_reason": finish_reason}
        body = {
            "stream": True,
            "chat_request": {**strip_messages(chat), "model": (await self.info()).model},
            "prompt_token_ids": prompt_ids,
            "generate_chunk": {"request_id": "derender", "output_mode": "tokens", "choices": [choice]},
            "stream_state": state,
        }
        async with self._wait_for_parser(first=state is None):
            reply = await self._request_json("POST", "/v1/chat/completions/derender", body)
        choices = reply["chunk"]["choices"]
        return _drop_none_fields(choices[0]["delta"]) if choices else {}, reply["stream_state"]

    @contextlib.asynccontextmanager
    async def _wait_for_parser(self, *, first: bool) -> AsyncIterator[None]:
        """Allow only one portion of output to be parsed at a time, because vLLM renders prompts on the same thread.

        The first portion of an answer is cheap and does not wait.
        """
        if first:
            yield
            return
        try:
            async with asyncio.timeout(self._lookup.total), self._parsing:
                yield
        except TimeoutError as error:
            raise EngineError(f"{self.url} did not parse an answer within {self._lookup.total:g} s") from error

    async def tokenize(self, text: str) -> list[int]:
        reply = await self._request_json("POST", "/tokenize", {"prompt": text, "add_special_tokens": False})
        try:
            tokens: list[int] = reply["tokens"]
        except (KeyError, TypeError) as error:
            raise EngineError(f"{self.url}/tokenize answered without `tokens`: is it a vLLM server?") from error
        return tokens

    async def identity(self) -> EngineIdentity:
        version, facts = "", {}
        with contextlib.suppress(EngineRouteError):
            version = (await self._fetch("/version"))["version"]
        with contextlib.suppress(EngineRouteError, EngineFaultError):  # without swarmq's middleware or worker extension
            facts = (await self._fetch(WORKER_FACTS_ROUTE))["results"][0]
        return msgspec.convert(facts | {"vllm": strip_local_part(version)}, EngineIdentity)

    async def _fetch(self, path: str) -> Any:
        return await self._request_json("GET", path, None)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        reply = await self._request_json("POST", "/detokenize", {"tokens": token_ids})
        return str(reply["prompt"])

    async def _request_json(self, method: str, path: str, body: Json | None) -> Any:
        async with self._open_response(path, body, self._lookup, method=method) as response:
            raw = await response.read()
        try:
            reply = msgspec.json.decode(raw)
        except msgspec.MsgspecError as error:
            raise EngineError(f"{self.url}{path} did not answer with JSON: is it a vLLM server?") from error
        return reply

    @contextlib.asynccontextmanager
    async def _open_response(
        self, path: str, body: Json | None, limit: aiohttp.ClientTimeout, *, method: str = "POST"
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        data = None if body is None else msgspec.json.encode(body)
        headers = {"content-type": "application/json"}
        try:
            async with await self._send_with_retry(method, path, data=data, headers=headers, timeout=limit) as response:
                if response.status != 200:
                    raise self._map_error_response(path, response.status, await response.read())
                yield response
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ConnectionTimeoutError):
                raise EngineError(f"{self.url}{path} did not answer within {limit.total or CONNECT_S:g} s") from error
            self._info = None  # another server at this url may serve another model
            raise map_connection_error(self.url, error) from error

    async def _send_with_retry(self, method: str, path: str, **request: Any) -> aiohttp.ClientResponse:
        """Send a request and return the response, of which only the headers have been read. Retries once if the server has
        closed an idle connection just before the request."""
        try:
            return await self._session.request(method, self.url + path, **request)
        except aiohttp.ClientConnectorError:
            raise  # nothing listens there
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            return await self._session.request(method, self.url + path, **request)

    def _map_error_response(self, path: str, status: int, raw: bytes) -> EngineError:
        try:
            details = msgspec.json.decode(raw)["error"]
            message, param = str(details["message"]), details.get("param")
        except (msgspec.MsgspecError, KeyError, TypeError):
            message, param = raw[:200].decode(errors="replace"), None
        if status == 401:
            return make_secret_error(self.url)
        if status == 404 and param != "model":
            return EngineRouteError(f"{self.url}{path} does not exist: start vLLM with --enable-scale-out")
        if status == 501:  # vLLM does not implement this request, but answers others
            return EngineRefusedError(message, status=400, param=param)
        if status >= 500 or status == 404:
            kind = EngineFaultError if status == 500 else EngineError
            return kind(f"the engine at {self.url} failed ({status}): {message}")
        if TOO_LONG.search(message):
            return EngineRefusedError(message, status=status, code="context_length_exceeded", param=param)
        sentence, param, code = parse_refusal(message, param)
        return EngineRefusedError(sentence, status=status, code=code, param=param)


def make_tools_strict(chat: Json) -> list[Json]:
    """Return the tools, with tools that the request forces marked `strict` unless the agent set it, because vLLM does not hold
    the arguments of other tools to their schema. Returns [] if nothing changes."""
    choice, tools = chat.get("tool_choice"), chat.get("tools")
    if not isinstance(tools, list) or not (choice == "required" or isinstance(choice, dict)):
        return []
    name = (choice.get("function") or {}).get("name") if isinstance(choice, dict) else None
    held = [_make_tool_strict(tool, name) for tool in tools]
    return held if held != tools else []


def _make_tool_strict(tool: Json, name: str | None) -> Json:
    """Return one tool, marked `strict` if it is forced. `name`: name of the only forced tool; None: all tools are forced."""
    function = tool.get("function")
    if not isinstance(function, dict) or function.get("strict") is not None or name not in (None, function.get("name")):
        return tool
    return {**tool, "function": {**function, "strict": True}}


def strip_messages(chat: Json) -> Json:
    """Return the chat request without message texts, which vLLM's parsers do not need: they read tools and arguments, and count
    earlier calls.

    Sending all messages would make vLLM check them again for every portion of a stream.
    """
    called = [m for m in chat["messages"] if m.get("role") == "assistant" and m.get("tool_calls")]
    skeleton = [{"role": "assistant", "tool_calls": message["tool_calls"]} for message in called]
    return {**chat, "messages": skeleton or [{"role": "user", "content": ""}]}


def _parse_deltas(chunks: Sequence[bytes], *, detailed: bool) -> list[Delta]:
    """Parse chunks into one delta per choice, in order of choices."""
    decoder = _detailed_decoder if detailed else _plain_decoder
    pieces: dict[int, list[Delta]] = {}
    for raw in chunks:
        for choice in _decode_chunk(raw, decoder).choices:
            pieces.setdefault(choice.index, []).append(_make_delta(choice, detailed=detailed))
    return [merge(pieces[index]) for index in sorted(pieces)]


def _decode_chunk(raw: bytes, decoder: msgspec.json.Decoder[Any]) -> _Chunk[Any]:
    try:
        chunk: _Chunk[Any] = decoder.decode(raw)
    except msgspec.MsgspecError as error:
        raise EngineAnswerError("malformed", f"vLLM's answer has an unexpected format: {error}") from error
    if chunk.error:
        raise EngineError(f"the engine failed while it sampled: {chunk.error.get('message')}")
    return chunk


def _make_delta(choice: _Choice[Any], *, detailed: bool) -> Delta:
    if choice.finish_reason not in (None, *FINISH_REASONS):
        raise EngineError(f"the engine aborted an answer ({choice.finish_reason})")
    token_ids = choice.token_ids or []
    entries = (choice.logprobs.content if choice.logprobs else None) or []
    if len(token_ids) != len(entries):
        raise EngineAnswerError("logprobs", f"{len(entries)} log-probabilities for {len(token_ids)} tokens")
    return Delta(
        index=choice.index,
        text=choice.text,
        token_ids=token_ids,
        logprobs=[entry.logprob for entry in entries],
        entries=entries if detailed else [],
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        versions=_parse_spans(choice.weight_versions) if choice.weight_versions else (),
        routed_experts=_parse_routed_experts(choice.routed_experts) if choice.routed_experts else None,
    )


def _parse_routed_experts(encoded: str) -> RoutedExperts:
    """Decode the base64 of a NumPy file (.npy, version 1) with an array [tokens, layers, experts per token]. Proxies have no NumPy."""
    try:
        raw = base64.b64decode(encoded, validate=True)
        begin = 10 + int.from_bytes(raw[8:10], "little")
        header = ast.literal_eval(raw[10:begin].decode())
        num_tokens, layers, experts = header["shape"]
        width = {"|u1": 1, "<u2": 2}[header["descr"]]
        if header["fortran_order"] or len(raw) - begin != num_tokens * layers * experts * width:
            raise ValueError(f"{len(raw) - begin} bytes for {header}")
    except (ValueError, KeyError, TypeError, SyntaxError) as error:
        raise EngineAnswerError(
            "routed_experts", f"vLLM's routed experts have an unexpected format: {error!r}"
        ) from error
    return RoutedExperts(num_tokens=num_tokens, ids=raw[begin:])


def _check_image_placeholders(features: Json | None, token_ids: Sequence[int]) -> None:
    """Raise EngineRefusedError if an image's placeholders are not all the same token: vLLM's `generate` takes every token in
    the span for the image, and the mismatch kills the engine."""
    for places in (features or {}).get("mm_placeholders", {}).values():
        for place in places:
            if len(set(token_ids[place["offset"] : place["offset"] + place["length"]])) > 1:
                raise EngineRefusedError(
                    "vLLM cannot sample from images of this model, because it stands for an image with several different tokens: "
                    "send text only, or use a model with one image token (LLaVA 1.5, Qwen2.5-VL, Qwen3-VL)",
                    status=400,
                    param="messages",
                )


def _parse_spans(spans: Sequence[_VersionSpan]) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(version=_parse_version(span.version), start=span.start, end=span.end) for span in spans)


def _parse_version(name: str) -> int:
    """Return the weight version of a label. Raises EngineError for a label that swarmq did not set, because the version of its
    tokens is unknown."""
    if name == INITIAL_LABEL:
        return 0
    try:
        return int(name)
    except ValueError as error:
        raise EngineError(
            f"the engine's weights have the label {name!r}, which swarmq did not set: something else updated them"
        ) from error


def _drop_none_fields(value: Any) -> Any:
    """Return a message or delta without None fields; vLLM sends every field it knows."""
    if isinstance(value, dict):
        return {key: _drop_none_fields(field) for key, field in value.items() if field is not None}
    return [_drop_none_fields(item) for item in value] if isinstance(value, list) else value
