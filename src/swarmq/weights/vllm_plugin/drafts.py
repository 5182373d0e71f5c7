"""Runs inside vLLM: drafts from the text of all conversations, as many as pay.

The episodes of a group do the same task, so what one of them wrote is the best guess at what the next will write. vLLM (0.32) looks for
drafts in the same conversation alone; `draft_search.py` searches the text of all requests in the engine's slots, that of finished ones
too until another request takes the slot. And vLLM changes the number of drafts from step to step by a table of batch sizes, for each
number of which it captures CUDA graphs. It is started with `DRAFT_SCHEDULE`, which has all of them; what the scheduler reads is replaced
by what `draft_counts.py` measured.

Drafts change the speed alone: the model checks each of them, and what is sampled keeps its distribution, whatever they are.
"""

from __future__ import annotations

import functools
import importlib.util
import time
from collections.abc import Callable
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from swarmq.weights.format.conventions import DRAFT_SCHEDULE
from swarmq.weights.vllm_plugin.draft_counts import DraftCounts
from swarmq.weights.vllm_plugin.draft_search import find_continuation

NEEDS_RUNNER = (
    'engine.speculation = "ngram" on a GPU needs model runner V2 of vLLM 0.32 or later, which this engine does not use '
    '(VLLM_USE_V2_MODEL_RUNNER=0, or engine.arguments that it does not support): set engine.speculation = "none"'
)


def register() -> None:
    """Patch this process; engines that were started with drafts of a user's own choice keep theirs."""
    if not hasattr(Scheduler.__init__, "__wrapped__"):
        Scheduler.__init__ = _wrap_init(Scheduler.__init__)
        Scheduler.update_from_output = _wrap_update(Scheduler.update_from_output)
        CPUModelRunner.propose_draft_token_ids = _wrap_propose(CPUModelRunner.propose_draft_token_ids)
    if current_platform.is_cuda() and _has_gpu_drafts():
        from swarmq.weights.vllm_plugin import draft_search_gpu  # noqa: PLC0415 - it imports what older versions of vLLM lack

        draft_search_gpu.register()


def _has_gpu_drafts() -> bool:
    """Return whether this vLLM (from 0.32 on) finds n-gram drafts on the GPU."""
    return importlib.util.find_spec("vllm.v1.worker.gpu.spec_decode.ngram") is not None


def is_ours(speculative_config: Any) -> bool:
    """Return whether vLLM was started with `DRAFT_SCHEDULE`."""
    given = getattr(speculative_config, "num_speculative_tokens_per_batch_size", None)
    return given is not None and [list(entry) for entry in given] == DRAFT_SCHEDULE


def _wrap_init(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def init(self: Scheduler, *rest: Any, **fields: Any) -> None:
        stock(self, *rest, **fields)
        settings = self.vllm_config.speculative_config
        if is_ours(settings):
            if settings.method == "ngram_gpu" and not getattr(self.vllm_config, "use_v2_model_runner", False):
                raise ValueError(NEEDS_RUNNER)
            self.dynamic_sd_lookup = DraftCounts()

    return init


def _wrap_update(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def update_from_output(self: Scheduler, scheduled: Any, computed: Any, *rest: Any, **fields: Any) -> Any:
        outputs = stock(self, scheduled, computed, *rest, **fields)
        if isinstance(self.dynamic_sd_lookup, DraftCounts):
            self.dynamic_sd_lookup.observe(
                requests=len(scheduled.num_scheduled_tokens),
                sampled=sum(map(len, computed.sampled_token_ids)),
                count_after=scheduled.num_spec_tokens_to_schedule,
                idle_after=not self.has_unfinished_requests(),
                now=time.perf_counter(),
            )
        return outputs

    return update_from_output


def _wrap_propose(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def propose_draft_token_ids(self: CPUModelRunner, scheduled: Any, sampled: Any, *rest: Any, **fields: Any) -> Any:
        if not is_ours(self.speculative_config):
            return stock(self, scheduled, sampled, *rest, **fields)
        texts, lengths = self.input_batch.token_ids_cpu, self.input_batch.num_tokens_no_spec
        count = scheduled.num_spec_tokens_to_schedule
        return [
            find_continuation(texts, lengths, row, count) if tokens and count else []
            for row, tokens in enumerate(sampled)
        ]

    return propose_draft_token_ids
