"""Matrix products of the decoder's linear layers in FP8 (2209.05433), each factor with one scale, computed anew for each product.

    forward         output       = input    weight^T
    backward        input.grad   = output.grad weight
                    weight.grad  = output.grad^T input

Parameters keep their names and their dtype: only the factors of a product are FP8, and its result has the dtype of the layer's input.
Head, embedding, norms, the products of queries, keys and values, and a vision tower stay as they are. Without CUDA the products are emulated: the same FP8 factors,
multiplied in FP32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation writes it
from transformers import PreTrainedModel

from swarmq.engine.server.gpus import FP8_CAPABILITY
from swarmq.errors import SetUpError
from swarmq.learner.model.layout_model import EXPERTS, find_decoder_layers

ALIGNMENT = 16
"""Number of FP8 values by which the sides of a factor must be divisible."""


class Float8Linear(nn.Linear):
    """A linear layer that computes its three products in FP8."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        kind = input.device.type
        if torch.is_autocast_enabled(kind):
            input = input.to(torch.get_autocast_dtype(kind))  # noqa: A001
        tokens = input.reshape(-1, self.in_features)
        output: Tensor = _Product.apply(tokens, self.weight)  # type: ignore[no-untyped-call]
        output = output.reshape(*input.shape[:-1], self.out_features)
        return output if self.bias is None else output + self.bias.to(output.dtype)  # type: ignore[redundant-expr]


class _Product(torch.autograd.Function):
    """[T, K] times the transpose of [N, K]."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, weight)
        return _multiply(tokens, weight, tokens.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        tokens, weight = ctx.saved_tensors
        grad_tokens = _multiply(grad, weight.t(), tokens.dtype)
        grad_weight = _multiply(grad.t(), tokens.t(), tokens.dtype)
        return grad_tokens, grad_weight.to(weight.dtype)


def _multiply(a: Tensor, b: Tensor, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """Return a [M, K] times the transpose of b [N, K].

    `fast`: accumulate in the tensor cores' own precision, which is too coarse for gradients.
    """
    (a8, a_scale), (b8, b_scale) = _quantise(a), _quantise(b)
    product: Tensor = torch.ops.swarmq.float8_product(a8, b8, a_scale, b_scale, dtype, fast)
    return product


def _quantise(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return FP8 values, row by row in memory, and the FP32 scale by which they are to be multiplied."""
    most = values.abs().amax().float()
    # zeros stay zeros; 448 is the largest number of the format. As names, the compiler would take both for inputs.
    scale = most.clamp(min=1e-12) / 448.0
    narrow = (values.float() / scale).to(torch.float8_e4m3fn)
    return narrow.contiguous(), scale


# One operator, so that the compiler fuses conversions around it, but neither looks inside nor depends on the number of tokens.
_library: Any = torch.library.Library("swarmq", "DEF")  # type: ignore[no-untyped-call]
_library.define(
    "float8_product(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, ScalarType dtype, bool fast) -> Tensor"
)


def _emulate(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    del fast
    with torch.autocast("cpu", enabled=False):
        return ((a.float() @ b.float().t()) * (a_scale * b_scale)).to(dtype)


def _compute(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    if rest := a.shape[1] % ALIGNMENT:  # the number of tokens, in the gradient of weights
        a, b = (F.pad(each.view(torch.uint8), (0, ALIGNMENT - rest)).view(each.dtype) for each in (a, b))
    return torch._scaled_mm(  # noqa: SLF001 - torch offers these products under no public name
        a.contiguous(),
        b.contiguous().t(),
        scale_a=a_scale,
        scale_b=b_scale,
        out_dtype=dtype,
        use_fast_accum=fast,
    )


def _outline(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    del a_scale, b_scale, fast
    return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)


_library.impl("float8_product", _emulate, "CPU")
_library.impl("float8_product", _compute, "CUDA")
_library.impl("float8_product", _outline, "Meta")


def convert_layers(model: PreTrainedModel, device: torch.device) -> None:
    """Let the linear layers inside the decoder's layers compute in FP8, in place. Call it before layers are compiled or sharded.

    Raises LearnerError if the GPU or the model cannot.
    """
    own = "{}.{}".format(*torch.cuda.get_device_capability(device)) if device.type == "cuda" else ""
    if own and float(own) < FP8_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise SetUpError(
            f"train.mixed_precision: {name} has compute capability {own}, and FP8 needs {FP8_CAPABILITY:g} or "
            "higher: set it to 'bf16'"
        )
    inside = set(model.get_decoder().modules())  # and not in a vision tower
    layers = [layer for layer in find_decoder_layers(model) if layer in inside]
    modules = [named for layer in layers for named in layer.named_modules()]
    if any(EXPERTS in name.split(".") for name, _ in modules):
        raise _refuse(model, "its experts are stacked in one weight, whose products stay BF16")
    linear = [(name, each) for name, each in modules if type(each) is nn.Linear]
    if not linear:
        raise _refuse(model, "its layers have no torch.nn.Linear")
    for name, each in linear:
        if each.in_features % ALIGNMENT or each.out_features % ALIGNMENT:
            raise _refuse(
                model,
                f"{name} has {each.in_features} inputs and {each.out_features} outputs, and FP8 needs multiples of {ALIGNMENT}",
            )
    for _, each in linear:
        each.__class__ = Float8Linear


@contextlib.contextmanager
def multiply_unquantised(model: nn.Module) -> Iterator[None]:
    """Let a model's FP8 layers multiply in the dtype of their input while the context is open."""
    layers: list[nn.Linear] = [each for each in model.modules() if type(each) is Float8Linear]
    for each in layers:
        each.__class__ = nn.Linear
    try:
        yield
    finally:
        for each in layers:
            each.__class__ = Float8Linear


def _refuse(model: PreTrainedModel, reason: str) -> SetUpError:
    return SetUpError(
        f"train.mixed_precision: {type(model).__name__} cannot be trained with FP8 matrix products: {reason}; set it to 'bf16'"
    )
