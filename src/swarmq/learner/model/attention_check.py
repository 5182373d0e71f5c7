"""Trial of the compiled attention before training relies on it.

A compiler may refuse a kernel for reasons that only an attempt reveals, such as heads too wide for a GPU's shared memory, and
often in the backward pass alone. Therefore the attention of every kind of layer is computed once on the device and in the
precision of training, from the queries, keys and values of a small example, padded to every length to which passes will be
padded. This also compiles the kernels that training needs. Only attention is tried, so the trial needs neither the model's
memory nor the ranks that shard it. FlashAttention has a trial of its own, over packed rows; what fails it is left to
FlexAttention.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation writes it

from swarmq.learner.model import flash_attention
from swarmq.learner.model.batched_attention import AttentionForm
from swarmq.learner.model.context_parallel import ContextGroup, cut_for_rank, cut_length
from swarmq.learner.model.layout_attention import BLOCK, Visibility, list_padded_lengths
from swarmq.timeline import Layout, lay_rows, make_resolved_turn, unfold

T = TypeVar("T")

TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
"""Largest accepted error relative to the largest value, in single and double precision."""
HALF_PRECISION_TOLERANCE = 0.1
"""Largest accepted error relative to the largest value, in half precision."""
TRIAL_ROWS = (2, 64, 129, 300)
"""Lengths of the rows with which FlashAttention is tried: less than a block, whole blocks, and one token more."""


class AttentionCall(NamedTuple):
    """Inputs of a layer's attention."""

    query: Tensor  # [1, heads, T, D]
    key: Tensor  # [1, key heads, T, D]
    value: Tensor
    form: AttentionForm


class RecordingVisibility(Visibility):
    """Visibility that computes attention in batches, and records the inputs of the first attention of every shape and form."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        super().__init__(layout, device, compiled=False)
        self.windows: list[int | None] = []
        """Attention window of every layer that was computed."""
        self._calls: dict[Any, AttentionCall] = {}

    @property
    def calls(self) -> list[AttentionCall]:
        return list(self._calls.values())

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        shapes = (query.shape, key.shape, value.shape)
        kind = (*shapes, form.scale, form.window, form.softcap, form.sinks is None)
        self.windows.append(form.window)
        self._calls.setdefault(kind, AttentionCall(query, key, value, form))
        return super().attend(module, query, key, value, form)


class FlashVisibility(Visibility):
    """Visibility over packed rows that computes attention with FlashAttention, whether or not it is allowed yet."""

    def attend(self, _module: Any, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        assert self.rows
        return flash_attention.attend_in_rows(query, key, value, form, self.rows)


def find_refusal(
    calls: Iterable[AttentionCall],
    layout: Layout,
    device: torch.device,
    dtype: torch.dtype,
    *,
    backward: bool,
    pass_tokens: int = 0,
    ranks: int = 1,
) -> str | None:
    """Return why attention over `layout` cannot be compiled for `device`, or None if it can and equals attention in batches.

    `backward`: whether gradients are needed. `pass_tokens`: tokens of the largest pass. `ranks`: number of ranks that share each
    pass; the computation of every rank is tried on this device. Raises the GPU's own error if it fails or is out of memory.
    """
    longest = cut_length(pass_tokens, ranks, BLOCK) if ranks > 1 else pass_tokens
    padded = [_build_visibilities(layout, device, length, ranks) for length in list_padded_lengths(longest)]
    return _find_difference(calls, layout, padded, device, dtype, backward=backward)


def find_flash_refusal(
    calls: Iterable[AttentionCall], device: torch.device, dtype: torch.dtype, *, backward: bool
) -> str | None:
    """Return why FlashAttention does not compute packed rows on `device`, or None if it compiles there and equals attention in
    batches. Raises the GPU's own error if it fails or is out of memory."""
    if obstacle := flash_attention.find_obstacle(device, dtype):
        return obstacle
    rows = lay_rows([(0, row) for row in unfold([make_resolved_turn([0] * (n - 1), [0], [0.0]) for n in TRIAL_ROWS])])
    tried = [draw_call(call, rows.num_tokens) for call in calls]
    kernels = [[FlashVisibility(rows, device, compiled=True)]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the package's compiler warns about the package's own code
        return _find_difference(tried, rows, kernels, device, dtype, backward=backward)


def draw_call(call: AttentionCall, num_tokens: int) -> AttentionCall:
    """Return a call of the same kind for `num_tokens` tokens, with random queries, keys and values."""
    random = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, x.shape[1], num_tokens, x.shape[3], generator=random) for x in call[:3])
    return AttentionCall(query, key, value, call.form)


