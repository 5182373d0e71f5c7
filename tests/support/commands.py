"""A proxy with a scripted model, and a client whose episodes it serves: what `swarmq run` needs, in this process."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import Any

from support.proxy import ROOT
from support.stage import RUN, Stage, staged
from swarmq import AsyncSwarmClient
from swarmq.broker import topology
from swarmq.engine.client.protocol import Delta, Json, RenderedPrompt
from swarmq.keys import Invite, derive_client_secret
from swarmq.messages import EpisodeEnd, Ticket
from swarmq.testing.scripted_engine import ScriptedEngine, decode

CONTEXT = 400_000
"""Tokens: the scripted tokenizer spends far more than a real one's on the prompts of coding agents."""


class ConversingEngine(ScriptedEngine):
    """Gives every prompt the answer that `respond` has for it."""

    respond: Callable[[str], str] = staticmethod(lambda _prompt: "Done.")

    def __init__(self, *, url: str) -> None:
        super().__init__(url=url, max_model_len=CONTEXT)
        self.prompts: list[str] = []

    async def generate(
        self, rendered: RenderedPrompt, *, stream: bool, detailed: bool = False
    ) -> AsyncGenerator[list[Delta], None]:
        prompt = decode(rendered.token_ids)
        self.prompts.append(prompt)
        self.say(self.respond(prompt))
        async for deltas in super().generate(rendered, stream=stream, detailed=detailed):
            yield deltas


def call(name: str, /, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def offered(prompt: str) -> list[str]:
    """The names of the tools that a prompt offers."""
    head = prompt.partition("<|end|>")[0]
    if not head.startswith("<|start|>system\n["):
        return []
    tools: list[Json] = json.JSONDecoder().raw_decode(head.removeprefix("<|start|>system\n"))[0]
    return [tool["function"]["name"] for tool in tools]


class CommandWorld:
    """A stage, and a client of its run."""

    def __init__(self, stage: Stage, client: AsyncSwarmClient) -> None:
        self.stage, self.client = stage, client

    @property
    def engine(self) -> ConversingEngine:
        engine = self.stage.engine
        assert isinstance(engine, ConversingEngine)
        return engine

    @property
    def ends(self) -> list[EpisodeEnd]:
        return [piece for piece in self.stage.pieces() if isinstance(piece, EpisodeEnd)]


@contextlib.asynccontextmanager
async def command_world(folder: Path, respond: Callable[[str], str], **settings: Any) -> AsyncIterator[CommandWorld]:
    sampling = {"max_tokens": 4000}
    async with staged(engine=ConversingEngine, sampling=sampling, **settings) as stage:
        stage.engine.respond = respond
        invite = Invite(
            run=RUN,
            client="c",
            secret=derive_client_secret(ROOT, "c"),
            amqp_url="amqp://nowhere/",
            base_url=f"{stage.url}/v1",
            policies=("main",),
            kinds=tuple(stage.job.task_kinds),
            group_size=1,
        )
        kind = invite.kinds[0]
        for number in range(100):
            ticket = Ticket(run=RUN, ticket_id=f"t{number}", kind=kind)
            await stage.broker.publish(topology.tickets(RUN, kind), ticket)
        opened = AsyncSwarmClient(
            invite, spool=folder / "spool", open_broker=lambda *_: contextlib.nullcontext(stage.broker)
        )
        async with opened as client:
            yield CommandWorld(stage, client)
