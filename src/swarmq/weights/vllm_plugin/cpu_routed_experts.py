"""Runs inside vLLM: returns the routed experts of tokens on a CPU (`--enable-return-routed-experts`).

vLLM (0.32) captures, stores and returns them in its second model runner only, which needs Triton, and the CPU build runs the first. The
routers of both call the same hook, so this patch connects the first runner to vLLM's own store, which also keeps the experts of tokens
in the prefix cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

PATCH_MARK = "swarmq_routed_experts"


def register() -> None:
    """Patch this process if it computes on a CPU and vLLM has a store of routed experts."""
    check = getattr(VllmConfig, "_verify_aux_output_compatibility", None)
    if check is None or hasattr(check, PATCH_MARK) or not current_platform.is_cpu():
        return
    VllmConfig._verify_aux_output_compatibility = _wrap_check(check)  # noqa: SLF001 - there is no public hook
    for name, wrap in (
        ("initialize_kv_cache", _wrap_initialize),
        ("execute_model", _wrap_execute),
        ("sample_tokens", _wrap_sample),
    ):
        setattr(CPUModelRunner, name, wrap(getattr(CPUModelRunner, name)))


def _wrap_check(stock: Callable[[VllmConfig], None]) -> Callable[[VllmConfig], None]:
    """Wrap vLLM's check so that it leaves the choice of the model runner to this plug-in, as it does for platforms outside its tree."""

    @functools.wraps(stock)
    def check(self: VllmConfig) -> None:
        current_platform.is_out_of_tree = lambda: True
        try:
            stock(self)
        finally:
            del current_platform.is_out_of_tree

    setattr(check, PATCH_MARK, True)
    return check


def _wrap_initialize(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def initialize_kv_cache(self: CPUModelRunner, kv_cache_config: Any, *rest: Any, **fields: Any) -> None:
        stock(self, kv_cache_config, *rest, **fields)
        self.routed_experts = None
        if self.vllm_config.aux_output_config.enabled:
            from vllm.distributed.aux_output_connector.worker import get_aux_output_connector  # noqa: PLC0415 - starts a thread

            self.routed_experts = get_aux_output_connector(self.model, self.vllm_config, kv_cache_config)

    return initialize_kv_cache


def _wrap_execute(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def execute_model(self: CPUModelRunner, scheduled: Any, *rest: Any, **fields: Any) -> Any:
        if self.routed_experts is not None:
            self.routed_experts.begin_step(scheduled.aux_output_connector_metadata)
        output = stock(self, scheduled, *rest, **fields)
        self.routed_experts_pending = None
        if self.routed_experts is not None and self.execute_model_state is not None:  # something was computed
            self.routed_experts_pending = self.routed_experts.prepare_output(_describe_batch(self))
        return output

    return execute_model


def _wrap_sample(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def sample_tokens(self: CPUModelRunner, *rest: Any) -> Any:
        state = self.execute_model_state
        output = stock(self, *rest)
        if self.routed_experts is not None and self.routed_experts_pending is not None:
            drafts = state.scheduler_output.scheduled_spec_decode_tokens
            sampled = [len(tokens) for tokens in output.sampled_token_ids]
            rejected = [
                max(0, len(drafts.get(request, ())) + 1 - count) if count else 0
                for request, count in zip(output.req_ids, sampled, strict=True)
            ]
            self.routed_experts_pending.enqueue_cpu_copy(np.array(sampled), np.array(rejected))
            output.aux_output_connector_output = self.routed_experts_pending.process_output()
        return output

    return sample_tokens


def _describe_batch(runner: CPUModelRunner) -> SimpleNamespace:
    """Return what the store needs of the second runner's batch."""
    count = runner.input_batch.num_reqs
    return SimpleNamespace(
        req_ids=runner.input_batch.req_ids,
        query_start_loc_np=runner.query_start_loc.np[: count + 1].copy(),
        num_computed_tokens_np=runner.input_batch.num_computed_tokens_cpu[:count].copy(),
    )
