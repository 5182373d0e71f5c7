"""A model call that an engine has begun to answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import ExitStack
from typing import Any

import msgspec

from swarmq.engine.client.protocol import Delta, RenderedPrompt
from swarmq.proxy.engines.pool import EngineLane
from swarmq.proxy.engines.stream_coalescing import CoalescingPace
from swarmq.proxy.episodes.cache import EpisodeState
from swarmq.proxy.episodes.token_budget import Reservation
from swarmq.proxy.requests import RequestContext

Json = dict[str, Any]


class ActiveCall(msgspec.Struct, kw_only=True):
    """A model call whose first tokens have arrived. Close `deltas` to cancel it."""

    request: RequestContext
    memory: EpisodeState
    lane: EngineLane
    chat: Json
    rendered: RenderedPrompt
    version: int
    """Last known version of the engine's weights when the call began."""
    replays_routing: bool
    """Whether its turns record the experts to which tokens were routed."""
    first: list[Delta]
    deltas: AsyncGenerator[list[Delta], None]
    reserved: Reservation | None
    pace: CoalescingPace
    """Decides how long the stream pauses after each portion that the engine parses."""
    held: ExitStack = msgspec.field(default_factory=ExitStack)
    """Owner of the call's slot and episode state, which it releases when it is closed."""
    recorded: list[str] = msgspec.field(default_factory=list)
    """Call ids of the choices whose turns may be in the queue."""
    failed: bool = False
    """Whether the agent got an error instead of the rest of its answer."""
    ended: int = 0
    """Number of choices whose ends were written to a stream."""

    async def close(self) -> None:
        """Release everything that the call holds. Closing it again does nothing."""
        if self.reserved:
            self.reserved.end()
        self.held.close()
        await self.deltas.aclose()

    @property
    def prompt_tokens(self) -> int:
        return len(self.rendered.token_ids)
