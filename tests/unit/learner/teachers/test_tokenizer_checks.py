"""Who means other words by the same ids is refused: an engine before anything is trained, a judge before it is asked."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from structlog.testing import capture_logs
from tokenizers import AddedToken
from transformers import AutoTokenizer

from support.episodes import make_group
from support.tiny_model import MARKERS, SPECIAL_TOKENS, tiny_model
from swarmq.config import Loss, Policy, SwarmJob, Train
from swarmq.errors import LearnerError
from swarmq.hosts.model_files import describe_shape
from swarmq.learner import main
from swarmq.learner.feed.ipc import Idle, StopSignal
from swarmq.learner.store.records import BatchIndex, BatchReady, BatchRecord, encode_record
from swarmq.learner.teachers.served_teacher import ServedTeacher
from swarmq.learner.teachers.tokenizer_checks import (
    MAX_MARKUP,
    PROBE_TEXT,
    EngineTokenizers,
    build_probe,
    check_judge,
    encode_ids,
)
from swarmq.learner.train.loop import Learner
from swarmq.learner.train.trainer import Trainer
from swarmq.registries.engines import EngineRegistry
from swarmq.weights.push.pusher import PushReport

MARKUP = {"special": "<|im_start|>", "added": "<think>"}
TRAIN = Train(gradient_checkpointing=False, token_log=False, trackers=())


class Tokenizing:
    """An engine with the tokenizer of `model`, whose ids differ by `shift` from the fourth on."""

    def __init__(self, shift: int, model: str) -> None:
        self.url = ""
        self.up = True
        self.asked = 0
        self.room: int | None = 2048
        self.version = "0.32.0"
        self.returns_routed_experts = False
        self.shape = describe_shape(json.loads((Path(model) / "config.json").read_text()))
        self._model, self._shift = model, shift

    async def models(self, _: web.Request) -> web.Response:
        if self.room is None:
            raise web.HTTPServiceUnavailable
        return web.json_response({"data": [{"id": "m", "max_model_len": self.room}]})

    async def report_version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": self.version})

    async def report_facts(self, _: web.Request) -> web.Response:
        facts = {"swarmq": "1.0", "shape": self.shape, "returns_routed_experts": self.returns_routed_experts}
        return web.json_response({"results": [facts]})

    async def tokenize(self, request: web.Request) -> web.Response:
        text = (await request.json())["prompt"]
        assert text.startswith(PROBE_TEXT)
        if not self.up:
            raise web.HTTPServiceUnavailable
        self.asked += 1
        ids = encode_ids(self._model, text)
        assert ids
        return web.json_response({"tokens": [*ids[:3], *(token + self._shift for token in ids[3:])]})


@asynccontextmanager
async def engine(*, shift: int = 0, model: str | None = None) -> AsyncIterator[Tokenizing]:
    served = Tokenizing(shift, model or str(tiny_model()))
    app = web.Application()
    app.router.add_post("/tokenize", served.tokenize)
    app.router.add_get("/v1/models", served.models)
    app.router.add_get("/version", served.report_version)
    app.router.add_get("/swarmq/facts", served.report_facts)
    async with TestServer(app) as server:
        served.url = str(server.make_url("")).rstrip("/")
        yield served


def check(model: Path, *urls: str) -> None:
    EngineTokenizers(str(model), lambda: urls).check()


async def checked(model: Path, *, shift: int = 0, served_model: str | None = None) -> None:
    async with engine(shift=shift, model=served_model) as served:
        await asyncio.to_thread(check, model, served.url)


async def test_an_engine_that_serves_another_model_with_the_same_tokenizer_is_refused() -> None:
    async with engine() as served:
        await asyncio.to_thread(check, tiny_model(), served.url)
        ours = served.shape["num_hidden_layers"]
        served.shape = served.shape | {"num_hidden_layers": "99"}
        with pytest.raises(
            LearnerError,
            match=f"{served.url} serves another model than {tiny_model()}: num_hidden_layers in its config.json is 99, not {ours}",
        ):
            await asyncio.to_thread(check, tiny_model(), served.url)


async def test_an_engine_without_routed_experts_is_refused_where_routing_is_replayed() -> None:
    async with engine() as served:
        compared = EngineTokenizers(str(tiny_model()), lambda: [served.url], replays_routing=True)
        with pytest.raises(
            LearnerError, match=rf"{served.url} \(vLLM 0.32.0\) returns no routed experts: start it with"
        ):
            await asyncio.to_thread(compared.check)
        served.returns_routed_experts = True
        await asyncio.to_thread(compared.check)


async def test_engines_of_two_versions_are_a_warning() -> None:
    async with engine() as one, engine() as other:
        other.version = "0.33.1"
        tokenizers = EngineTokenizers(str(tiny_model()), lambda: (one.url, other.url))
        await asyncio.to_thread(tokenizers.check)
    [warning] = tokenizers.warnings
    assert warning.startswith(f"the engine at {other.url} has vllm 0.33.1, the one at {one.url} vllm 0.32.0")


def with_tokenizer(folder: Path, model: Path, *, another: bool = False) -> str:
    """A copy of `model` with the tiny model's tokenizer, or with one that begins the test text with another id."""
    shutil.copytree(model, folder)
    shutil.copy(tiny_model() / "tokenizer_config.json", folder)
    told = json.loads((tiny_model() / "tokenizer.json").read_text())
    if another:
        ids, vocab = encode_ids(str(tiny_model()), PROBE_TEXT), told["model"]["vocab"]
        assert ids
        names = {id_: name for name, id_ in vocab.items()}
        vocab[names[ids[0]]], vocab[names[ids[1]]] = ids[1], ids[0]
    (folder / "tokenizer.json").write_text(json.dumps(told))
    return str(folder)


