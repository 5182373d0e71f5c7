"""The one way of every dialect: messages -> render -> stitch -> generate -> derender -> record -> answer.

    begin()     renders, stitches and waits for the first token; until then a failed engine is replaced by another
    stream()    yields what each choice gains; the end of a choice only when its turn is confirmed
    whole()     the complete choices, all confirmed

A dialect translates a request into a `Call` and these answers into its own form.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager, closing, contextmanager
from functools import partial
from typing import Any, TypeVar

import msgspec
import structlog

from swarmq.engine.client.protocol import Answer, Delta, Rendered
from swarmq.errors import EngineAnswerError, EngineError, EngineRefusedError
from swarmq.messages import Timings, VersionSpan, pack_ids, unpack_ids
from swarmq.proxy.completions.deadline import Deadline
from swarmq.proxy.completions.engine_pool import Lane, Pool
from swarmq.proxy.completions.limiter import Gate
from swarmq.proxy.completions.live_sampling import Tuning
from swarmq.proxy.completions.recorder import Asked, Recorder, Sampled, call_id
from swarmq.proxy.completions.stream_coalescing import Pace, paced
from swarmq.proxy.counters import Meter
from swarmq.proxy.deltas import LeadingBlanks, StopTrim, extend
from swarmq.proxy.episodes.cache import Episodes, Memory
from swarmq.proxy.episodes.conversation_graph import Stitched, history_of
from swarmq.proxy.episodes.prompt_stitching import stitch
from swarmq.proxy.episodes.special_tokens import escape
from swarmq.proxy.episodes.token_budget import Reservation
from swarmq.proxy.http_errors import RefusedError
from swarmq.proxy.requests import OURS, Call, Choice, Ended, Gained, spoken, stops_of
from swarmq.proxy.sampling_params import effective

Json = dict[str, Any]
T = TypeVar("T")
log = structlog.get_logger()


class Begun(msgspec.Struct, kw_only=True):
    """A call whose first tokens are here. Close `deltas` to cancel it."""

    call: Call
    memory: Memory
    lane: Lane
    chat: Json
    rendered: Rendered
    asked: Asked
    overridden: tuple[str, ...]
    version: int
    """Of the engine's weights before it was asked, as far as is known."""
    first: list[Delta]
    deltas: AsyncGenerator[list[Delta], None]
    reserved: Reservation | None
    pace: Pace
    """Of what is parsed while it streams."""
    held: ExitStack = msgspec.field(default_factory=ExitStack)
    """Its place inside, and its memory."""
    recorded: list[str] = msgspec.field(default_factory=list)
    """Call ids of the choices whose turns may be in the queue."""
    failed: bool = False
    """Its agent was told of an error instead of the end."""
    ended: int = 0
    """Choices whose ends were written to a stream."""
    closing: bool = False
    """What a stream says next is the last."""

    async def close(self) -> None:
        """Give everything back. Doing it again does nothing."""
        if self.reserved:
            self.reserved.end()
        self.held.close()
        await self.deltas.aclose()

    @property
    def prompt_tokens(self) -> int:
        return len(self.rendered.token_ids)


