"""Weights pushed to a real vLLM are the ones it samples from, at once and without losing a request."""

from __future__ import annotations

import asyncio
import copy
import os
from pathlib import Path

import aiohttp
import pytest
import torch
from transformers import AutoModelForCausalLM

from support.engine import KNOWN, SECRET, Vllm, logprobs_in, running_engine
from support.tiny_model import tiny_model as make_tiny_model
from support.tiny_model import tiny_tied
from swarmq.config import Lora, Train
from swarmq.errors import EngineError
from swarmq.learner.model.layout_model import PlacedLayout
from swarmq.learner.train.trainer import Trainer
from swarmq.timeline import lay_rows, make_resolved_turn, unfold
from swarmq.weights.format.conventions import UNANNOUNCED
from swarmq.weights.format.scratch import FOLDER_PREFIX, SHARED_MEMORY
from swarmq.weights.push.engine_control import EngineControl, EngineStatus, Payload
from swarmq.weights.push.pusher import WeightPusher
from swarmq.weights.push.transfers import AdapterTransfer, FileTransfer, deduplicate

from .conftest import PATIENT, TOLERANCE, disturb, logprobs_of

pytestmark = pytest.mark.vllm

PROMPT = [(7 * i) % 500 for i in range(200)]
"""Longer than several blocks of vLLM's cache."""


async def test_the_engine_samples_from_the_pushed_weights(vllm, network, push):
    before = logprobs_of(network, PROMPT, [1, 2, 3])
    disturb(network, 1)
    assert max(abs(a - b) for a, b in zip(before, logprobs_of(network, PROMPT, [1, 2, 3]), strict=True)) > 0.1
    await push(network, 1)
    choice = await vllm.generate(PROMPT, 32)
    assert logprobs_in(choice) == pytest.approx(logprobs_of(network, PROMPT, choice["token_ids"]), abs=TOLERANCE)
    assert choice["weight_versions"] == [{"version": "1", "start": 0, "end": 32}]


def adapted(model: Path) -> Trainer:
    train = Train(lora=Lora(rank=4, alpha=8.0), gradient_checkpointing=False, token_log=False)
    trainer = Trainer(str(model), train)
    learn(trainer)
    return trainer


def learn(trainer: Trainer) -> None:
    """Other adapters than before."""
    with torch.no_grad():
        for name, parameter in trainer.lm.named_parameters():
            if ".lora_B" in name:  # zero when training begins
                parameter.normal_(std=0.05)


async def test_what_adapters_learned_is_what_the_engine_samples_from_after_every_push(
    vllm, network, pusher, tiny_model
):
    trainer = adapted(tiny_model)
    for version in (1, 2):
        report = await asyncio.to_thread(pusher.push, trainer.weights_to_push(), version)
        assert report.methods == {vllm.url: "adapters"}
        choice = await vllm.generate(PROMPT, 16)
        assert choice["weight_versions"] == [{"version": str(version), "start": 0, "end": 16}]
        before, sampled = logprobs_of(network, PROMPT, choice["token_ids"]), logprobs_in(choice)
        network.load_state_dict(dict(trainer.named_tensors()))
        assert sampled == pytest.approx(logprobs_of(network, PROMPT, choice["token_ids"]), abs=TOLERANCE)
        assert max(abs(a - b) for a, b in zip(sampled, before, strict=True)) > 0.1, "as good as what was served before"
        layout = lay_rows([(0, unfold([make_resolved_turn(PROMPT, choice["token_ids"], sampled)])[0])])
        with torch.no_grad():
            learner = trainer.model(PlacedLayout.of(layout, torch.device("cpu"))).logprobs
        assert sampled == pytest.approx(learner.tolist(), abs=TOLERANCE)
        learn(trainer)


@pytest.fixture
def parcel_of(engine_url, tmp_path):
    """`parcel_of(trainer)`: its adapters, ready to be fetched."""
    transfer = AdapterTransfer([engine_url], tmp_path)
    yield lambda trainer: transfer.publish(deduplicate(trainer.weights_to_push()), 5, "float32")
    transfer.withdraw()


async def test_an_engine_that_serves_another_model_merges_nothing_and_gets_all_weights(
    vllm, network, push, pusher, parcel_of
):
    await push(network, 4)
    trainer = adapted(make_tiny_model(seed=1))
    await _is_refused(
        vllm, network, parcel_of(trainer), "is not the base of the adapters: .* 29 differ from the learner's"
    )
    report = await asyncio.to_thread(pusher.push, trainer.weights_to_push(), 6)
    assert report.methods == {vllm.url: "file"}
    network.load_state_dict(dict(trainer.named_tensors()))
    choice = await vllm.generate(PROMPT, 8)
    assert choice["weight_versions"] == [{"version": "6", "start": 0, "end": 8}]
    assert logprobs_in(choice) == pytest.approx(logprobs_of(network, PROMPT, choice["token_ids"]), abs=TOLERANCE)