def with_markup(folder: Path, **names: str) -> str:
    """A copy of the tiny model with other names of its special and other added tokens."""
    shutil.copytree(tiny_model(), folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        text = (folder / file).read_text()
        for name, other in names.items():
            text = text.replace(json.dumps(MARKUP[name]), json.dumps(other))
        (folder / file).write_text(text)
    return str(folder)


def with_many_added(folder: Path) -> str:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model())
    tokenizer.add_tokens([AddedToken(f"<unused{n}>", special=True) for n in range(2 * MAX_MARKUP)])
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("name", MARKUP)
async def test_an_engine_with_other_markup_at_the_same_ids_is_refused(tmp_path: Path, name: str) -> None:
    other = with_markup(tmp_path / "other", **{name: "<|turn|>"})
    assert encode_ids(other, PROBE_TEXT) == encode_ids(str(tiny_model()), PROBE_TEXT)
    await checked(Path(other), served_model=other)
    with pytest.raises(LearnerError, match="has another tokenizer"):
        await checked(tiny_model(), served_model=other)


@pytest.mark.parametrize("name", MARKUP)
def test_a_judge_with_other_markup_at_the_same_ids_is_refused(tmp_path: Path, name: str) -> None:
    other = with_markup(tmp_path / "other", **{name: "<|turn|>"})
    with pytest.raises(LearnerError, match=rf"train\.teacher: {other} has another tokenizer"):
        check_judge(str(tiny_model()), other, role="teacher")


def test_the_test_text_ends_with_the_markup_in_the_order_of_ids_and_stays_short(tmp_path: Path) -> None:
    words = build_probe(with_many_added(tmp_path)).removeprefix(PROBE_TEXT)
    assert words.startswith("<|endoftext|><|im_start|><|im_end|><tool_call>")
    assert words.count("<unused") == MAX_MARKUP - len(SPECIAL_TOKENS) - len(MARKERS)
    ids = encode_ids(str(tmp_path), words)
    assert ids == tuple(sorted(ids or ()))
    assert len(ids) == MAX_MARKUP


async def test_the_same_tokenizer_on_both_sides_passes() -> None:
    await checked(tiny_model())


async def test_another_tokenizer_is_refused_with_engine_model_and_place() -> None:
    with pytest.raises(LearnerError, match=r"the engine at http.* another tokenizer than .*from token 3 on"):
        await checked(tiny_model(), shift=1)


async def test_a_model_without_tokenizer_is_not_judged(tmp_path: Path) -> None:
    shutil.copy(tiny_model() / "config.json", tmp_path)
    await checked(tmp_path, shift=1)


def test_an_engine_that_does_not_answer_is_not_judged() -> None:
    check(tiny_model(), "http://127.0.0.1:9")


async def test_a_server_that_answers_something_else_is_not_judged() -> None:
    async def nothing(_: web.Request) -> web.Response:
        return web.json_response({})

    app = web.Application()
    app.router.add_post("/tokenize", nothing)
    async with TestServer(app) as server:
        with capture_logs() as said:
            await asyncio.to_thread(check, tiny_model(), str(server.make_url("")).rstrip("/"))
    assert ["without `tokens`: is it a vLLM server?" in line["reason"] for line in said] == [True]


def test_an_engine_that_takes_a_connection_and_says_nothing_is_waited_for_a_moment() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, capture_logs() as said:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        EngineTokenizers(str(tiny_model()), lambda: [url], timeout_s=0.1).check()
    assert [line["reason"] for line in said] == [f"{url}/tokenize did not answer within 0.1 s"]


@pytest.mark.parametrize(("room", "passes"), [(32, True), (33, False), (4096, False)])
async def test_an_engine_that_turns_positions_otherwise_for_its_room_is_refused(
    tmp_path: Path, room: int, passes: bool
) -> None:
    """As vLLM does for longrope when it has room for more than what the model was first made for."""
    async with engine() as served:
        served.room = room
        compared = EngineTokenizers(longrope(tmp_path / "model"), lambda: [served.url], max_model_len=16)
        if passes:
            await asyncio.to_thread(compared.check)
        else:
            with pytest.raises(LearnerError, match=f"a context of {room} tokens.*says 16: .*set it to {room}"):
                await asyncio.to_thread(compared.check)


