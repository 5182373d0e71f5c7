"""The path of every model call: render -> stitch -> generate -> derender -> record -> answer.

begin()     renders, stitches and waits for the first token; until then a failed engine is replaced by another
stream()    yields the deltas of each choice, and a complete choice when its turn is confirmed
whole()     returns the complete choices, all confirmed

A dialect translates a request into a `RequestContext`, and these results into its own form.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from functools import partial
from typing import Any, Self, TypeVar

import msgspec
import structlog

from swarmq.engine.client.image_features import RenderedImage, list_images, move_images, prepare_image
from swarmq.engine.client.protocol import CompleteAnswer, Delta
from swarmq.errors import EngineAnswerError, EngineError, EngineRefusedError
from swarmq.messages import MAX_IMAGE_BYTES, Image, Timings, VersionSpan, pack_ids, unpack_ids
from swarmq.proxy.active_call import ActiveCall
from swarmq.proxy.completions.deadline import Deadline
from swarmq.proxy.completions.limiter import CallLimiter
from swarmq.proxy.completions.live_sampling import LiveSampling
from swarmq.proxy.completions.recorder import Recorder
from swarmq.proxy.completions.remote_images import RemoteImages
from swarmq.proxy.counters import Counters
from swarmq.proxy.deltas import LeadingBlanks, StopTrim, extend
from swarmq.proxy.engines.pool import EngineLane, EnginePool
from swarmq.proxy.engines.stream_coalescing import CoalescingPace, coalesce
from swarmq.proxy.episodes.cache import EpisodeCache, EpisodeState
from swarmq.proxy.episodes.conversation_graph import Stitched, find_places, history_of, limit_to_images
from swarmq.proxy.episodes.prompt_stitching import stitch
from swarmq.proxy.episodes.special_tokens import escape
from swarmq.proxy.episodes.token_budget import Reservation
from swarmq.proxy.http_errors import RefusedError
from swarmq.proxy.requests import (
    PROXY_FIELDS,
    ChoiceDelta,
    ChoiceResult,
    ChoiceState,
    RequestContext,
    stop_strings,
    strip_end_token,
)
from swarmq.proxy.sampling_params import resolve_sampling

Json = dict[str, Any]
T = TypeVar("T")
log = structlog.get_logger()


class Completions:
    """Pipeline for the model calls of one run."""

    def __init__(
        self,
        *,
        tuning: LiveSampling,
        pools: dict[str, EnginePool],
        episodes: EpisodeCache,
        recorder: Recorder,
        meter: Counters,
        gate: CallLimiter,
        images: RemoteImages,
        timeout_s: float,
    ) -> None:
        self._tuning = tuning
        self._pools = pools
        self._episodes = episodes
        self._recorder = recorder
        self._meter = meter
        self._gate = gate
        self._images = images
        self._timeout_s = timeout_s

    async def begin(self, request: RequestContext) -> ActiveCall:
        """Begin a model call. Raises RefusedError, EngineRefusedError, DeadlineError, or EngineError if no engine could start it."""
        with ExitStack() as held:
            memory = self._episodes.open_call(request.claims.episode_id, request.claims.client)
            held.callback(self._episodes.close_call, memory)
            allowed = self._tuning.episode_tokens(request.claims)
            memory.budget.take_call(max_calls=self._tuning.episode_calls(request.claims), max_tokens=allowed)
            counts, is_first = self._meter.by_kind[self._counted_kind(request)], memory.budget.calls == 1
            counts["calls"] += 1
            try:
                with closing(Deadline(request.began, self._timeout_s)) as deadline, deadline:
                    await self._pools[request.policy].ready()
                    held.callback((await self._gate.enter()).give_back)
                    request = await self._inline_images(request)
                    begun = await self._try_engines(
                        request, memory, partial(self._begin_on_lane, request=request, memory=memory)
                    )
            except BaseException:
                memory.budget.give_call_back()
                raise
            counts["episodes"] += is_first
            counts["prompt_tokens"] += begun.prompt_tokens
            begun.held = held.pop_all()
            return begun

    async def _try_engines(
        self, request: RequestContext, memory: EpisodeState, attempt: Callable[[EngineLane], Awaitable[T]]
    ) -> T:
        """Start a model call on the best engine, or on another if it fails; if all are down, wait for an engine and start again."""
        pool = self._pools[request.policy]
        while True:
            began = time.monotonic()
            try:
                return await self._try_ready_engines(request, memory, attempt)
            except EngineRefusedError:
                raise
            except EngineError:
                if not await pool.out(since=began) or not await pool.ready():
                    raise

    async def _try_ready_engines(
        self, request: RequestContext, memory: EpisodeState, attempt: Callable[[EngineLane], Awaitable[T]]
    ) -> T:
        failure = EngineError(f"policy {request.policy} has no engine")
        for lane in self._pools[request.policy].order(memory.lanes.get(request.policy), request.claims.episode_id):
            try:
                made = await attempt(lane)
            except EngineRefusedError:
                raise
            except EngineError as error:
                lane.fail()
                failure = error
                log.warning("engine_failed", engine=lane.engine.url, policy=request.policy, reason=str(error))
            else:
                memory.lanes[request.policy] = lane
                return made
        raise failure

    async def stream(self, begun: ActiveCall) -> AsyncGenerator[ChoiceDelta | ChoiceResult, None]:
        """Yield deltas and complete choices. Raises EngineError or BrokerError in the middle, after which the call is over."""
        async with self._receiving(begun) as answer:
            async for portion in answer:
                for delta in portion:
                    choice = answer.take(delta)
                    if begun.rendered.needs_parsing:
                        gain = await _parse_gain(begun, choice, delta)
                    else:
                        gain = {"content": delta.text} if delta.text else {}
                        choice.message["content"] += delta.text
                    yield ChoiceDelta(index=choice.index, delta=gain, logprobs=delta.entries)
                    if delta.finish_reason:
                        yield await self._finish_choice(begun, choice)

    async def whole(self, begun: ActiveCall) -> list[ChoiceResult]:
        """Return every choice, in order. Raises EngineError or BrokerError."""
        async with self._receiving(begun) as answer:
            async for portion in answer:
                for delta in portion:
                    answer.take(delta).message["content"] += delta.text
            ordered = [answer.choices[index] for index in sorted(answer.choices)]
            if begun.rendered.needs_parsing:
                await _derender(begun, ordered)
            first, *others = ordered
            # first, so that the turns of the other choices can refer to its prompt
            ended = await self._finish_choice(begun, first)
            return [ended, *await asyncio.gather(*(self._finish_choice(begun, choice) for choice in others))]

    async def count(self, request: RequestContext) -> int:
        """Return the number of tokens of the prompt. Raises RefusedError, EngineRefusedError, DeadlineError or EngineError."""

        async def attempt(lane: EngineLane) -> int:
            with self._use_lane(lane, request.policy):
                return len(
                    (
                        await lane.engine.render(
                            await self._escape_special_tokens(lane, _select_for_engine(request.chat))
                        )
                    ).token_ids
                )

        with ExitStack() as held:
            memory = self._episodes.open_call(request.claims.episode_id, request.claims.client)
            held.callback(self._episodes.close_call, memory)
            with closing(Deadline(request.began, self._timeout_s)) as deadline, deadline:
                held.callback((await self._gate.enter()).give_back)
                request = await self._inline_images(request)
                return await self._try_engines(request, memory, attempt)

    async def _inline_images(self, request: RequestContext) -> RequestContext:
        """Return the request with the content of images that it names by URL. Raises RefusedError."""
        return msgspec.structs.replace(request, chat=await self._images.inline(request.chat))

    async def _begin_on_lane(self, lane: EngineLane, request: RequestContext, memory: EpisodeState) -> ActiveCall:
        chat = _select_for_engine(request.chat)
        choices = request.num_choices
        allowed = self._tuning.episode_tokens(request.claims)
        with self._use_lane(lane, request.policy):
            escaped = await self._escape_special_tokens(lane, chat)
            rendered = await lane.engine.render(escaped)
            rests = request.stream and rendered.needs_parsing and (not chat.get("tools") or await lane.finds_calls())
            history = history_of(chat)
            stitched = await stitch(
                memory.graph(request.policy),
                history,
                rendered.token_ids,
                lane.engine,
                request_id=request.request_id,
                lost=memory.lost,
                messages=chat["messages"],
            )
            images: tuple[Image, ...] = ()
            if features := rendered.passthrough.get("features"):
                is_trained = request.claims.mode == "train" and self._tuning.job.policies[request.policy].trained
                shown = list_images(features) if is_trained else []
                if stitched.repaired:  # the engine finds images by their places, which are those in the rendering
                    moved = find_places(stitched, pack_ids(rendered.token_ids), shown)
                    if moved:
                        features, shown = move_images(features, shown, moved)
                        rendered = msgspec.structs.replace(
                            rendered, passthrough={**rendered.passthrough, "features": features}
                        )
                    else:
                        stitched = Stitched(prompt=pack_ids(rendered.token_ids), branch="drift")
                if shown:
                    stitched = msgspec.structs.replace(stitched, images=tuple((one.offset, one.key) for one in shown))
                    graph = memory.graph(request.policy)
                    sent = graph.origin(stitched, history, request.request_id).shared
                    images = await _prepare_images(shown, stitched, sent, graph.image_bytes)
            setting = self._tuning.sampling(request.policy, request.claims.kind)
            prompt_ids = unpack_ids(stitched.prompt).tolist() if stitched.repaired else rendered.token_ids
            tuned = resolve_sampling(
                request.chat,
                rendered.sampling,
                mode=request.claims.mode,
                setting=setting,
                prompt_tokens=len(prompt_ids),
                max_model_len=(await lane.engine.info()).max_model_len,
                room_left=memory.budget.room(allowed, choices),
                names=request.names,
                cuts=request.cuts,
            )
            if tuned.cut_from and setting.max_tokens:
                self._meter.cut(request.policy, asked=tuned.cut_from, limit=setting.max_tokens)
            policy = self._tuning.job.policies[request.policy]
            if policy.engine.keep_cache:
                salt = await memory.cache_salt(request.policy, lane)
                rendered = msgspec.structs.replace(rendered, passthrough=_add_cache_salt(rendered.passthrough, salt))
            reserved = Reservation(memory.budget, choices, tuned.record.max_tokens or 0) if allowed else None
            together = lane.together(self._gate.open)
            if request.stream and (rests or not rendered.needs_parsing) and together > 1:
                tuned.params.setdefault("stream_interval", together)
            policy_replays = policy.replays_routing
            replays_routing = policy_replays and request.claims.mode == "train"
            if policy_replays:
                unrecorded = max(stitched.shared - 1, 0) if replays_routing else len(prompt_ids)
                tuned.params["routed_experts_prompt_start"] = unrecorded
            fresh = pack_ids(rendered.token_ids)
            rendered = msgspec.structs.replace(rendered, token_ids=prompt_ids, sampling=tuned.params)
            version = lane.version or 0
            deltas = lane.engine.generate(rendered, stream=request.stream, detailed=bool(chat.get("logprobs")))
            pace = CoalescingPace()
            if rests:
                deltas = coalesce(deltas, pace)
            try:
                first: list[Delta] = await anext(deltas, [])
            except BaseException:
                if reserved:
                    reserved.end()
                raise
        filled = msgspec.structs.replace(
            request,
            history=history,
            stitched=stitched,
            images=images,
            fresh=fresh,
            sampling=tuned.record,
            overridden=tuned.overridden if escaped is chat else (*tuned.overridden, "special_tokens"),
        )
        return ActiveCall(
            request=filled,
            memory=memory,
            lane=lane,
            chat=chat,
            rendered=rendered,
            version=version,
            replays_routing=replays_routing,
            first=first,
            deltas=deltas,
            reserved=reserved,
            pace=pace,
        )

    async def _escape_special_tokens(self, lane: EngineLane, chat: Json) -> Json:
        """Return the chat with special tokens in its texts escaped, if the run wants that."""
        if self._tuning.job.proxy.special_tokens == "keep" or "prompt" in chat:
            return chat
        return await escape(chat, lane.is_token)

    @asynccontextmanager
    async def _receiving(self, begun: ActiveCall) -> AsyncIterator[_ArrivingAnswer]:
        """Open a call's answer; the call is closed with it."""
        with (
            self._use_lane(begun.lane, begun.request.policy),
            closing(Deadline(begun.request.began, self._timeout_s)) as deadline,
        ):
            try:
                yield _ArrivingAnswer(begun, deadline)
            finally:
                await begun.close()

    @contextmanager
    def _use_lane(self, lane: EngineLane, policy: str) -> Iterator[None]:
        """Mark the lane as busy. If the engine gives an unusable answer, count that and avoid the engine for a while."""
        try:
            with lane.occupy():
                yield
        except EngineAnswerError as error:
            lane.fail()
            self._meter.refuse_answer(policy, lane.engine.url, error)
            raise

    def _counted_kind(self, request: RequestContext) -> str:
        """Return the kind under which a call is counted: its key's kind, or "" for a kind that the job does not have."""
        return request.claims.kind if request.claims.kind in self._tuning.job.task_kinds else ""

    async def _finish_choice(self, begun: ActiveCall, choice: ChoiceState) -> ChoiceResult:
        assert choice.finish_reason
        memory = begun.memory
        if begun.reserved:
            begun.reserved.sampled(len(choice.token_ids))
        else:
            memory.budget.sampled_tokens += len(choice.token_ids)
        named = isinstance(begun.chat.get("tool_choice"), dict)  # a call that was demanded by name ends with `stop`
        calls_tools = choice.finish_reason == "stop" and choice.message.get("tool_calls") and not named
        total_s = time.monotonic() - begun.request.began
        if begun.request.stream:
            begun.lane.measure_stream(len(choice.token_ids) - 1, total_s - choice.first_token_s)
        reasoning = choice.message.get("reasoning")
        if begun.replays_routing and choice.routed_experts is None:
            raise EngineAnswerError(
                "routed_experts",
                f"the engine at {begun.lane.engine.url} returned no routed experts, which train.routing_replay needs: start vLLM with "
                "--enable-return-routed-experts, or set train.routing_replay to false",
            )
        result = ChoiceResult(
            index=choice.index,
            token_ids=choice.token_ids,
            logprobs=choice.logprobs,
            versions=choice.versions or (VersionSpan(version=begun.version, start=0, end=len(choice.token_ids)),),
            finish_reason="tool_calls" if calls_tools else choice.finish_reason,
            stop_reason=choice.stop_reason,
            message=choice.message,
            timings=Timings(began_at=begun.request.began_at, first_token_s=choice.first_token_s, total_s=total_s),
            entries=choice.entries,
            routed_experts=choice.routed_experts if begun.replays_routing else None,
            num_reasoning_tokens=len(await begun.lane.engine.tokenize(reasoning)) if reasoning else 0,
        )
        call_id = begun.request.call_id(choice.index)
        begun.recorded.append(call_id)
        graph = memory.graph(begun.request.policy)
        await self._recorder.record(begun.request, result, graph, kind=self._counted_kind(begun.request))
        if conversation := begun.request.conversation:
            name = conversation.name(call_id, choice.message)
            memory.conversations.keep(name, [*conversation.messages, choice.message])
        return result


