"""Runs inside vLLM: prompts that are computed in pieces, on a CPU, for calls that have a seed.

Without a GPU a piece takes seconds, and a long prompt that is computed whole stops all others, and every question to the engine,
for minutes. After each piece but the last, vLLM (0.32) samples a token, throws it away and turns the call's generator back, which
generators of a CPU cannot do: the engine core would die. Here such a call has no generator while its token is for nothing, so its
generator is where it was.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from vllm.v1.worker.cpu_model_runner import CPUModelRunner

PATCH_MARK = "swarmq_pieces"


def register() -> None:
    """For this process; does nothing for a vLLM that samples in another way."""
    stock = getattr(CPUModelRunner, "sample_tokens", None)
    if stock is not None and not hasattr(stock, PATCH_MARK):  # vLLM itself wraps it, too
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
    """The generators of calls whose prompts go on in the next step are put away."""
    generators = runner.input_batch.generators
    unfinished = runner.discard_request_mask.np[: runner.input_batch.num_reqs].nonzero()[0].tolist()
    away = {request: generators.pop(request) for request in unfinished if request in generators}
    try:
        yield
    finally:
        generators.update(away)