class Completions:
    """Answers calls of one run."""

    def __init__(
        self,
        *,
        run: str,
        tuning: Tuning,
        pools: dict[str, Pool],
        episodes: Episodes,
        recorder: Recorder,
        meter: Meter,
        gate: Gate,
        timeout_s: float,
    ) -> None:
        self._run = run
        self._tuning = tuning
        self._pools = pools
        self._episodes = episodes
        self._recorder = recorder
        self._meter = meter
        self._gate = gate
        self._timeout_s = timeout_s

    async def begin(self, call: Call) -> Begun:
        """Raises RefusedError, EngineRefusedError, DeadlineError, or EngineError when no engine could start it."""
        with ExitStack() as held:
            memory = self._episodes.open_call(call.claims.episode_id, call.claims.client)
            held.callback(self._episodes.close_call, memory)
            allowed = self._tuning.episode_tokens(call.claims)
            memory.budget.take_call(max_calls=self._tuning.episode_calls(call.claims), max_tokens=allowed)
            counts, is_first = self._meter.by_kind[self._kind(call)], memory.budget.calls == 1
            counts["calls"] += 1
            try:
                with closing(Deadline(call.began, self._timeout_s)) as deadline, deadline:
                    await self._pools[call.policy].ready()
                    held.callback((await self._gate.enter()).give_back)
                    begun = await self._somewhere(call, memory, partial(self._begin_on, call=call, memory=memory))
            except BaseException:
                memory.budget.give_call_back()
                raise
            counts["episodes"] += is_first
            counts["prompt_tokens"] += begun.prompt_tokens
            begun.held = held.pop_all()
            return begun

    async def _somewhere(self, call: Call, memory: Memory, attempt: Callable[[Lane], Awaitable[T]]) -> T:
        """On the engine that suits best; on another one where it fails, or when one is back where all are gone."""
        pool = self._pools[call.policy]
        while True:
            try:
                return await self._somewhere_now(call, memory, attempt)
            except EngineRefusedError:
                raise
            except EngineError:
                if not await pool.out() or not await pool.ready():
                    raise

    async def _somewhere_now(self, call: Call, memory: Memory, attempt: Callable[[Lane], Awaitable[T]]) -> T:
        failure = EngineError(f"policy {call.policy} has no engine")
        for lane in self._pools[call.policy].order(memory.lanes.get(call.policy), call.claims.episode_id):
            try:
                made = await attempt(lane)
            except EngineRefusedError:
                raise
            except EngineError as error:
                lane.fail()
                failure = error
                log.warning("engine_failed", engine=lane.engine.url, policy=call.policy, error=str(error))
            else:
                memory.lanes[call.policy] = lane
                return made
        raise failure

    async def stream(self, begun: Begun) -> AsyncGenerator[Gained | Ended, None]:
        """Raises EngineError or BrokerError in the middle, and then nothing more comes of the call."""
        choices: dict[int, Choice] = {}
        with self._occupied(begun.lane, begun.call.policy):
            async with _closing(begun), aclosing(self._taken(begun, choices)) as taken:
                async for choice, delta in taken:
                    if begun.rendered.parsed and delta.finish_reason:
                        gain = await _rest(begun, choice, delta)
                    elif begun.rendered.parsed:
                        gain = await _parsed(begun, choice, delta)
                        extend(choice.message, gain)
                        gain.pop("tool_calls", None)  # they come at the end: what is begun cannot be taken back
                    else:
                        gain = {"content": delta.text} if delta.text else {}
                        choice.message["content"] += delta.text
                    yield Gained(index=choice.index, delta=gain, logprobs=delta.entries)
                    if delta.finish_reason:
                        yield await self._end(begun, choice)

    async def whole(self, begun: Begun) -> list[Ended]:
        """Every choice, in order. Raises EngineError or BrokerError."""
        choices: dict[int, Choice] = {}
        with self._occupied(begun.lane, begun.call.policy):
            async with _closing(begun):
                async with aclosing(self._taken(begun, choices)) as taken:
                    async for choice, delta in taken:
                        choice.message["content"] += delta.text
                ordered = [choices[index] for index in sorted(choices)]
                if begun.rendered.parsed:
                    await _derender(begun, ordered)
                first, *others = ordered
                ended = await self._end(begun, first)  # before the others, which then need not carry the prompt again
                return [ended, *await asyncio.gather(*(self._end(begun, choice) for choice in others))]

    async def count(self, call: Call) -> int:
        """Tokens of the prompt. Raises RefusedError, EngineRefusedError, DeadlineError or EngineError."""

        async def attempt(lane: Lane) -> int:
            with self._occupied(lane, call.policy):
                return len((await lane.engine.render(await self._escaped(lane, _for_engine(call.chat)))).token_ids)

        with ExitStack() as held:
            memory = self._episodes.open_call(call.claims.episode_id, call.claims.client)
            held.callback(self._episodes.close_call, memory)
            with closing(Deadline(call.began, self._timeout_s)) as deadline, deadline:
                held.callback((await self._gate.enter()).give_back)
                return await self._somewhere(call, memory, attempt)

    async def _begin_on(self, lane: Lane, call: Call, memory: Memory) -> Begun:
        chat = _for_engine(call.chat)
        choices = call.chat.get("n") or 1
        allowed = self._tuning.episode_tokens(call.claims)
        with self._occupied(lane, call.policy):
            shown = await self._escaped(lane, chat)
            rendered = await lane.engine.render(shown)
            rests = call.stream and rendered.parsed and (not chat.get("tools") or await lane.finds_calls())
            history = history_of(chat)
            stitched = await stitch(
                memory.graph(call.policy),
                history,
                rendered.token_ids,
                lane.engine,
                request_id=call.request_id,
                lost=memory.lost,
                messages=chat["messages"],
            )
            if "features" in rendered.carried:
                stitched = self._with_images(call, rendered, stitched)
            setting = self._tuning.sampling(call.policy, call.claims.kind)
            prompt_ids = unpack_ids(stitched.prompt).tolist() if stitched.repaired else rendered.token_ids
            tuned = effective(
                call.chat,
                rendered.sampling,
                mode=call.claims.mode,
                setting=setting,
                prompt_tokens=len(prompt_ids),
                max_model_len=(await lane.engine.info()).max_model_len,
                room_left=memory.budget.room(allowed, choices),
                names=call.names,
                cuts=call.cuts,
            )
            if tuned.cut_from and setting.max_tokens:
                self._meter.cut(call.policy, asked=tuned.cut_from, limit=setting.max_tokens)
            reserved = Reservation(memory.budget, choices, tuned.record.max_tokens or 0) if allowed else None
            if call.stream and (rests or not rendered.parsed) and lane.together > 1:
                tuned.params.setdefault("stream_interval", lane.together)
            fresh = pack_ids(rendered.token_ids)
            rendered = msgspec.structs.replace(rendered, token_ids=prompt_ids, sampling=tuned.params)
            version = lane.version or 0
            deltas = lane.engine.generate(rendered, stream=call.stream, detailed=bool(chat.get("logprobs")))
            pace = Pace()
            if rests:
                deltas = paced(deltas, pace)
            try:
                first: list[Delta] = await anext(deltas, [])
            except BaseException:
                if reserved:
                    reserved.end()
                raise
        asked = Asked(
            run=self._run,
            episode_id=call.claims.episode_id,
            policy=call.policy,
            mode=call.claims.mode,
            request_id=call.request_id,
            retry=call.retry,
            counts_retries=call.counts_retries,
            observed=call.observed,
            request_digest=call.digest,
            agent=call.agent,
            client_id=call.claims.client,
            kind=self._kind(call),
            messages=chat["messages"],
            history=history,
            stitched=stitched,
            fresh=fresh,
            sampling=tuned.record,
        )
        return Begun(
            call=call, memory=memory, lane=lane, chat=chat, rendered=rendered, asked=asked,
            overridden=tuned.overridden if shown is chat else (*tuned.overridden, "special_tokens"), version=version, first=first, deltas=deltas, reserved=reserved, pace=pace,
        )  # fmt: skip

    async def _escaped(self, lane: Lane, chat: Json) -> Json:
        """The chat as the engine is to see it."""
        if self._tuning.job.proxy.special_tokens == "keep" or "prompt" in chat:
            return chat
        return await escape(chat, lane.is_token)

    @contextmanager
    def _occupied(self, lane: Lane, policy: str) -> Iterator[None]:
        """An engine whose answers are of no use is asked last for a while, and told of."""
        try:
            with lane.occupied():
                yield
        except EngineAnswerError as error:
            lane.fail()
            self._meter.refuse_answer(policy, lane.engine.url, error)
            raise

    def _kind(self, call: Call) -> str:
        """What to count a call under: a key may name anything."""
        return call.claims.kind if call.claims.kind in self._tuning.job.task_kinds else ""

    def _with_images(self, call: Call, rendered: Rendered, stitched: Stitched) -> Stitched:
        """The prompt as rendered, since the engine finds images by their places in it. Raises RefusedError."""
        if call.claims.mode == "train" and self._tuning.job.policies[call.policy].trained:
            raise RefusedError(
                "images are for evaluation and for policies that are not trained: learners read tokens alone",
                code="unsupported_parameter", param="messages",
            )  # fmt: skip
        return Stitched(prompt=pack_ids(rendered.token_ids), branch="drift") if stitched.repaired else stitched

    async def _end(self, begun: Begun, choice: Choice) -> Ended:
        assert choice.finish_reason
        memory = begun.memory
        if begun.reserved:
            begun.reserved.sampled(len(choice.token_ids))
        else:
            memory.budget.sampled_tokens += len(choice.token_ids)
        named = isinstance(begun.chat.get("tool_choice"), dict)  # a call that was demanded by name ends with `stop`
        calls_tools = choice.finish_reason == "stop" and choice.message.get("tool_calls") and not named
        sampled = Sampled(
            index=choice.index,
            token_ids=choice.token_ids,
            logprobs=choice.logprobs,
            versions=choice.versions or (VersionSpan(version=begun.version, start=0, end=len(choice.token_ids)),),
            finish_reason="tool_calls" if calls_tools else choice.finish_reason,
            message=choice.message,
            cut=isinstance(choice.stop_reason, str),
            timings=Timings(
                began_at=begun.call.began_at,
                first_token_s=choice.first_token_s,
                total_s=time.monotonic() - begun.call.began,
            ),
        )
        if begun.call.stream:
            begun.lane.streamed(len(choice.token_ids) - 1, sampled.timings.total_s - sampled.timings.first_token_s)
        thoughts = choice.message.get("reasoning")
        num_thoughts = len(await begun.lane.engine.tokenize(thoughts)) if thoughts else 0
        name_of_call = call_id(begun.call.request_id, choice.index)
        begun.recorded.append(name_of_call)
        await self._recorder.record(begun.asked, sampled, memory.graph(begun.call.policy))
        if kept := begun.call.kept:
            name = kept.name(name_of_call, choice.message)
            memory.conversations.keep(name, [*kept.messages, choice.message])
        return Ended(
            index=choice.index,
            finish_reason=sampled.finish_reason,
            stop_reason=choice.stop_reason,
            message=choice.message,
            logprobs=choice.entries,
            num_tokens=len(choice.token_ids),
            num_reasoning_tokens=num_thoughts,
        )

    async def _taken(self, begun: Begun, choices: dict[int, Choice]) -> AsyncGenerator[tuple[Choice, Delta], None]:
        """Every delta with its choice, which has taken it already. Raises EngineError when the last ones are missing."""
        portion: list[Delta] | None = begun.first
        with closing(Deadline(begun.call.began, self._timeout_s)) as deadline:
            while portion is not None:
                for delta in portion:
                    if delta.index not in choices:
                        choices[delta.index] = Choice(delta.index, stops_of(begun.chat))
                    choice = choices[delta.index]
                    choice.take(delta, time.monotonic() - begun.call.began)
                    yield choice, delta
                with deadline:
                    portion = await anext(begun.deltas, None)
        if sum(choice.finish_reason is not None for choice in choices.values()) != begun.rendered.sampling.get("n", 1):
            raise EngineError("the engine stopped before its answer was complete")


