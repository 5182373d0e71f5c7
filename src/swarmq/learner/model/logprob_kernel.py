"""CUDA kernels for a row of FP32 logits: one read for log-probability and entropy, another for the gradient.

One program per token. Written in Triton, because it needs no compilation per number of tokens and, unlike compiled PyTorch,
computes the maximum, the sum of exponentials and the expected logit in one sweep.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

BLOCK = 4096
WARPS = 8
UNCAPPED = 0.0


def reduce_rows(
    logits: Tensor,  # [S, V] float32
    targets: Tensor,  # [S]
    temperatures: Tensor,  # [S]
    multiplier: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probability of each target, entropy, and log of the sum of exponentials, each [S]."""
    logprobs, entropies, norms = (torch.empty(len(logits), device=logits.device) for _ in range(3))
    if len(logits):
        _reduce[(len(logits),)](
            logits.contiguous(),
            targets.contiguous(),
            temperatures.contiguous(),
            logprobs,
            entropies,
            norms,
            logits.shape[1],
            multiplier,
            softcap or UNCAPPED,
            CAPPED=softcap is not None,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return logprobs, entropies, norms


def write_gradient_rows(
    logits: Tensor,  # [S, V] float32
    targets: Tensor,  # [S]
    temperatures: Tensor,  # [S]
    norms: Tensor,  # [S]
    multiplier: float,
    softcap: float | None,
    out: Tensor,  # [S, V]
) -> None:
    """Write to `out` the gradient of each log-probability times its temperature with respect to the product W h + b."""
    if len(logits):
        _write_gradient[(len(logits),)](
            logits.contiguous(),
            targets.contiguous(),
            temperatures.contiguous(),
            norms.contiguous(),
            out,
            logits.shape[1],
            multiplier,
            softcap or UNCAPPED,
            CAPPED=softcap is not None,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )


@triton.jit
def _transform(logits, multiplier, softcap, CAPPED: tl.constexpr):
    scaled = logits * multiplier
    if CAPPED:
        scaled = softcap * libdevice.tanh(scaled / softcap)
    return scaled


@triton.jit
def _reduce(
    logits,
    targets,
    temperatures,
    logprobs,
    entropies,
    norms,
    vocab,
    multiplier,
    softcap,
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocab
    temperature = tl.load(temperatures + row)
    # For each of BLOCK lanes, over the logits x that it has read: their maximum, the sum of p = exp(x - maximum), and
    # the sum of p (x - maximum).
    most = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    moment = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < vocab
        x = _transform(tl.load(logits + at, mask=inside, other=0.0), multiplier, softcap, CAPPED) / temperature
        higher = tl.where(inside, tl.maximum(most, x), most)
        shift = most - higher
        kept = tl.exp(shift)
        gap = tl.where(inside, x - higher, 0.0)
        p = tl.where(inside, tl.exp(gap), 0.0)
        moment = kept * (moment + shift * total) + p * gap
        total = kept * total + p
        most = higher
    peak = tl.max(most, 0)
    shift = most - peak
    kept = tl.exp(shift)
    moment_all = tl.sum(kept * (moment + shift * total), 0)
    total_all = tl.sum(kept * total, 0)
    log_total = tl.log(total_all)
    target = tl.load(targets + row)
    chosen = _transform(tl.load(logits + target), multiplier, softcap, CAPPED) / temperature
    tl.store(logprobs + row, chosen - peak - log_total)
    tl.store(entropies + row, log_total - moment_all / total_all)
    tl.store(norms + row, peak + log_total)


@triton.jit
def _write_gradient(
    logits,
    targets,
    temperatures,
    norms,
    out,
    vocab,
    multiplier,
    softcap,
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocab
    out += row * vocab
    temperature = tl.load(temperatures + row)
    norm = tl.load(norms + row)
    target = tl.load(targets + row)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < vocab
        formed = _transform(tl.load(logits + at, mask=inside, other=0.0), multiplier, softcap, CAPPED)
        gap = tl.where(at == target, 1.0, 0.0) - tl.exp(formed / temperature - norm)
        gap *= multiplier
        if CAPPED:
            part = formed / softcap
            gap *= 1.0 - part * part
        tl.store(out + at, gap.to(out.dtype.element_ty), mask=inside)
