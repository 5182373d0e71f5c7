"""Log-probabilities of target tokens without ever holding [S, vocabulary] logits.

The head runs over chunks of tokens. For the first tokens, as many as fit a fixed share of memory, the gradient of the
log-probabilities is kept in the dtype of the matrix products; for other tokens, logits are recomputed in the backward pass.
Logits are FP32 (from BF16 factors on CUDA, where the matrix product accumulates and returns FP32). Bias, scaling and soft-capping
of logits are part of the head.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from swarmq.learner.model.activation_checkpointing import get_free_bytes

CPU_CHUNK = 1 << 22
"""Largest number of logits at once on a CPU (16 MiB), and of kept gradients of logits."""
GPU_SHARE = 1 / 10
"""Share of a GPU's memory for FP32 logits at once, and again for their kept gradients. Chunks are few and large, because each
one costs a pass over the gradient of the head's weight."""
FREE_SHARE = 1 / 4
"""Share of the free memory for logits or gradients, if that is less than `GPU_SHARE` of all memory."""
COPIES = 4
"""Largest number of FP32 tensors of the logits' size at once where torch computes with logits in place of a kernel."""
FIXED_ROOM = 1 << 30
"""Bytes for logits or gradients if a repeated step must be equal bit for bit, whatever else is in memory."""


SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Names for the soft-capping of logits in configurations: Gemma's, RecurrentGemma's, xLSTM's. Logits of a small untrained model
are too small to reveal it."""


class LogitForm(NamedTuple):
    """Transformation that some models apply to the product W h + b: softcap * tanh(multiplier * product / softcap)."""

    multiplier: float = 1.0
    softcap: float | None = None


class LmHead(NamedTuple):
    """The module and parameters that compute logits from hidden states."""

    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    form: LogitForm = LogitForm()


class TopTokens(NamedTuple):
    """The likeliest tokens of each position."""

    ids: Tensor  # [S, K] int64
    logprobs: Tensor  # [S, K] float32; -inf where there are fewer than K

    def within(self, vocab: int) -> TopTokens:
        """Return the tokens without those that a model of `vocab` tokens lacks: a larger model of a family may have more rows."""
        known = self.ids < vocab
        return TopTokens(self.ids.where(known, 0), self.logprobs.where(known, -math.inf))


class Scored(NamedTuple):
    logprobs: Tensor  # [S] float32, natural log, differentiable
    entropies: Tensor  # [S] float32, nats, without gradient
    candidates: Tensor | None = None  # [S, K] float32, log-probabilities of further tokens, differentiable
    top: TopTokens | None = None


def get_head(model: PreTrainedModel) -> LmHead:
    """Return the head of a transformers causal language model, with the transformation of logits from its configuration."""
    linear = model.get_output_embeddings()
    config = model.config.get_text_config()
    multiplier = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
    caps = (cap for name in SOFTCAPS if (cap := getattr(config, name, None)))
    return LmHead(linear.weight, linear.bias, LogitForm(multiplier, next(caps, None)))


def score_hidden(
    hidden: Tensor, head: LmHead, targets: Tensor, temperatures: Tensor, *, chunk: int | None = None
) -> Scored:
    """Return the log-probability of `targets` [S] given hidden states [S, H] under softmax(logits / temperatures [S]).

    `chunk`: number of tokens whose logits exist at once, and for which gradients are kept; None: as many as fit.
    """
    learning = torch.is_grad_enabled()  # inside a Function's forward, gradients always count as disabled
    logprobs, entropies = _Score.apply(hidden, *head, targets, temperatures, learning, chunk)  # type: ignore[no-untyped-call]
    return Scored(logprobs, entropies)


def score_logits(logits: Tensor, targets: Tensor, temperatures: Tensor) -> Scored:
    """Return the log-probability of `targets` [S] under softmax(logits / temperatures [S]) from logits [S, V] that exist
    already."""
    logprobs, entropies, _ = _reduce(logits.float(), targets, temperatures, LogitForm())
    return Scored(logprobs, entropies.detach())


def score_candidates(
    hidden: Tensor, head: LmHead, candidates: Tensor, temperatures: Tensor, *, chunk: int | None = None
) -> Tensor:
    """Return the log-probabilities [S, K] of `candidates` [S, K] given hidden states [S, H], as `score_hidden` does of one target. Logits
    are computed anew in the backward pass."""
    scored: Tensor = _ScoreCandidates.apply(hidden, *head, candidates, temperatures, chunk)  # type: ignore[no-untyped-call]
    return scored


def find_top(hidden: Tensor, head: LmHead, temperatures: Tensor, k: int, *, chunk: int | None = None) -> TopTokens:
    """Return the `k` likeliest tokens of each position, without gradient."""
    weight, dtype = head.weight, _get_dtype(head.weight, hidden.device)
    parts = []
    with torch.no_grad():
        for part in _list_chunks(len(hidden), weight, size=chunk, copies=COPIES):
            logits = _transform(_multiply(hidden[part].to(dtype), weight.to(dtype).t(), head.bias), head.form)
            parts.append(find_top_of_logits(logits, temperatures[part], k))
            del logits  # freed before the next chunk's logits are computed
    return TopTokens(*(torch.cat(each) for each in zip(*parts, strict=True)))


def find_top_of_logits(logits: Tensor, temperatures: Tensor, k: int) -> TopTokens:
    values, ids = (logits.float() / temperatures[:, None]).log_softmax(-1).topk(min(k, logits.shape[-1]))
    return TopTokens(ids, values)


class _ScoreCandidates(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        form: LogitForm,
        candidates: Tensor,
        temperatures: Tensor,
        chunk: int | None,
    ) -> Tensor:
        ctx.dtype, ctx.form, ctx.chunk = _get_dtype(weight, hidden.device), form, chunk
        factor = weight.to(ctx.dtype).t()
        logprobs = torch.empty(candidates.shape, device=hidden.device)
        norms = torch.empty(len(candidates), device=hidden.device)
        for part in _list_chunks(len(candidates), weight, size=chunk, copies=COPIES):
            scaled = _transform(_multiply(hidden[part].to(ctx.dtype), factor, bias), form) / temperatures[part, None]
            norms[part] = scaled.logsumexp(-1)
            logprobs[part] = scaled.gather(1, candidates[part]) - norms[part, None]
            del scaled  # freed before the next chunk's logits are computed
        ctx.save_for_backward(hidden, weight, bias, candidates, temperatures, norms)
        return logprobs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, candidates, temperatures, norms = ctx.saved_tensors
        factor = weight.to(ctx.dtype)
        hidden_grad = torch.empty_like(hidden)
        _, learns, bias_learns, *_ = ctx.needs_input_grad
        weight_grad = torch.zeros_like(weight) if learns and not len(candidates) else None
        bias_grad = torch.zeros(bias.shape, dtype=torch.float32, device=bias.device) if bias_learns else None
        above = gradients[0] / temperatures[:, None]
        for part in _list_chunks(len(candidates), weight, size=ctx.chunk, copies=COPIES):
            inputs = hidden[part].to(ctx.dtype)
            formed = _transform(_multiply(inputs, factor.t(), bias), ctx.form)
            by_logits = -torch.exp(formed / temperatures[part, None] - norms[part, None])
            by_logits *= above[part].sum(1, keepdim=True)
            by_logits.scatter_add_(1, candidates[part], above[part])
            by_product = _by_product(by_logits, formed, ctx.form)
            del formed
            small = by_product.to(ctx.dtype)
            hidden_grad[part] = _multiply(small, factor).to(hidden.dtype)
            if learns:
                weight_grad = _add_product(weight_grad, small.t(), inputs)
            if bias_grad is not None:
                bias_grad += by_product.sum(0)
            del by_logits, by_product, small
        return (
            hidden_grad,
            None if weight_grad is None else weight_grad.to(weight.dtype),
            None if bias_grad is None else bias_grad.to(bias.dtype),
            *[None] * 4,
        )


class _Score(torch.autograd.Function):
    """Log-probabilities with a gradient that is computed while the logits exist: the backward pass only multiplies it by a factor
    per token."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        form: LogitForm,
        targets: Tensor,
        temperatures: Tensor,
        learning: bool,
        chunk: int | None,
    ) -> tuple[Tensor, Tensor]:
        device = hidden.device
        ctx.dtype, ctx.form, ctx.chunk = _get_dtype(weight, device), form, chunk
        factor = weight.to(ctx.dtype).t()
        logprobs, entropies, norms = (torch.empty(len(targets), device=device) for _ in range(3))
        room = (chunk or _get_max_kept_gradients(device, ctx.dtype) // len(weight)) if learning else 0
        kept = torch.empty(min(room, len(targets)), len(weight), dtype=ctx.dtype, device=device)
        for part in _list_chunks(len(targets), weight, size=chunk):
            logits = _multiply(hidden[part].to(ctx.dtype), factor, bias)
            logprobs[part], entropies[part], norms[part] = _reduce(logits, targets[part], temperatures[part], form)
            held = slice(part.start, min(part.stop, len(kept)))
            if held.start < held.stop:
                chosen = ChunkTargets(targets[held], temperatures[held], norms[held])
                _write_gradient(logits[: held.stop - held.start], chosen, form, kept[held])
            del logits  # freed before the next chunk's logits are computed
        ctx.save_for_backward(hidden, weight, bias, targets, temperatures, norms, kept)
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, temperatures, norms, kept = ctx.saved_tensors
        factor = weight.to(ctx.dtype)
        hidden_grad = torch.empty_like(hidden)
        _, learns, bias_learns, *_ = ctx.needs_input_grad
        weight_grad = torch.zeros_like(weight) if learns and not len(targets) else None
        bias_grad = torch.zeros(bias.shape, dtype=torch.float32, device=bias.device) if bias_learns else None
        by_scaled = (gradients[0] / temperatures)[:, None]
        for part in _list_kept_and_chunks(len(kept), len(targets), weight, ctx.chunk):
            inputs, above = hidden[part].to(ctx.dtype), by_scaled[part]
            if part.stop <= len(kept):
                by_product = kept[part]
            else:
                logits = _multiply(inputs, factor.t(), bias)
                by_product = torch.empty_like(logits, dtype=ctx.dtype)
                _write_gradient(
                    logits, ChunkTargets(targets[part], temperatures[part], norms[part]), ctx.form, by_product
                )
                del logits
            hidden_grad[part] = (_multiply(by_product, factor) * above).to(hidden.dtype)
            if learns:
                weight_grad = _add_product(weight_grad, by_product.t(), (inputs * above).to(ctx.dtype))
            if bias_grad is not None:
                bias_grad += by_product.float().t() @ above[:, 0]
        return (
            hidden_grad,
            None if weight_grad is None else weight_grad.to(weight.dtype),
            None if bias_grad is None else bias_grad.to(bias.dtype),
            *[None] * 5,
        )


class ChunkTargets(NamedTuple):
    """Targets and log-normalizers of one chunk of tokens."""

    targets: Tensor
    temperatures: Tensor
    norms: Tensor
    """Log of the sum of exponentials of each token's logits."""


def _reduce(logits: Tensor, targets: Tensor, temperatures: Tensor, form: LogitForm) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probability of each target, entropy, and log of the sum of exponentials."""
    if logits.is_cuda and not torch.is_grad_enabled():
        logprobs, entropies, norms = _import_kernels().reduce_rows(logits, targets, temperatures, *form)
        return logprobs, entropies, norms
    scaled = _transform(logits, form) / temperatures[:, None]
    norms = torch.logsumexp(scaled, dim=-1)
    chosen = scaled.gather(1, targets[:, None])[:, 0]
    expected = (torch.exp(scaled - norms[:, None]) * scaled).sum(-1)
    return chosen - norms, norms - expected, norms


def _write_gradient(logits: Tensor, chosen: ChunkTargets, form: LogitForm, out: Tensor) -> None:
    """Write to `out` the gradient of each log-probability times its temperature with respect to the product W h + b."""
    if logits.is_cuda:
        _import_kernels().write_gradient_rows(logits, *chosen, *form, out)
        return
    formed = _transform(logits, form)
    gap = -torch.exp(formed / chosen.temperatures[:, None] - chosen.norms[:, None])
    gap[torch.arange(len(gap)), chosen.targets] += 1
    out.copy_(_by_product(gap, formed, form))


def _by_product(by_logits: Tensor, formed: Tensor, form: LogitForm) -> Tensor:
    """Return the gradient by the product W h + b, in place of the gradient by the logits `formed`."""
    by_logits *= form.multiplier
    if form.softcap is not None:
        by_logits *= 1 - (formed / form.softcap) ** 2
    return by_logits


def _get_dtype(weight: Tensor, device: torch.device) -> torch.dtype:
    """Return the dtype of the factors of matrix products."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else weight.dtype


def _transform(logits: Tensor, form: LogitForm) -> Tensor:
    scaled = logits if form.multiplier == 1.0 else logits * form.multiplier
    return scaled if form.softcap is None else form.softcap * torch.tanh(scaled / form.softcap)


def _multiply(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return a @ b + bias in FP32, from factors of the compute dtype."""
    product = torch.mm(a, b, out_dtype=torch.float32) if _is_mixed_precision(a) else (a @ b).float()
    return product if bias is None else product + bias.float()


def _add_product(to: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Return to + a @ b in FP32; `to` = None counts as 0."""
    if to is None:
        return _multiply(a, b)
    return torch.addmm(to, a, b, out_dtype=torch.float32) if _is_mixed_precision(a) else to.add_(_multiply(a, b))


def _is_mixed_precision(factor: Tensor) -> bool:
    return factor.is_cuda and factor.dtype != torch.float32


def _list_chunks(
    num_tokens: int, weight: Tensor, *, start: int = 0, size: int | None = None, copies: int = 1
) -> list[slice]:
    size = size or max(1, _get_max_logits(weight.device) // (copies * len(weight)))
    return [slice(at, min(at + size, num_tokens)) for at in range(start, num_tokens, size)]


def _list_kept_and_chunks(num_kept: int, num_tokens: int, weight: Tensor, size: int | None) -> list[slice]:
    """Return the slices of the chunks. The `num_kept` tokens with kept gradients form the first chunk."""
    return [*([slice(0, num_kept)] if num_kept else []), *_list_chunks(num_tokens, weight, start=num_kept, size=size)]


def _get_max_logits(device: torch.device) -> int:
    return _get_room_bytes(device) // 4 if device.type == "cuda" else CPU_CHUNK


def _get_max_kept_gradients(device: torch.device, dtype: torch.dtype) -> int:
    return _get_room_bytes(device) // dtype.itemsize if device.type == "cuda" else CPU_CHUNK


def _get_room_bytes(device: torch.device) -> int:
    """Return the bytes of a GPU for logits: a share of all memory, or less if little is free."""
    if torch.are_deterministic_algorithms_enabled():
        return FIXED_ROOM
    return int(min(GPU_SHARE * torch.cuda.mem_get_info(device)[1], FREE_SHARE * get_free_bytes(device)))


def _import_kernels() -> Any:
    from swarmq.learner.model import logprob_kernel  # noqa: PLC0415 - needs Triton, which exists only with CUDA

    return logprob_kernel
