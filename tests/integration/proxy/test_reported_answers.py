"""The benchmark's driver of the OpenAI library reports what the recorded tokens spell, and one other token is noticed."""

import sys

import msgspec
import pytest
from benchmarks.clients.compare import Answer, compare
from benchmarks.clients.programs import DRIVERS
from tokenizers import Tokenizer

from support.clients import run_agent
from support.steered import TURNS
from swarmq.messages import unpack_ids

pytestmark = [pytest.mark.vllm, pytest.mark.broker]


@pytest.mark.parametrize("form", ["chat tools", "chat tools stream", "responses tools stream"])
async def test_the_openai_library_reports_what_the_recorded_tokens_spell(steered, tiny_model, tmp_path, form):
    tokenizer, answers = Tokenizer.from_file(str(tiny_model / "tokenizer.json")), tmp_path / "answers.jsonl"
    access = {"AGENT_BASE_URL": f"{steered.url}/v1", "AGENT_KEY": steered.key(), "AGENT_ANSWERS": str(answers)}
    await run_agent(sys.executable, str(DRIVERS / "openai_sdk.py"), *form.split(), **access)
    told = [msgspec.json.decode(line, type=Answer) for line in answers.read_text().splitlines()]
    tokens = [unpack_ids(turn.sampled_ids).tolist() for turn in await steered.turns(TURNS)]
    assert compare(told, [tokenizer.decode(ids) for ids in tokens]).equal == len(told) == TURNS
    tokens[-1][1] = tokenizer.token_to_id("Z")
    assert compare(told, [tokenizer.decode(ids) for ids in tokens]).unequal == (told[-1],)