class _ArrivingAnswer:
    """The portions of a call's answer, to iterate over, and the choices that they fill. No generator, because every portion passes here."""

    def __init__(self, begun: ActiveCall, deadline: Deadline) -> None:
        self._begun, self._deadline = begun, deadline
        self._first: list[Delta] | None = begun.first
        self.choices: dict[int, ChoiceState] = {}

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Delta]:
        """Raises EngineError if the last deltas are missing."""
        portion, self._first = self._first, None
        if portion is None:
            with self._deadline:
                portion = await anext(self._begun.deltas, None)
        if portion is None:
            self._check_complete()
            raise StopAsyncIteration
        return portion

    def take(self, delta: Delta) -> ChoiceState:
        """Add a delta to its choice, and return the choice."""
        if delta.index not in self.choices:
            self.choices[delta.index] = ChoiceState(delta.index, stop_strings(self._begun.chat))
        choice = self.choices[delta.index]
        choice.take(delta, time.monotonic() - self._begun.request.began)
        return choice

    def _check_complete(self) -> None:
        ended = sum(choice.finish_reason is not None for choice in self.choices.values())
        if ended != self._begun.rendered.sampling.get("n", 1):
            raise EngineError("the engine stopped before its answer was complete")


async def _parse_gain(begun: ActiveCall, choice: ChoiceState, delta: Delta) -> Json:
    """Parse a delta of tokens, add it to the choice's message, and return what the agent gets now."""
    if delta.finish_reason:
        return await _finish_message(begun, choice, delta)
    gain = await _parse_delta(begun, choice, delta)
    extend(choice.message, gain)
    gain.pop("tool_calls", None)  # sent at the end: a call sent in part could not be taken back
    return gain


