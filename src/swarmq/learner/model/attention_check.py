"""Try the compiled attention before training relies on it.

Compilers refuse kernels for reasons that only the attempt tells: heads too wide for a GPU's shared memory, often in the backward
pass alone. So the attention of every kind of layer is computed once as training will compute it, on its device and in its
precision, from the very queries, keys and values of a small example, padded to every length that passes will be
padded to: what training will need is compiled then. Only attention: that needs neither the memory of the model there, nor
the ranks that share it out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation writes it

from swarmq.learner.model.batched_attention import Form
from swarmq.learner.model.context_parallel import Context, cut, cut_length
from swarmq.learner.model.layout_attention import BLOCK, Visibility, lengths_for
from swarmq.timeline import Layout

T = TypeVar("T")

TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
"""Of the largest value, how far another may be off; ..."""
ROUNDED = 0.1
"""... in half precision."""


class Call(NamedTuple):
    """What a layer asked of its attention."""

    query: Tensor  # [1, heads, T, D]
    key: Tensor  # [1, key heads, T, D]
    value: Tensor
    form: Form


class Recorded(Visibility):
    """Attention in batches that keeps a call of every kind."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        super().__init__(layout, device, compiled=False)
        self.windows: list[int | None] = []
        """Of every layer that was computed."""
        self._calls: dict[Any, Call] = {}

    @property
    def calls(self) -> list[Call]:
        return list(self._calls.values())

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, form: Form) -> Tensor:
        shapes = (query.shape, key.shape, value.shape)
        kind = (*shapes, form.scale, form.window, form.softcap, form.sinks is None)
        self.windows.append(form.window)
        self._calls.setdefault(kind, Call(query, key, value, form))
        return super().attend(module, query, key, value, form)


def refusal(
    calls: Iterable[Call],
    layout: Layout,
    device: torch.device,
    dtype: torch.dtype,
    *,
    backward: bool,
    pass_tokens: int = 0,
    ranks: int = 1,
) -> str | None:
    """Why attention over `layout` cannot be compiled for `device`; None when it gives what attention in batches gives.

    `backward`: whether gradients will be asked for. `pass_tokens`: of the largest pass. `ranks` share each pass; what all of
    them would compute is tried here. A GPU that fails or is full is no
    refusal: its error is passed on.
    """
    here = [Visibility(layout, torch.device("cpu"), compiled=False)]
    longest = cut_length(pass_tokens, ranks, BLOCK) if ranks > 1 else pass_tokens
    padded = [_shared(layout, device, length, ranks) for length in lengths_for(longest)]
    limit = TOLERANCE.get(dtype, ROUNDED)
    for call in calls:
        rounded = [x.detach().to("cpu", dtype).float() for x in call[:3]]
        expected = _outcome(rounded, call.form, here, backward=backward)
        for there in padded:
            try:
                outcome = _outcome([x.to(device, dtype) for x in rounded], call.form, there, backward=backward)
            except (torch.OutOfMemoryError, torch.AcceleratorError):
                raise
            except Exception as error:
                what = (str(error).splitlines() or [type(error).__name__])[0]
                return f"its attention cannot be compiled for this GPU: {what}"
            worst = max(_error(a.cpu(), b) for a, b in zip(outcome, expected, strict=True))
            if not worst < limit:
                return f"its compiled attention is off by {worst:.2g} of the largest value"
    return None


def agreed(reason: str | None) -> str | None:
    """The same on every rank, for compilers may fail on one alone: ranks that plan differently would train some tokens twice and
    others never, or wait for each other for ever. Every rank calls it."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return reason
    said: list[str | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(said, reason)
    return next(filter(None, said), None)


def of_rank_0(found: T) -> T:
    """What rank 0 found; the others may have a model without weights. Every rank calls it."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return found
    box = [found]
    torch.distributed.broadcast_object_list(box, src=0)
    return box[0]


def _error(values: Tensor, expected: Tensor) -> float:
    """Relative to the largest; where a gradient should vanish there is nothing but rounding to be relative to."""
    return float(((values - expected).abs().max() / expected.abs().max().clamp(min=1e-3)).nan_to_num(torch.inf))


def _shared(layout: Layout, device: torch.device, least: int, ranks: int) -> list[Visibility]:
    """Of every rank."""
    if ranks == 1:
        return [Visibility(layout, device, compiled=True, least=least)]
    each = [Context(ranks, rank) for rank in range(ranks)]
    return [
        Visibility(layout, device, compiled=True, least=least, part=cut(layout, one, block=BLOCK), context=one)
        for one in each
    ]


def attend_as_ranks(query: Tensor, key: Tensor, value: Tensor, form: Form, ranks: Sequence[Visibility]) -> Tensor:
    """What ranks that exchange nothing compute together, each with all keys and values."""
    if len(ranks) == 1:
        return ranks[0].attend(None, query, key, value, form)
    count = query.shape[2]
    query, key, value = (F.pad(x, (0, 0, 0, ranks[0].num_tokens - count)) for x in (query, key, value))
    tokens = [torch.from_numpy(one.part.tokens).to(query.device) for one in ranks if one.part]
    outputs = [one.attend(None, query[:, :, own], key, value, form) for one, own in zip(ranks, tokens, strict=True)]
    return torch.cat(outputs, dim=2)[:, :, torch.cat(tokens).argsort()[:count]]


def _outcome(inputs: list[Tensor], form: Form, ranks: Sequence[Visibility], *, backward: bool) -> list[Tensor]:
    """The attention's output and, of half the sum of its squares, the gradient of every input."""
    sinks = () if form.sinks is None else (form.sinks.detach().to(inputs[0].device),)
    asked = [x.detach().requires_grad_(backward) for x in (*inputs, *sinks)]
    query, key, value = asked[:3]
    with torch.set_grad_enabled(backward):
        form = form._replace(sinks=asked[3] if sinks else None)
        output = attend_as_ranks(query, key, value, form, ranks).float()
    gradient = torch.autograd.grad(output, asked, output.detach(), materialize_grads=True) if backward else ()
    return [output.detach(), *(x.float() for x in gradient)]
