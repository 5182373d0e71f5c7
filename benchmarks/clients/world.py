"""What the foreign clients meet: a real RabbitMQ, a real vLLM, our proxy and collector.

The model is random, so its answers are held to a grammar that makes sense of them: the first call of a conversation with a
known tool calls it, twice at once where it adds numbers; later answers are a sentence of random letters, beyond ASCII too. Every
answer is another one, and no tokenizer would spell it as the model did.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from support.proxy import ROOT, served
from support.tiny_model import made_once, tiny_model
from swarmq import AsyncSwarmClient, keys
from swarmq.broker import topology
from swarmq.broker.amqp import AmqpBroker
from swarmq.broker.node.process import PrivateNode
from swarmq.collector.service import Collector
from swarmq.collector.store import Store
from swarmq.config import SwarmJob
from swarmq.engine.client.protocol import Json, RenderedPrompt
from swarmq.engine.client.vllm import VllmEngine
from swarmq.engine.server.launch import EngineProcess
from swarmq.messages import Rollout, unpack_ids
from swarmq.proxy.http.app import create_app
from swarmq.runtime.processes import reserve_port

RUN, POLICY, SECRET = "clients", "main", "of the benchmark's engine"
CONTEXT = 65_536
"""Tokens: the tiny tokenizer spends two to three times a large one's on the prompts of Codex and Claude Code."""
CLOSING = r"[A-Z][a-zA-Z äöüß京🙂,0-9'\"]{12,32}\."
WORD, NUMBER = r'"[a-z]{6}"', "[1-9][0-9]{0,4}"
SHELLS = ("exec_command", "shell_command", "Bash", "bash")
END = "<|im_end|>"
"""What a model samples to end its answer, which no client is shown."""
ENDED_S = 30.0
"""Seconds until the collector has published an episode that ended with turns."""
SAMPLED = ("/chat/completions", "/responses", "/messages")


class PlayedEngine(VllmEngine):
    """Holds free answers to the grammar above; what a client itself demands stays as it is."""

    async def render(self, chat: Json) -> RenderedPrompt:
        if "structured_outputs" in chat or "response_format" in chat or chat.get("tool_choice", "auto") != "auto":
            return await super().render(chat)
        offered = {tool["function"]["name"]: tool["function"] for tool in chat.get("tools") or ()}
        said = sum(message["role"] == "assistant" for message in chat["messages"])
        return await super().render({**chat, "structured_outputs": {"regex": script(offered, said)}})


def script(offered: dict[str, Any], said: int) -> str:
    """What to say after so many answers: the grammar of the next one."""
    if "add" in offered and said < 2:
        return call(offered["add"]) * (2 - said)
    if "final_answer" in offered:  # smolagents ends by a tool
        return call(offered["final_answer"])
    shell = next((name for name in offered if name.endswith(SHELLS)), None)
    if shell and said == 0:
        return call(offered[shell])
    return CLOSING


def call(function: dict[str, Any]) -> str:
    schema = function.get("parameters") or {}
    known = schema.get("properties", {})

    def value(name: str) -> str:
        if name in {"cmd", "command"}:
            return '"echo [a-z]{6}"'
        return NUMBER if known.get(name, {}).get("type") in {"integer", "number"} else WORD

    given = ", ".join(f'"{name}": {value(name)}' for name in schema.get("required") or known)
    return rf'<tool_call>\n\{{"name": "{function["name"]}", "arguments": \{{{given}\}}\}}\n</tool_call>'


class HttpCall(msgspec.Struct, kw_only=True):
    """A call that a client made, as its answer left the proxy."""

    path: str
    status: int = 0
    body: bytes = b""
    """Of a refusal."""

    @property
    def refusal(self) -> str:
        return f"{self.status} {self.body.decode(errors='replace')[:300]}"