async def test_a_torn_file_of_adapters_is_refused_and_the_engine_goes_on_with_the_old(
    vllm, network, push, tiny_model, parcel_of
):
    await push(network, 4)
    parcel = parcel_of(adapted(tiny_model))
    _cut(Path(parcel.update_info["adapters"]))
    await _is_refused(vllm, network, parcel, "differs from what was sent")


async def _is_refused(vllm, network, parcel: Payload, reason: str) -> None:
    """`network`, pushed as version 4, is what is served on."""
    async with EngineControl(vllm.url, secret=SECRET, timeouts=PATIENT) as engine:
        with pytest.raises(EngineError, match=f"(?=.*the model was not touched).*{reason}"):
            await engine.update(parcel, 5)
        assert await engine.status() == EngineStatus(label="4", is_paused=False)
    choice = await vllm.generate(PROMPT, 8)
    assert logprobs_in(choice) == pytest.approx(logprobs_of(network, PROMPT, choice["token_ids"]), abs=TOLERANCE)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", ["gemma2", "bloom"])
async def test_a_tied_head_is_pushed_with_the_embedding_whatever_vllm_calls_them(family, tmp_path):
    model = tiny_tied(family)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with running_engine(model, tmp_path / "engine.log") as engine:
        pusher = WeightPusher([engine.url], tmp_path, secret=SECRET, patience_s=0, timeouts=PATIENT)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True), headers=KNOWN) as session:
            vllm = Vllm(engine.url, model, session)
            for version in (1, 2):
                disturb(network, version)
                await asyncio.to_thread(pusher.push, network.state_dict().items(), version)
                choice = await vllm.generate(PROMPT, 16)
                expected = logprobs_of(network, PROMPT, choice["token_ids"])
                assert logprobs_in(choice) == pytest.approx(expected, abs=1e-3)  # its GELU is a rougher one


async def test_a_prefix_that_was_cached_under_old_weights_is_computed_again(vllm, network, push):
    await push(network, 1)
    await vllm.generate(PROMPT, 1)
    hits = await vllm.metric("vllm:prefix_cache_hits_total")
    await vllm.generate(PROMPT, 1)
    async with asyncio.timeout(60):  # or the prompt is not cached, and this test shows nothing
        while await vllm.metric("vllm:prefix_cache_hits_total") <= hits:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    disturb(network, 2)
    await push(network, 2)
    choice = await vllm.generate(PROMPT, 16)
    assert logprobs_in(choice) == pytest.approx(logprobs_of(network, PROMPT, choice["token_ids"]), abs=TOLERANCE)


async def test_a_cache_that_is_kept_serves_only_requests_of_its_salt(engine_url, vllm, network, pusher, tmp_path):
    keeping = WeightPusher(
        [engine_url], tmp_path / "keeping", secret=SECRET, patience_s=0, timeouts=PATIENT, keep_cache=True
    )
    await asyncio.to_thread(pusher.push, network.named_parameters(), 1)
    await vllm.generate(PROMPT, 1, salt="version-1")
    disturb(network, 2)
    await asyncio.to_thread(keeping.push, network.named_parameters(), 2)
    fresh = await vllm.generate(PROMPT, 8, salt="version-2")
    assert fresh["weight_versions"] == [{"version": "2", "start": 0, "end": 8}]
    assert logprobs_in(fresh) == pytest.approx(logprobs_of(network, PROMPT, fresh["token_ids"]), abs=TOLERANCE)
    hits = await vllm.metric("vllm:prefix_cache_hits_total")
    kept = await vllm.generate(PROMPT, 8, salt="version-1")
    async with asyncio.timeout(60):
        while await vllm.metric("vllm:prefix_cache_hits_total") <= hits:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    gap = [a - b for a, b in zip(logprobs_in(kept), logprobs_of(network, PROMPT, kept["token_ids"]), strict=True)]
    assert max(map(abs, gap)) > 0.01, "these keys are of the old weights"


