"""What is changed in vLLM's own classes does what it is for, in vLLM's own words."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its own
    pytest.importorskip("vllm")
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    from swarmq.weights.format.conventions import UNANNOUNCED
    from swarmq.weights.vllm_plugin import chunked_prefill, cpu_drafts, cpu_rotation, unannounced_changes

pytestmark = pytest.mark.vllm

PATCHED = ((EngineCore, "collective_rpc"), (CPUModelRunner, "sample_tokens"), (RotaryEmbedding, "forward_cpu"))
STOCK = {place: getattr(*place) for place in PATCHED}


@pytest.fixture(autouse=True)
def given_back(monkeypatch):
    """Each test begins with vLLM as it is, and leaves it so."""
    for (owner, name), method in STOCK.items():
        monkeypatch.setattr(owner, name, method)


class Core(EngineCore):
    """An engine core without a model, that knows what was asked of its workers."""

    def __init__(self, label):
        self._weight_version, self.asked = label, []
        self.model_executor = SimpleNamespace(collective_rpc=lambda method, *_: self.asked.append(method))


@pytest.mark.parametrize(
    ("label", "method", "then"),
    [
        ("7", "update_weights", UNANNOUNCED),
        ("default", "update_weights", UNANNOUNCED),
        ("7", "reset_weights", UNANNOUNCED),
        ("updating-8", "update_weights", "updating-8"),
        ("7", "swarmq_facts", "7"),
        ("7", "start_weight_update", "7"),
    ],
)
def test_weights_that_change_unannounced_lose_their_version(label, method, then):
    unannounced_changes.register()
    unannounced_changes.register()
    core = Core(label)
    core.collective_rpc(method, None)
    assert (core.get_weight_version(), core.asked) == (then, [method])


def test_the_runner_that_vllm_brings_is_changed_once():
    for _ in range(2):
        chunked_prefill.register()
        assert CPUModelRunner.sample_tokens.__wrapped__ is STOCK[CPUModelRunner, "sample_tokens"]


def test_a_call_whose_prompt_goes_on_keeps_its_generator_untouched(monkeypatch):
    seen = {}
    monkeypatch.setattr(CPUModelRunner, "sample_tokens", lambda runner, _: seen.update(runner.input_batch.generators))
    chunked_prefill.register()
    generators = {0: "whole", 1: "goes on", 3: "whole too"}
    runner = object.__new__(CPUModelRunner)
    runner.input_batch = SimpleNamespace(num_reqs=4, generators=generators)
    runner.discard_request_mask = SimpleNamespace(np=np.array([False, True, True, False, True]))
    runner.sample_tokens(None)
    assert seen == {0: "whole", 3: "whole too"}
    assert runner.input_batch.generators is generators
    assert generators == {0: "whole", 1: "goes on", 3: "whole too"}


def test_every_draft_is_judged_at_its_requests_temperature():
    temperatures, drafts = torch.tensor([0.2, 0.0, 0.7]), torch.tensor([2, 3, 5], dtype=torch.int32)
    assert cpu_drafts.expand(temperatures, drafts, 5, replace_from=0, replace_to=1).tolist() == pytest.approx(
        [0.2, 0.2, 1.0, 0.7, 0.7]
    )
    assert cpu_drafts.expand(torch.tensor([3, 4]), torch.tensor([0, 2]), 2).tolist() == [4, 4]


@pytest.mark.skipif(not torch.cpu.is_available() or torch.cuda.is_available(), reason="of the CPU build")
@pytest.mark.parametrize("heads", ["slices", "flat"])
def test_positions_of_queries_that_are_slices_of_heads_are_those_of_whole_ones(heads):
    cpu_rotation.register()
    cpu_rotation.register()
    with set_current_vllm_config(VllmConfig()):
        rope = RotaryEmbedding(64, 64, 128, 10_000.0, is_neox_style=False, dtype=torch.float32)
    torch.manual_seed(0)
    positions, queries, keys = torch.arange(7), torch.randn(7, 4, 96), torch.randn(7, 576)
    query, key = queries[..., 32:], keys[:, None, 512:]
    wanted = rope.forward_native(positions, query.clone(), key.clone())
    if heads == "flat":
        query, key = query.reshape(7, -1), key.reshape(7, -1)
    rotated = rope.forward_cpu(positions, query, key)
    for ours, native in zip(rotated, wanted, strict=True):
        assert torch.allclose(ours.reshape(native.shape), native, atol=1e-5)
