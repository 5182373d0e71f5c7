"""Activation checkpointing that recomputes only what a GPU's memory cannot hold.

As far as there is room, a pass first keeps the tensors that attention saves for its backward pass, because they save the most
time per byte. Then it keeps all activations of whole layers, from the first layer on. All other layers are checkpointed as in
transformers. The memory of a layer is measured in each pass, on its first layer. Without CUDA every layer is checkpointed.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import structlog
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from swarmq.learner.memory.estimate import GPU_SHARE_ENV, layer_bytes

log = structlog.get_logger()

ACTIVATION_SHARE = 0.8
"""Maximum share of the memory left by weights, gradients, one recomputed layer and the inputs of all layers that activations may
fill; the rest is for the head and for fragmentation."""

GATHERED_LAYERS = 2
"""Number of layers that are gathered at a time if they do not stay gathered: the present one and the next."""


class KeptActivations:
    """Activations of one layout that are kept for its backward pass."""

    def __init__(self) -> None:
        self.layers: int | None = None
        """Number of following layers to keep whole; None before the first layer is computed."""
        self.whole = False
        """Whether the present layer is kept whole."""
        self.room = 0.0
        """Maximum number of bytes that each checkpointed layer may use for tensors of its attention."""
        self.attention_bytes: int = 0
        """Bytes that each checkpointed layer uses for tensors of its attention."""
        self._outputs: dict[nn.Module, Tensor] = {}
        self._fits: bool | None = None

    def compute_attention(self, module: Any, saved: int, compute: Callable[[], Tensor]) -> Tensor:
        """Return the result of `compute`, or the stored result of the first pass if `module` is being recomputed.

        `saved`: bytes that attention's backward pass needs. The tensors that it saves are exempt from checkpointing.
        """
        recomputing = torch._C._current_graph_task_id() != -1  # noqa: SLF001 - torch.utils.checkpoint uses the same test
        if recomputing and module in self._outputs:
            return self._outputs.pop(module)
        if not torch.is_grad_enabled() or not self._may_keep(saved) or self.whole:
            return compute()
        with torch.autograd.graph.saved_tensors_hooks(_identity, _identity):
            output = compute()
        self._outputs[module] = output.detach().requires_grad_(output.requires_grad)
        return output

    def _may_keep(self, size: int) -> bool:
        if self._fits is None:
            self._fits = size < self.room
            self.attention_bytes = size if self._fits else 0
        return self._fits


class ActivationCheckpointing:
    """Replacement for transformers' layer checkpointing that decides which layers are checkpointed."""

    @classmethod
    def enable(cls, lm: Any) -> None:
        """Install activation checkpointing for every layer of a transformers model."""
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        layers = [module for module in lm.modules() if isinstance(module, GradientCheckpointingLayer)]
        decide = cls(len(layers), lm.parameters)
        for layer in layers:
            layer._gradient_checkpointing_func = decide  # noqa: SLF001 - transformers has no public place for it

    @staticmethod
    def announce_sharding(lm: Any, *, held: bool) -> None:
        """Tell the installed instance that ranks shard the layers; `held`: layers stay gathered between micro-batches."""
        for layer in lm.modules():
            if isinstance(decide := getattr(layer, "_gradient_checkpointing_func", None), ActivationCheckpointing):
                decide.held = held

    def __init__(
        self, num_layers: int, parameters: Callable[[], Iterable[nn.Parameter]], *, share: float = ACTIVATION_SHARE
    ) -> None:
        """`parameters`: function that returns the model's present parameters; sharding replaces them. `share`: share of the free
        memory for kept activations."""
        self._share = share
        self._num_layers, self._parameters = num_layers, parameters
        self.held: bool | None = None
        """Whether sharded layers stay gathered between micro-batches; None if each rank has whole layers."""
        self._passes = 0
        """Number of passes with gradients since the layers were gathered, if they stay gathered."""
        self._logged: int | None = None

    def __call__(self, layer: functools.partial[Any], *inputs: Tensor) -> Any:
        """Return the outputs of `layer` for `inputs`, the first of which is the hidden states [1, T, hidden]."""
        visibility = layer.keywords.get("visibility")
        if visibility is None or not visibility.compiled:
            return checkpoint(layer, *inputs, use_reentrant=False)
        kept, hidden, context = visibility.kept, inputs[0], visibility.context
        if kept.layers is None:
            self._count_pass()
            free = context.reduce_min(self._compute_room(hidden, context.ranks))
            kept.layers, kept.room = 0, free / self._num_layers
            if layer_bytes(hidden.numel(), context.ranks) < free:
                before = get_allocated_bytes(hidden.device)
                outputs = _keep_whole_layer(kept, layer, inputs)
                taken = get_allocated_bytes(hidden.device) - before
                left = self._compute_room(hidden, context.ranks)
                more = self._count_layers_to_keep(left, taken - hidden.nbytes, kept.attention_bytes)
                # a recomputed layer is gathered again, so all ranks must keep the same layers
                kept.layers = int(context.reduce_min(more))
                self._log_kept(kept.layers + 1, hidden)
                return outputs
            self._log_kept(0, hidden)
        if kept.layers > 0:
            kept.layers -= 1
            return _keep_whole_layer(kept, layer, inputs)
        return checkpoint(layer, *inputs, use_reentrant=False)

    def _count_layers_to_keep(self, room: float, whole: int, attention: int) -> int:
        """Return how many layers besides the first can be kept. `room`: bytes for activations. `whole`: bytes that a layer takes
        besides its input, of which `attention` bytes are kept anyway."""
        others = self._num_layers - 1
        return max(0, min(others, int((room - others * attention) / max(whole - attention, 1))))

    def _compute_room(self, hidden: Tensor, ranks: int) -> float:
        """Return the bytes that activations may take. What is unavoidable is subtracted: missing weights and gradients, the
        input of every layer, and one layer recomputed by one of the `ranks` that share the pass."""
        later = (
            self._estimate_later_bytes(hidden) + self._num_layers * hidden.nbytes + layer_bytes(hidden.numel(), ranks)
        )
        return self._share * (get_keepable_bytes(hidden.device) - later)

    def _count_pass(self) -> None:
        """Count the passes since layers were gathered, because parameters that stay gathered do not show whether a gradient
        exists."""
        if any(isinstance(p, DTensor) for p in self._parameters()):
            self._passes = 0
        self._passes += torch.is_grad_enabled()

    def _estimate_later_bytes(self, hidden: Tensor) -> int:
        """Return the bytes that converted or gathered weights and new gradients will take in addition to those that they take now,
        before the first layer is computed."""
        parameters = list(self._parameters())
        trained = [p for p in parameters if p.requires_grad and p.grad is None]
        if self.held is None:
            wide = sum(p.numel() for p in parameters if p.dtype == torch.float32)
            cast = 2 * wide if torch.is_autocast_enabled("cuda") else 0
            return cast + sum(4 * p.numel() for p in trained)
        apart = sum(p.numel() for p in parameters if isinstance(p, DTensor))
        ends = sum(p.numel() for p in parameters) - apart  # embedding and head are gathered by now
        learned = sum(p.numel() for p in parameters if p.requires_grad)
        if self.held:
            return hidden.itemsize * apart + (0 if self._passes > 1 else 4 * learned)
        shares = sum(p.to_local().numel() for p in trained if isinstance(p, DTensor) and p.device == hidden.device)
        together = ends + GATHERED_LAYERS * apart // self._num_layers
        return 4 * shares + hidden.itemsize * together + 4 * together * learned // (apart + ends)

    def _log_kept(self, kept: int, hidden: Tensor) -> None:
        if kept != self._logged:
            log.info("gradient_checkpointing", layers_kept=kept, layers=self._num_layers, tokens=hidden.shape[-2])
            self._logged = kept


def _keep_whole_layer(kept: KeptActivations, layer: Callable[..., Any], inputs: Sequence[Tensor]) -> Any:
    kept.whole = True
    try:
        return layer(*inputs)
    finally:
        kept.whole = False


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def get_free_bytes(device: torch.device) -> int:
    """Return the bytes of a GPU that this process could allocate."""
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - get_allocated_bytes(device)


def get_keepable_bytes(device: torch.device) -> int:
    """Return the bytes of a GPU that this process may fill with activations it could recompute."""
    mine = float(os.environ.get(GPU_SHARE_ENV, "1")) * torch.cuda.mem_get_info(device)[1]
    return min(get_free_bytes(device), int(mine) - get_allocated_bytes(device))


def get_allocated_bytes(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device)