@asynccontextmanager
async def _closing(begun: Begun) -> AsyncIterator[None]:
    try:
        yield
    finally:
        await begun.close()


async def _parsed(begun: Begun, choice: Choice, delta: Delta) -> Json:
    """What the engine's parsers make of a delta's tokens."""
    with begun.pace.work():
        gain, choice.state = await begun.lane.engine.derender_delta(
            begun.chat,
            begun.rendered.token_ids,
            spoken(delta.token_ids, delta.finish_reason, delta.stop_reason),
            finish_reason=delta.finish_reason,
            state=choice.state,
        )
    met = delta.stop_reason if isinstance(delta.stop_reason, str) else None
    ended = delta.finish_reason is not None
    return choice.hold_blanks(choice.trim(gain, met=met, ended=ended), ended=ended)


async def _rest(begun: Begun, choice: Choice, delta: Delta) -> Json:
    """What the agent lacks of a choice that ends with this delta: what the whole of its tokens says, also where parsers of
    streams took a broken or unfinished call for something else. Where they have told what the whole does not say, it is theirs."""
    streamed = choice.message
    told = {name: streamed.get(name) or "" for name in ("reasoning", "content")}
    await _derender(begun, [choice])
    if not all((choice.message.get(name) or "").startswith(text) for name, text in told.items()):
        choice.message = streamed
        extend(streamed, await _parsed(begun, choice, delta))
    gain = {name: more for name, text in told.items() if (more := (choice.message.get(name) or "")[len(text) :])}
    calls = choice.message.get("tool_calls") or ()
    return {**gain, "tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]} if calls else gain


async def _derender(begun: Begun, choices: Sequence[Choice]) -> None:
    """Put parsed messages in place of plain text. A choice that says nothing has nothing to parse."""
    words = {c.index: spoken(c.token_ids, c.finish_reason, c.stop_reason) for c in choices}
    talking = [choice for choice in choices if words[choice.index]]
    if not talking:
        return
    answers = [Answer(token_ids=words[c.index], finish_reason=c.finish_reason or "stop") for c in talking]
    messages = await begun.lane.engine.derender(begun.chat, begun.rendered.token_ids, answers)
    for choice, message in zip(talking, messages, strict=True):
        met = choice.stop_reason if isinstance(choice.stop_reason, str) else None
        choice.message = {"role": "assistant", "content": ""}
        message.pop("role", None)
        trimmed = StopTrim(stops_of(begun.chat))(message, met=met, ended=True)
        extend(choice.message, LeadingBlanks()(trimmed, ended=True))


def _for_engine(chat: Json) -> Json:
    return {key: value for key, value in chat.items() if key not in OURS}
