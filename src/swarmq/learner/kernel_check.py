"""Try the compiled attention before training relies on it.

Compilers refuse kernels for reasons that only the attempt tells: heads too wide for a GPU's shared memory, often in the backward
pass alone. So the attention of every kind of layer is computed once as training will compute it, on its device and in its
precision, from the very queries, keys and values of a small example, padded to every length that passes will be
padded to: what training will need is compiled then. Only attention: that needs neither the memory of the model there, nor
the ranks that share it out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from swarmq.learner.batched_attention import Form
from swarmq.learner.tree_attention import Visibility, lengths_for
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
) -> str | None:
    """Why attention over `layout` cannot be compiled for `device`; None when it gives what attention in batches gives.

    `backward`: whether gradients will be asked for. `pass_tokens`: of the largest pass. A GPU that fails or is full is no
    refusal: its error is passed on.
    """
    here = Visibility(layout, torch.device("cpu"), compiled=False)
    padded = [Visibility(layout, device, compiled=True, least=length) for length in lengths_for(pass_tokens)]
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


def _outcome(inputs: list[Tensor], form: Form, visibility: Visibility, *, backward: bool) -> list[Tensor]:
    """The attention's output and, of half the sum of its squares, the gradient of every input."""
    sinks = () if form.sinks is None else (form.sinks.detach().to(inputs[0].device),)
    asked = [x.detach().requires_grad_(backward) for x in (*inputs, *sinks)]
    query, key, value = asked[:3]
    with torch.set_grad_enabled(backward):
        output = visibility.attend(None, query, key, value, form._replace(sinks=asked[3] if sinks else None)).float()
    gradient = torch.autograd.grad(output, asked, output.detach(), materialize_grads=True) if backward else ()
    return [output.detach(), *(x.float() for x in gradient)]