def _find_difference(
    calls: Iterable[AttentionCall],
    layout: Layout,
    kernels: Sequence[Sequence[Visibility]],
    device: torch.device,
    dtype: torch.dtype,
    *,
    backward: bool,
) -> str | None:
    """Return why one of the `kernels`, each of them the visibilities of all ranks, does not compute `calls` on the device as
    attention in batches does, or None."""
    here = [Visibility(layout, torch.device("cpu"), compiled=False)]
    limit = TOLERANCE.get(dtype, HALF_PRECISION_TOLERANCE)
    for call in calls:
        rounded = [x.detach().to("cpu", dtype).float() for x in call[:3]]
        expected = _compute_outcome(rounded, call.form, here, backward=backward)
        for there in kernels:
            try:
                outcome = _compute_outcome([x.to(device, dtype) for x in rounded], call.form, there, backward=backward)
            except (torch.OutOfMemoryError, torch.AcceleratorError):
                raise
            except Exception as error:
                what = (str(error).splitlines() or [type(error).__name__])[0]
                return f"its attention cannot be compiled for this GPU: {what}"
            worst = max(_compute_relative_error(a.cpu(), b) for a, b in zip(outcome, expected, strict=True))
            if not worst < limit:
                return f"its compiled attention is off by {worst:.2g} of the largest value"
    return None


def agree_on_reason(reason: str | None) -> str | None:
    """Return, on every rank, the reason of the first rank that has one, or None if no rank has one. Every rank calls it.

    A compiler may fail on one rank alone, and ranks with different plans would train tokens twice or never, or wait for each
    other forever.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return reason
    reasons: list[str | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(reasons, reason)
    return next(filter(None, reasons), None)


def broadcast_from_rank0(found: T) -> T:
    """Return rank 0's value on every rank, because other ranks may hold a model without weights. Every rank calls it."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return found
    box = [found]
    torch.distributed.broadcast_object_list(box, src=0)
    return box[0]


def _compute_relative_error(values: Tensor, expected: Tensor) -> float:
    """Return the largest error relative to the largest expected value, or to 1e-3 if that value is smaller, because a vanishing
    gradient is only rounding."""
    return float(((values - expected).abs().max() / expected.abs().max().clamp(min=1e-3)).nan_to_num(torch.inf))


def _build_visibilities(layout: Layout, device: torch.device, least: int, ranks: int) -> list[Visibility]:
    """Return one visibility of the layout for each rank. `least`: minimum length, with padding, for which kernels are compiled."""
    if ranks == 1:
        return [Visibility(layout, device, compiled=True, least=least)]
    each = [ContextGroup(ranks, rank) for rank in range(ranks)]
    return [
        Visibility(layout, device, compiled=True, least=least, part=cut_for_rank(layout, one, block=BLOCK), context=one)
        for one in each
    ]


def attend_as_ranks(
    query: Tensor, key: Tensor, value: Tensor, form: AttentionForm, ranks: Sequence[Visibility]
) -> Tensor:
    """Return the attention output that the ranks compute together without communication; each uses all keys and values."""
    if len(ranks) == 1:
        return ranks[0].attend(None, query, key, value, form)
    count = query.shape[2]
    query, key, value = (F.pad(x, (0, 0, 0, ranks[0].num_tokens - count)) for x in (query, key, value))
    tokens = [torch.from_numpy(one.part.tokens).to(query.device) for one in ranks if one.part]
    outputs = [one.attend(None, query[:, :, own], key, value, form) for one, own in zip(ranks, tokens, strict=True)]
    return torch.cat(outputs, dim=2)[:, :, torch.cat(tokens).argsort()[:count]]


def _compute_outcome(
    inputs: list[Tensor], form: AttentionForm, ranks: Sequence[Visibility], *, backward: bool
) -> list[Tensor]:
    """Return the attention's output and the gradients of half the sum of its squares with respect to every input."""
    sinks = () if form.sinks is None else (form.sinks.detach().to(inputs[0].device),)
    asked = [x.detach().requires_grad_(backward) for x in (*inputs, *sinks)]
    query, key, value = asked[:3]
    with torch.set_grad_enabled(backward):
        form = form._replace(sinks=asked[3] if sinks else None)
        output = attend_as_ranks(query, key, value, form, ranks).float()
    gradient = torch.autograd.grad(output, asked, output.detach(), materialize_grads=True) if backward else ()
    return [output.detach(), *(x.float() for x in gradient)]