async def test_an_engine_that_does_not_say_what_room_it_has_is_asked_again(tmp_path: Path) -> None:
    async with engine() as served:
        served.room = None
        compared = EngineTokenizers(longrope(tmp_path / "model"), lambda: [served.url], max_model_len=16)
        await asyncio.to_thread(compared.check)
        served.room = 33
        with pytest.raises(LearnerError, match="a context of 33 tokens"):
            await asyncio.to_thread(compared.check)


def longrope(folder: Path) -> str:
    """A copy of the tiny model that has two ways to turn positions."""
    factors = {name: [1.0] * 32 for name in ("short_factor", "long_factor")}
    told = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32, **factors}
    shutil.copytree(tiny_model(), folder)
    config = json.loads((folder / "config.json").read_text()) | {"rope_parameters": told}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


async def test_a_learner_looks_at_the_engines_of_now_before_it_loads_anything(tmp_path: Path) -> None:
    policy = {"model": str(tiny_model()), "engine": {"urls": ["http://127.0.0.1:9"]}}
    job = SwarmJob.build({"run": "r", "folder": str(tmp_path), "policies": {"main": policy}})
    async with engine(shift=1) as added:
        EngineRegistry(job).add("main", added.url)
        with pytest.raises(LearnerError, match=f"the engine at {added.url} has another tokenizer"):
            await asyncio.to_thread(main.train, job, "main", no_push=False)


class Late:
    """In the place of the batch feeder: an engine comes up while a learner waits, the learner looks after its engines if it
    is `idle` for long enough, and gets a batch. The engines take all weights."""

    def __init__(self, engine: Tokenizing, *, idle: bool) -> None:
        self.engine, self._idle = engine, idle
        record = BatchRecord(index=BatchIndex(record=1, version=1), episodes=tuple(make_group()), settings=TRAIN)
        self._batches = [BatchReady(record=encode_record(record), replayed=False, figures={})]
        self.pushed: list[int] = []
        self.failing: dict[str, str] = {}

    def next(self, *, idle: Idle, idle_s: object, evaluated: object) -> BatchReady | None:
        idle(again=False)
        self.engine.up = True
        if self._idle:
            idle(again=True)
        return self._batches.pop() if self._batches else None

    def push(self, _: object, version: int) -> PushReport:
        self.pushed.append(version)
        return PushReport(version=version)

    ensure = push

    def repair(self, _: object, version: int) -> None: ...

    def send(self, _: object) -> None: ...

    def finish(self) -> None: ...

    def learner(self, folder: Path) -> Learner:
        policy = Policy(model=str(tiny_model()), train=TRAIN)
        job = SwarmJob(run="r", folder=str(folder), policies={"main": policy})
        tokenizers = EngineTokenizers(policy.model, lambda: [self.engine.url])
        return Learner(job, "main", pusher=self, stop=StopSignal(), tokenizers=tokenizers)


@pytest.mark.parametrize("idle", [True, False], ids=["long before its episodes", "shortly before its episodes"])
async def test_an_engine_that_comes_up_late_is_compared_before_anything_of_it_is_trained(
    tmp_path: Path, idle: bool
) -> None:
    async with engine(shift=1) as served:
        served.up = False
        late = Late(served, idle=idle)
        learner = late.learner(tmp_path)
        with pytest.raises(LearnerError, match=f"the engine at {served.url} has another tokenizer .*start a new run"):
            await asyncio.to_thread(learner.run, late)
    assert learner.trainer.version == 0
    assert late.pushed == [0], "before it answered"


async def test_an_engine_is_compared_once(tmp_path: Path) -> None:
    async with engine() as served:
        served.up = False
        late = Late(served, idle=True)
        learner = late.learner(tmp_path)
        await asyncio.to_thread(learner.run, late)
    assert (learner.trainer.version, late.pushed[-1], served.asked) == (1, 1, 1)


@pytest.mark.parametrize(("role", "loss"), [("teacher", Loss(name="distill")), ("reference", Loss(kl=0.1))])
def test_a_judge_with_another_tokenizer_is_refused(tmp_path: Path, tiny_qwen: Path, role: str, loss: Loss) -> None:
    policy = with_tokenizer(tmp_path / "policy", tiny_qwen)
    same = with_tokenizer(tmp_path / "same", tiny_qwen)
    other = with_tokenizer(tmp_path / "other", tiny_qwen, another=True)
    check_judge(policy, same, role=role)
    with pytest.raises(
        LearnerError, match=rf"train\.{role}: {other} has another tokenizer than {policy}: .*from token 0 on"
    ):
        Trainer(policy, Train(gradient_checkpointing=False, loss=loss, **{role: other}))


async def test_a_served_teacher_with_another_tokenizer_is_refused() -> None:
    nothing: Any = SimpleNamespace(passes=[])
    async with engine(shift=1) as served:
        with pytest.raises(
            LearnerError, match=rf"train\.teacher: {served.url} has another tokenizer .*from token 3 on"
        ):
            await asyncio.to_thread(ServedTeacher(f"{served.url}/v1", str(tiny_model())).scores, [], nothing)
