"""An engine that means other words by the same ids is refused before anything is trained."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from support.tiny_model import tiny_model
from swarmq.errors import LearnerError
from swarmq.learner.tokenizers import PROBE, check_tokenizers


async def checked(model: Path, *, shift: int = 0) -> None:
    """Against an engine whose ids differ by `shift` from the fourth on."""
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(tiny_model())(PROBE, add_special_tokens=False).input_ids

    async def tokenize(request: web.Request) -> web.Response:
        assert (await request.json())["prompt"] == PROBE
        return web.json_response({"tokens": [*ids[:3], *(token + shift for token in ids[3:])]})

    app = web.Application()
    app.router.add_post("/tokenize", tokenize)
    async with TestServer(app) as server:
        await asyncio.to_thread(check_tokenizers, str(model), [str(server.make_url("")).rstrip("/")])


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
