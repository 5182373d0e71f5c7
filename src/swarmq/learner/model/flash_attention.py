"""FlashAttention over packed rows, on Hopper GPUs.

The kernels of the package flash-attn-4 compute sequences of several lengths without padding and without a mask, which is all
that packed rows need. Layouts that fork, and passes that ranks share, are left to FlexAttention. A kind of attention is computed
here only after a trial in this process (attention_check.py). Kernels are compiled for a kind of attention and fit all lengths.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from swarmq.learner.model.batched_attention import AttentionForm

Kernel = Callable[..., tuple[Tensor, Any]]

CAPABILITY = 9
"""Major compute capability of the GPUs on which the kernels were tried: Hopper."""
MAX_ROWS = 256
"""Largest number of rows in a pass: for more, the package compiles other kernels, which the trial does not reach."""
LEAST_LONGEST = 1024
"""Least upper bound of a row's length that kernels are told: for rows of a single block, the package compiles other kernels."""
FLEX_SLOWDOWN = 1.5
"""Time of FlexAttention over that of FlashAttention, forward and backward, over rows of 16k tokens with 128 numbers in each of 16 or
32 heads, on one H200."""


class Kind(NamedTuple):
    """What a kernel is compiled for, and the constants of a layer's attention."""

    shapes: tuple[tuple[int, int], ...]
    """Heads and head size of queries, keys and values."""
    dtype: torch.dtype
    scale: float
    window: int | None
    softcap: float | None
    sinks: bool
    backward: bool
    """Whether there is a backward pass."""

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Kind:
        """Return the kind of attention from queries, keys and values [1, heads, T, D]."""
        asked = (query, key, value)
        shapes = tuple((x.shape[1], x.shape[3]) for x in asked)
        backward = any(x.requires_grad for x in asked)
        return cls(shapes, query.dtype, form.scale, form.window, form.softcap, form.sinks is not None, backward)


class Rows(NamedTuple):
    """N packed rows on the device."""

    edges: Tensor  # [N + 1] int32, start of each row, and the end of the last one
    longest: int
    """Number of tokens of the longest row."""


_usable: set[Kind] = set()
"""Kinds of attention that passed their trial in this process."""


def allow(kinds: Iterable[Kind]) -> None:
    """Let FlashAttention compute these kinds of attention from now on, and what needs only their forward pass."""
    for kind in kinds:
        _usable.update((kind, kind._replace(backward=False)))


def is_allowed(kind: Kind) -> bool:
    """Whether FlashAttention computes this kind of attention. Its gradients depend on the order of sums on the GPU, so it computes
    nothing if torch's deterministic algorithms are on."""
    return kind in _usable and not torch.are_deterministic_algorithms_enabled()


def find_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the package cannot compute attention in `dtype` on `device`, before any trial, or None."""
    if dtype not in {torch.bfloat16, torch.float16}:
        return f"FlashAttention computes in half precision only, not in {dtype}"
    if torch.are_deterministic_algorithms_enabled():
        return "FlashAttention's gradients are not deterministic"
    if torch.cuda.get_device_capability(device)[0] != CAPABILITY:
        return "FlashAttention is used on Hopper GPUs only"
    try:
        load_kernel()
    except ModuleNotFoundError as error:
        if error.name in {"flash_attn", "flash_attn.cute"}:
            return "the package flash-attn-4 is not installed: pip install 'swarmq[flash]'"
        return f"the package flash-attn-4 cannot be imported: {error}"
    except Exception as error:  # a beta, whose dependencies load libraries of CUDA
        return f"the package flash-attn-4 cannot be imported: {type(error).__name__}: {error}"
    return None


@functools.cache
def load_kernel() -> Kernel:
    """Import the package, which takes seconds."""
    kernel: Kernel = importlib.import_module("flash_attn.cute").flash_attn_varlen_func
    return kernel


def attend_in_rows(query: Tensor, key: Tensor, value: Tensor, form: AttentionForm, rows: Rows) -> Tensor:
    """Compute causal attention [1, heads, T, D] over packed rows, from queries of that shape, and keys and values [1, key heads,
    T, D] of the same half precision."""
    longest = max(rows.longest, LEAST_LONGEST)
    output, _ = load_kernel()(
        *(x[0].transpose(0, 1) for x in (query, key, value)),
        cu_seqlens_q=rows.edges,
        cu_seqlens_k=rows.edges,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        softmax_scale=form.scale,
        causal=True,
        window_size=(None, None) if form.window is None else (form.window - 1, 0),
        learnable_sink=None if form.sinks is None else form.sinks.float(),
        softcap=form.softcap or 0.0,
    )
    return output.transpose(0, 1)[None]