async def _parse_delta(begun: ActiveCall, choice: ChoiceState, delta: Delta) -> Json:
    """Parse a delta of tokens with the engine's parsers and return the delta of the message."""
    with begun.pace.work():
        gain, choice.state = await begun.lane.engine.derender_delta(
            begun.chat,
            begun.rendered.token_ids,
            strip_end_token(delta.token_ids, delta.finish_reason, delta.stop_reason),
            finish_reason=delta.finish_reason,
            state=choice.state,
        )
    met = delta.stop_reason if isinstance(delta.stop_reason, str) else None
    ended = delta.finish_reason is not None
    return choice.hold_blanks(choice.trim(gain, met=met, ended=ended), ended=ended)


async def _finish_message(begun: ActiveCall, choice: ChoiceState, delta: Delta) -> Json:
    """Return the rest of a choice that ends with this delta, from a parse of all of its tokens, because streaming parsers may
    misread broken or unfinished tool calls. If that parse contradicts text that was already streamed, the streaming parsers'
    result stands."""
    streamed = choice.message
    sent = {name: streamed.get(name) or "" for name in ("reasoning", "content")}
    await _derender(begun, [choice])
    if not all((choice.message.get(name) or "").startswith(text) for name, text in sent.items()):
        choice.message = streamed
        extend(streamed, await _parse_delta(begun, choice, delta))
    gain = {name: more for name, text in sent.items() if (more := (choice.message.get(name) or "")[len(text) :])}
    calls = choice.message.get("tool_calls") or ()
    return {**gain, "tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]} if calls else gain


async def _derender(begun: ActiveCall, choices: Sequence[ChoiceState]) -> None:
    """Replace plain text by parsed messages. A choice without text has nothing to parse."""
    words = {c.index: strip_end_token(c.token_ids, c.finish_reason, c.stop_reason) for c in choices}
    talking = [choice for choice in choices if words[choice.index]]
    if not talking:
        return
    answers = [CompleteAnswer(token_ids=words[c.index], finish_reason=c.finish_reason or "stop") for c in talking]
    messages = await begun.lane.engine.derender(begun.chat, begun.rendered.token_ids, answers)
    for choice, message in zip(talking, messages, strict=True):
        met = choice.stop_reason if isinstance(choice.stop_reason, str) else None
        choice.message = {"role": "assistant", "content": ""}
        message.pop("role", None)
        trimmed = StopTrim(stop_strings(begun.chat))(message, met=met, ended=True)
        extend(choice.message, LeadingBlanks()(trimmed, ended=True))


async def _prepare_images(
    shown: Sequence[RenderedImage], stitched: Stitched, sent: int, sent_bytes: int
) -> tuple[Image, ...]:
    """Return the images that a prompt's turn may have to carry. `sent`: number of first tokens that earlier turns have; `sent_bytes`: size of
    the images in them. Raises RefusedError if the episode's images would be too large to train."""
    shared = limit_to_images(stitched.parent, stitched.shared, stitched.images) if stitched.parent else 0
    new = [image for image in shown if image.offset >= shared]
    prepared = await asyncio.to_thread(lambda: tuple(map(prepare_image, new)))
    size = sent_bytes + sum(len(image.patches) for image in prepared if image.offset >= sent)
    if size > MAX_IMAGE_BYTES:
        raise RefusedError(
            f"the images of this episode would have {size} bytes as compressed pixels, more than the {MAX_IMAGE_BYTES} that an episode "
            "can be trained with: send fewer or smaller ones",
            code="images_too_large", param="messages",
        )  # fmt: skip
    return prepared


def _add_cache_salt(passthrough: Json, salt: str) -> Json:
    """Return the fields with a salt for what the engine caches: keys and values, and the vision tower's outputs, which vLLM finds by the
    images' hashes alone."""
    salted = {**passthrough, "cache_salt": salt}
    if features := passthrough.get("features"):
        hashes = {kind: [f"{salt}:{key}" for key in keys] for kind, keys in features["mm_hashes"].items()}
        salted["features"] = {**features, "mm_hashes": hashes}
    return salted


def _select_for_engine(chat: Json) -> Json:
    return {key: value for key, value in chat.items() if key not in PROXY_FIELDS}
