"""Who means other words by the same ids is refused: an engine before anything is trained, a judge before it is asked."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from support.tiny_model import tiny_model
from swarmq.config import Loss, SwarmJob, Train
from swarmq.engine.roster import Roster
from swarmq.errors import LearnerError
from swarmq.learner import main
from swarmq.learner.served_teacher import ServedTeacher
from swarmq.learner.tokenizers import PROBE, check_judge, check_tokenizers, own_ids
from swarmq.learner.trainer import Trainer


@asynccontextmanager
async def engine(*, shift: int = 0) -> AsyncIterator[str]:
    """The url of one with the tiny model's tokenizer, whose ids differ by `shift` from the fourth on."""
    ids = own_ids(str(tiny_model()))
    assert ids

    async def tokenize(request: web.Request) -> web.Response:
        assert (await request.json())["prompt"] == PROBE
        return web.json_response({"tokens": [*ids[:3], *(token + shift for token in ids[3:])]})

    app = web.Application()
    app.router.add_post("/tokenize", tokenize)
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


async def checked(model: Path, *, shift: int = 0) -> None:
    async with engine(shift=shift) as url:
        await asyncio.to_thread(check_tokenizers, str(model), [url])


def with_tokenizer(folder: Path, model: Path, *, another: bool = False) -> str:
    """A copy of `model` with the tiny model's tokenizer, or with one that begins the test text with another id."""
    shutil.copytree(model, folder)
    shutil.copy(tiny_model() / "tokenizer_config.json", folder)
    told = json.loads((tiny_model() / "tokenizer.json").read_text())
    if another:
        ids, vocab = own_ids(str(tiny_model())), told["model"]["vocab"]
        assert ids
        names = {id_: name for name, id_ in vocab.items()}
        vocab[names[ids[0]]], vocab[names[ids[1]]] = ids[1], ids[0]
    (folder / "tokenizer.json").write_text(json.dumps(told))
    return str(folder)


async def test_the_same_tokenizer_on_both_sides_passes() -> None:
    await checked(tiny_model())


async def test_another_tokenizer_is_refused_with_engine_model_and_place() -> None:
    with pytest.raises(LearnerError, match=r"the engine at http.* another tokenizer than .*\(from token 3 on\)"):
        await checked(tiny_model(), shift=1)


async def test_a_model_without_tokenizer_is_not_judged(tmp_path: Path) -> None:
    shutil.copy(tiny_model() / "config.json", tmp_path)
    await checked(tmp_path, shift=1)


def test_an_engine_that_does_not_answer_is_not_judged() -> None:
    check_tokenizers(str(tiny_model()), ["http://127.0.0.1:9"])


async def test_a_learner_looks_at_the_engines_of_now_before_it_loads_anything(tmp_path: Path) -> None:
    policy = {"model": str(tiny_model()), "engine": {"urls": ["http://127.0.0.1:9"]}}
    job = SwarmJob.build({"run": "r", "folder": str(tmp_path), "policies": {"main": policy}})
    async with engine(shift=1) as added:
        Roster(job).add("main", added)
        with pytest.raises(LearnerError, match=f"the engine at {added} has another tokenizer"):
            await asyncio.to_thread(main.train, job, "main", is_main=True, no_push=False)


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
    async with engine(shift=1) as url:
        with pytest.raises(LearnerError, match=rf"train\.teacher: {url} has another tokenizer .*from token 3 on"):
            await asyncio.to_thread(ServedTeacher(f"{url}/v1", str(tiny_model())).scores, [], nothing)