async def test_requests_in_flight_finish_and_each_token_has_the_version_that_sampled_it(vllm, network, push):
    await push(network, 1)
    old_network = type(network)(network.config).eval()
    old_network.load_state_dict(network.state_dict())
    disturb(network, 3)
    async with asyncio.TaskGroup() as tasks:
        requests = [tasks.create_task(vllm.generate([*PROMPT[:20], i], 1500)) for i in range(4)]
        await _until_sampling(vllm)
        report = await push(network, 2)
    assert report.failed == {}
    for i, request in enumerate(requests):
        choice = request.result()
        assert len(choice["token_ids"]) == 1500
        spans = choice["weight_versions"]
        assert [span["version"] for span in spans] == ["1", "2"]
        assert [spans[0]["start"], *(span["end"] for span in spans)] == [0, spans[1]["start"], 1500]
        change = spans[1]["start"]
        told, prompt = logprobs_in(choice), [*PROMPT[:20], i]
        old = logprobs_of(old_network, prompt, choice["token_ids"])
        new = logprobs_of(network, prompt, choice["token_ids"])
        assert told[:change] == pytest.approx(old[:change], abs=TOLERANCE)
        assert told[change:] == pytest.approx(new[change:], abs=TOLERANCE)


async def _until_sampling(vllm) -> None:
    while await vllm.metric("vllm:num_requests_running") < 4:  # noqa: ASYNC110 - the engine offers no event
        await asyncio.sleep(0.02)


async def test_a_push_of_a_small_model_takes_a_fraction_of_a_second(network, push):
    reports = [await push(network, version) for version in range(1, 6)]
    while min(report.total_s for report in reports) >= 1.0 and len(reports) < 100:  # on a busy machine most take longer
        reports.append(await push(network, len(reports) + 1))
    assert min(report.total_s for report in reports) < 1.0
    assert all(0 < report.pause_s <= report.total_s for report in reports)


async def test_no_file_is_left_in_shared_memory(network, push):
    await push(network, 1)
    assert not list(SHARED_MEMORY.glob(f"{FOLDER_PREFIX}{os.getpid()}-*"))


async def test_the_model_on_disk_has_no_version_until_one_is_pushed(engine_url, network, pusher):
    assert (await asyncio.to_thread(pusher.ensure, network.named_parameters(), 0)).version == 0
    async with EngineControl(engine_url, secret=SECRET, timeouts=PATIENT) as engine:
        assert await engine.status() == EngineStatus(label="0", is_paused=False)


@pytest.mark.parametrize("damage", ["missing file", "cut file", "missing tensor", "other shape", "one more layer"])
async def test_bad_weights_are_refused_and_the_engine_goes_on_with_the_old(vllm, network, push, damage, tmp_path: Path):
    await push(network, 4)
    parcel = Payload(update_info={"path": str(_damaged(damage, network, tmp_path))})
    await _is_refused(vllm, network, parcel, "")


def _damaged(damage: str, network, folder: Path) -> Path:
    from safetensors.torch import save_file

    path = folder / "weights.safetensors"
    tensors = {name: tensor.detach().clone() for name, tensor in network.named_parameters()}
    norm = "model.layers.0.input_layernorm.weight"
    match damage:
        case "missing file":
            return path
        case "missing tensor":
            del tensors[norm]
        case "other shape":
            tensors[norm] = tensors[norm][:-1].clone()
        case "one more layer":
            further = f"model.layers.{network.config.num_hidden_layers}."
            tensors |= {
                name.replace("model.layers.0.", further): tensor.clone()
                for name, tensor in tensors.items()
                if name.startswith("model.layers.0.")
            }
    save_file(tensors, path)
    if damage == "cut file":
        _cut(path)
    return path


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


STEPS = [
    ("/pause?mode=keep&clear_cache=true", {}),
    ("/update_weight_version", {"new_version": "updating-2"}),
    ("/start_weight_update", {}),
    ("/update_weights", {"update_info": {"path": "?"}}),
    ("/finish_weight_update", {"weight_version": "2"}),
]


async def _walk(vllm, steps, path: Path) -> None:
    for step, body in steps:
        real = {"update_info": {"path": str(path)}} if "update_info" in body else body
        async with vllm.session.post(vllm.url + step, json=real) as response:
            assert response.status == 200


@pytest.mark.parametrize("died_after", range(1, len(STEPS) + 1))
async def test_whatever_step_a_pusher_died_after_the_next_one_repairs_the_engine(
    vllm, network, push, pusher, died_after, tmp_path
):
    await push(network, 1)
    disturb(network, 5)
    path = _damaged("not at all", network, tmp_path)
    request = asyncio.create_task(vllm.generate(PROMPT, 3))
    await _walk(vllm, STEPS[:died_after], path)
    async with EngineControl(vllm.url, secret=SECRET, timeouts=PATIENT) as engine:
        assert (await engine.status()).is_paused, "vLLM does not end a pause by itself"
    report = await asyncio.to_thread(pusher.ensure, network.named_parameters(), 3)
    assert report.failed == {}
    assert len((await request)["token_ids"]) == 3
    choice = await vllm.generate(PROMPT, 8)
    assert choice["weight_versions"] == [{"version": "3", "start": 0, "end": 8}]
    assert logprobs_in(choice) == pytest.approx(logprobs_of(network, PROMPT, choice["token_ids"]), abs=TOLERANCE)


