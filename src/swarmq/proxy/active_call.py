"""A call that an engine has begun to answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import ExitStack
from typing import Any

import msgspec

from swarmq.engine.client.protocol import Delta, Rendered
from swarmq.proxy.engines.pool import EngineLane
from swarmq.proxy.engines.stream_coalescing import CoalescingPace
from swarmq.proxy.episodes.cache import EpisodeState
from swarmq.proxy.episodes.token_budget import Reservation
from swarmq.proxy.requests import RequestContext

Json = dict[str, Any]


class ActiveCall(msgspec.Struct, kw_only=True):
    """A call whose first tokens are here. Close `deltas` to cancel it."""

    request: RequestContext
    memory: EpisodeState
    lane: EngineLane
    chat: Json
    rendered: Rendered
    version: int
    """Of the engine's weights before it was asked, as far as is known."""
    first: list[Delta]
    deltas: AsyncGenerator[list[Delta], None]
    reserved: Reservation | None
    pace: CoalescingPace
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
