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
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    from swarmq.weights.format.conventions import DRAFT_SCHEDULE, UNANNOUNCED
    from swarmq.weights.vllm_plugin import chunked_prefill, cpu_drafts, cpu_rotation, drafts, unannounced_changes

pytestmark = pytest.mark.vllm

PATCHED = (
    (EngineCore, "collective_rpc"),
    (CPUModelRunner, "sample_tokens"),
    (CPUModelRunner, "propose_draft_token_ids"),
    (RotaryEmbedding, "forward_cpu"),
    (Scheduler, "__init__"),
    (Scheduler, "update_from_output"),
    (rejection_sampler, "expand_batch_to_tokens"),
    (rejection_sampler, "apply_sampling_constraints"),
)
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
def test_a_step_without_drafts_has_no_largest_top_k():
    cpu_drafts.register()
    metadata = SimpleNamespace(
        all_greedy=False, temperature=torch.ones(2), top_k=torch.tensor([1, 5], dtype=torch.int32), top_p=None
    )
    drafts_before = torch.zeros(2, dtype=torch.int32)
    left = rejection_sampler.apply_sampling_constraints(torch.zeros(0, 20), drafts_before, metadata)
    assert left.shape == (0, 20)
    left = rejection_sampler.apply_sampling_constraints(torch.randn(3, 20), torch.tensor([2, 3]), metadata)
    assert (left > -torch.inf).sum(1).tolist() == [1, 1, 5]


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


OURS = SimpleNamespace(method="ngram", num_speculative_tokens_per_batch_size=[tuple(entry) for entry in DRAFT_SCHEDULE])
"""vLLM's settings of speculative decoding, as far as they matter, when `engine.speculation` is set."""
OF_A_USER = SimpleNamespace(num_speculative_tokens_per_batch_size=[(1, 64, 5)])


@pytest.mark.parametrize(("settings", "drafted"), [(OURS, [[7, 8], []]), (OF_A_USER, "vLLM's own")])
def test_drafts_come_from_other_conversations_unless_a_user_chose_others(monkeypatch, settings, drafted):
    monkeypatch.setattr(CPUModelRunner, "propose_draft_token_ids", lambda *_: "vLLM's own")
    drafts.register()
    runner = object.__new__(CPUModelRunner)
    runner.speculative_config = settings
    runner.input_batch = SimpleNamespace(
        token_ids_cpu=np.array([[9, 5, 6, 0, 0, 0], [4, 5, 6, 7, 8, 0]]), num_tokens_no_spec=np.array([3, 5])
    )
    scheduled = SimpleNamespace(num_spec_tokens_to_schedule=3)
    assert runner.propose_draft_token_ids(scheduled, [[6], []]) == drafted


@pytest.mark.parametrize(("settings", "ends_with"), [(OURS, 0), (OF_A_USER, 5)])
def test_a_scheduler_stops_drafting_where_drafts_do_not_pay_unless_a_user_set_their_number(
    monkeypatch, settings, ends_with
):
    def init(scheduler):
        scheduler.vllm_config, scheduler.dynamic_sd_lookup = SimpleNamespace(speculative_config=settings), [5] * 65

    monkeypatch.setattr(Scheduler, "__init__", init)
    monkeypatch.setattr(Scheduler, "update_from_output", lambda *_: "outputs")
    monkeypatch.setattr(Scheduler, "has_unfinished_requests", lambda _: True)
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(drafts.time, "perf_counter", lambda: clock.now)
    drafts.register()
    scheduler, drafted = Scheduler(), 0
    for _ in range(1000):
        count, drafted = drafted, scheduler.dynamic_sd_lookup[4]
        clock.now += 1.0 + count
        scheduled = SimpleNamespace(
            num_scheduled_tokens=dict.fromkeys("abcd", 1 + count), num_spec_tokens_to_schedule=drafted
        )
        computed = SimpleNamespace(sampled_token_ids=[[1], [1], [1], [1]])
        assert scheduler.update_from_output(scheduled, computed) == "outputs"
    assert drafted == ends_with


@pytest.mark.parametrize("runner", [{"use_v2_model_runner": False}, {}])
def test_a_gpu_engine_that_cannot_change_the_number_of_drafts_says_so_at_its_start(monkeypatch, runner):
    settings = SimpleNamespace(**vars(OURS) | {"method": "ngram_gpu"})

    def init(scheduler):
        scheduler.vllm_config = SimpleNamespace(speculative_config=settings, **runner)

    monkeypatch.setattr(Scheduler, "__init__", init)
    drafts.register()
    with pytest.raises(ValueError, match=r"needs model runner V2 of vLLM 0\.32 .*VLLM_USE_V2_MODEL_RUNNER=0"):
        Scheduler()


def test_a_vllm_without_drafts_on_the_gpu_starts_without_them(monkeypatch):
    monkeypatch.setattr(drafts.current_platform, "is_cuda", lambda: True)
    monkeypatch.setattr(drafts.importlib.util, "find_spec", lambda _: None)
    drafts.register()