NAP = [
    STEPS[0],
    ("/update_weight_version", {"new_version": "asleep-1"}),
    ("/sleep?level=1&mode=keep", {}),
    ("/update_weight_version", {"new_version": "1"}),
]


@pytest.mark.parametrize(
    ("steps", "serves"),
    [*((STEPS[:n], version) for n, version in enumerate("13332", start=1)), *((NAP[:n], "1") for n in range(1, 5))],
)
async def test_whatever_step_a_learner_died_after_that_takes_turns_the_next_one_gets_its_engine_going(
    vllm, network, push, pusher, steps, serves, tmp_path
):
    await push(network, 1)
    old = copy.deepcopy(network)
    disturb(network, 5)
    path = _damaged("not at all", network, tmp_path)
    request = asyncio.create_task(vllm.generate(PROMPT, 3))
    await _walk(vllm, steps, path)
    await asyncio.to_thread(pusher.sleep)
    async with EngineControl(vllm.url, secret=SECRET, timeouts=PATIENT) as engine:
        assert (await engine.status()).is_asleep
    await asyncio.to_thread(pusher.wake)
    await asyncio.to_thread(pusher.repair, network.named_parameters(), 3)
    assert len((await request)["token_ids"]) == 3
    choice = await vllm.generate(PROMPT, 8)
    assert choice["weight_versions"] == [{"version": serves, "start": 0, "end": 8}]
    theirs = logprobs_of(old if serves == "1" else network, PROMPT, choice["token_ids"])
    assert logprobs_in(choice) == pytest.approx(theirs, abs=TOLERANCE)


async def test_weights_that_change_unannounced_are_served_under_no_version_and_replaced(
    engine_url, network, vllm, pusher, tmp_path
):
    """Done by somebody who knows the secret, or on an engine that asks nobody for one."""
    named = list(network.named_parameters())
    await asyncio.to_thread(pusher.push, named, 3)
    zeros = FileTransfer([engine_url], tmp_path)
    parcel = zeros.publish({name: torch.zeros_like(tensor) for name, tensor in named}, 3, None)
    for path, body in (
        ("/start_weight_update", {}),
        ("/update_weights", {"update_info": parcel.update_info}),
        ("/finish_weight_update", {}),
    ):
        async with vllm.session.post(vllm.url + path, json=body) as response:
            assert response.status == 200, await response.text()
    zeros.withdraw()
    foreign = await vllm.generate(PROMPT, 4)
    assert foreign["weight_versions"] == [{"version": UNANNOUNCED, "start": 0, "end": 4}], "which no proxy records"
    assert logprobs_in(foreign) != pytest.approx(logprobs_of(network, PROMPT, foreign["token_ids"]), abs=TOLERANCE)
    assert (await asyncio.to_thread(pusher.ensure, named, 3)).replaced == (engine_url,)
    mended = await vllm.generate(PROMPT, 4)
    assert mended["weight_versions"] == [{"version": "3", "start": 0, "end": 4}]
    assert logprobs_in(mended) == pytest.approx(logprobs_of(network, PROMPT, mended["token_ids"]), abs=TOLERANCE)


async def test_a_file_of_other_bytes_than_were_sent_is_refused(vllm, network, push, tmp_path):
    await push(network, 4)
    parcel = FileTransfer([vllm.url], tmp_path).publish(dict(network.named_parameters()), 5, None)
    other = Payload(update_info={**parcel.update_info, "checksum": parcel.checksum + 1})
    await _is_refused(vllm, network, other, "differs from what was sent")


async def test_the_engine_says_where_its_workers_are(engine_url):
    async with EngineControl(engine_url, secret=SECRET, timeouts=PATIENT) as engine:
        (worker,) = await engine.facts()
    assert (worker.gpu, worker.dtype) == ("", "float32")
    assert worker.pid > 0


async def test_a_worker_counts_the_updates_that_changed_its_weights_and_no_others(engine_url, network, push, parcel_of):
    async with EngineControl(engine_url, secret=SECRET, timeouts=PATIENT) as engine:
        (before,) = await engine.facts()
        await push(network, 4)
        (after,) = await engine.facts()
        assert after.loads == before.loads + 1
        with pytest.raises(EngineError, match="the model was not touched"):
            await engine.update(parcel_of(adapted(make_tiny_model(seed=1))), 5)
        assert (await engine.facts()) == [after]
