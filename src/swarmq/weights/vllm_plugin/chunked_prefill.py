"""Runs inside vLLM: fixes chunked prefill on a CPU for seeded requests.

Without a GPU a chunk takes seconds, and a long prompt computed in one chunk would block all other requests for minutes. After
each chunk but the last, vLLM (0.32) samples a token, discards it and rewinds the request's generator, which CPU generators do
not support, so the engine core would die. This patch removes the generator while a token is sampled to be discarded, so that
its state does not change.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from vllm.v1.worker.cpu_model_runner import CPUModelRunner

PATCH_MARK = "swarmq_pieces"


def register() -> None:
    """Patch this process; does nothing if vLLM has no such method."""
    stock = getattr(CPUModelRunner, "sample_tokens", None)
    if stock is not None and not hasattr(stock, PATCH_MARK):  # vLLM also wraps this method
        CPUModelRunner.sample_tokens = _wrap_sample_tokens(stock)


def _wrap_sample_tokens(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def sample_tokens(self: CPUModelRunner, *rest: Any) -> Any:
        with _set_generators_aside(self):
            return stock(self, *rest)

    setattr(sample_tokens, PATCH_MARK, True)
    return sample_tokens


@contextlib.contextmanager
def _set_generators_aside(runner: CPUModelRunner) -> Iterator[None]:
    """Remove generators of requests with unfinished prompts inside the block."""
    generators = runner.input_batch.generators
    unfinished = runner.discard_request_mask.np[: runner.input_batch.num_reqs].nonzero()[0].tolist()
    away = {request: generators.pop(request) for request in unfinished if request in generators}
    try:
        yield
    finally:
        generators.update(away)
