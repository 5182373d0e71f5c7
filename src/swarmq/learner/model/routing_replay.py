"""Replay of the engine's routing: every token is computed with the experts that sampled it.

Engine and learner round differently, so their routers may choose different experts for a token, and then its log-probability differs
by far more than rounding. A replayed router still computes the weights of the experts from its own logits, so that it learns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from swarmq.learner.store.routing_shape import REPLAYED_MODELS, RoutingShape

ROUTER_SUFFIX = "TopKRouter"
"""Suffix of the class names of routers in transformers."""
ROUTING = "routing"
"""Argument with packed expert ids [T, bytes], which decoder layers with replay take."""


def install_replay(config: Any, layers: Sequence[nn.Module]) -> bool:
    """Let decoder layers take ROUTING, in whose absence routers choose. Returns False for a model whose routing cannot be replayed.

    `layers`: all decoder layers, in order.
    """
    if config.model_type not in REPLAYED_MODELS:
        return False
    shape = RoutingShape.of(config)
    for number, layer in enumerate(layers):
        replayed = _ReplayedLayer(shape, number)
        layer.register_forward_pre_hook(replayed.take_experts, with_kwargs=True)
        for module in layer.modules():
            if type(module).__name__.endswith(ROUTER_SUFFIX):
                module.register_forward_hook(replayed.route)
    return True


class _ReplayedLayer:
    """Hooks of a decoder layer and its router. A layer that is recomputed in the backward pass takes its experts again."""

    def __init__(self, shape: RoutingShape, number: int) -> None:
        self._shape, self._number = shape, number
        self._experts: Tensor | None = None  # [T, experts per token]

    def take_experts(self, _layer: nn.Module, inputs: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        routing: Tensor | None = named.get(ROUTING)
        self._experts = None
        if routing is not None and routing.shape[1] == self._shape.token_bytes:  # a reference may have other experts
            ids = routing if self._shape.id_bytes == 1 else routing.view(torch.int16)
            self._experts = ids.view(len(ids), self._shape.layers, -1)[:, self._number]
        return inputs, {name: value for name, value in named.items() if name != ROUTING}

    def route(self, router: nn.Module, _inputs: Any, chosen: tuple[Tensor, Tensor, Tensor]) -> Any:
        if self._experts is None:
            return None
        (logits, weights, _), experts = chosen, self._experts.long()
        own = logits.softmax(-1, dtype=torch.float32).gather(-1, experts)
        if getattr(router, "norm_topk_prob", True):  # Mixtral always normalises
            own = own / own.sum(-1, keepdim=True)
        return logits, own.to(weights.dtype), experts