class CallCounter:
    """Counts the calls of every key in front of the proxy."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.calls: dict[str, list[HttpCall]] = defaultdict(list)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self._app(scope, receive, send)
        headers = dict(scope["headers"])
        key = headers.get(b"x-api-key") or headers.get(b"authorization", b"").removeprefix(b"Bearer ")
        one = HttpCall(path=scope["path"])
        self.calls[key.decode()].append(one)

        async def watched(message: Any) -> None:
            if message["type"] == "http.response.start":
                one.status = message["status"]
            elif one.status >= 400:
                one.body += message.get("body", b"")
            await send(message)

        return await self._app(scope, receive, watched)

    def sampled(self, key: str) -> list[HttpCall]:
        """The calls that ask for an answer."""
        return [one for one in self.calls[key] if one.path.endswith(SAMPLED)]


class World:
    """A run without a learner: episodes are read where a learner would. Its batches are large, so that tickets for all of them are
    out before one is trained."""

    def __init__(self, client: AsyncSwarmClient, counter: CallCounter, tokenizer: Tokenizer) -> None:
        self.client, self.counter, self._tokenizer = client, counter, tokenizer
        self._rollouts: dict[str, asyncio.Future[Rollout]] = {}

    async def read(self, deliveries: Any) -> None:
        async for delivery in deliveries:
            self._rollout(delivery.message.episode_id).set_result(delivery.message)
            await delivery.ack()

    async def recorded(self, episode_id: str) -> list[str]:
        """What the recorded tokens of an ended episode spell, a text for each turn; empty if none comes."""
        try:
            async with asyncio.timeout(ENDED_S):
                rollout = await self._rollout(episode_id)
        except TimeoutError:
            return []
        spelled = (unpack_ids(turn.sampled_ids).tolist() for turn in rollout.turns)
        return [self._tokenizer.decode(ids, skip_special_tokens=False).removesuffix(END) for ids in spelled]

    def _rollout(self, episode_id: str) -> asyncio.Future[Rollout]:
        return self._rollouts.setdefault(episode_id, asyncio.get_running_loop().create_future())


@asynccontextmanager
async def open_world(folder: Path) -> AsyncIterator[World]:
    """Raises SwarmqError naming the part that does not start."""
    model = long_model()
    policy = {
        "model": str(model),
        "sampling": {"max_tokens": 300},
        "aliases": ["claude-*", "gpt-*"],
        "engine": {"max_model_len": CONTEXT, "start_timeout_s": 600.0},
    }
    job = SwarmJob.build(
        {
            "run": RUN,
            "folder": str(folder / "runs"),
            "policies": {POLICY: policy},
            "groups": {"group_size": 1, "min_group": 1, "groups_per_batch": 64, "idle_timeout_s": 900.0},
        }
    )
    job.run_folder.path.mkdir(parents=True)
    port = reserve_port()
    async with AsyncExitStack() as stack:
        node = await stack.enter_async_context(PrivateNode(folder / "broker"))
        log = folder / "engine.log"
        process = EngineProcess(job.policies[POLICY], port=port, log_path=log, secret=SECRET)
        running = await stack.enter_async_context(process)
        broker = await stack.enter_async_context(AmqpBroker.open(node.amqp_url, name="clients", deadline_s=60.0))
        engine = await stack.enter_async_context(PlayedEngine.open(running.url, deadline_s=None, secret=SECRET))
        await broker.declare(RUN, policies=[POLICY], kinds=job.task_kinds)
        counter = CallCounter(create_app(job, root=ROOT, engines={POLICY: [engine]}, broker=broker))
        url = await stack.enter_async_context(served(counter))
        invite = keys.Invite(
            run=RUN,
            client="bench",
            secret=keys.derive_client_secret(ROOT, "bench"),
            amqp_url=node.amqp_url,
            base_url=f"{url}/v1",
            policies=(POLICY,),
            kinds=job.task_kinds,
            group_size=1,
        )
        store = stack.enter_context(closing(Store(folder / "collector.sqlite", run=RUN)))
        tasks, stop = await stack.enter_async_context(asyncio.TaskGroup()), asyncio.Event()
        tasks.create_task(Collector(job, broker, store).run(stop))
        stack.callback(stop.set)
        client = await stack.enter_async_context(AsyncSwarmClient(invite))
        world = World(client, counter, Tokenizer.from_file(str(model / "tokenizer.json")))
        deliveries = await stack.enter_async_context(broker.consume(topology.ready(RUN, POLICY), prefetch=8))
        reading = tasks.create_task(world.read(deliveries))
        stack.callback(reading.cancel)
        yield world


def long_model() -> Path:
    """The tests' model, which may have longer contexts: its weights are random for every length alike."""
    short = tiny_model()

    def lengthen(folder: Path) -> None:
        shutil.copytree(short, folder, dirs_exist_ok=True)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))

    return made_once(f"{short.name}-{CONTEXT}", lengthen)
