"""Parameters, gradients and optimizer state spread over the ranks: FSDP2, by accelerate.

Each decoder layer is gathered when it is computed and freed again. Weights for engines and checkpoints are gathered
whole, one after another, on every rank in the same order, and kept by rank 0 alone.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from swarmq.config import Train


def plugin(train: Train) -> FullyShardedDataParallelPlugin:
    """Full sharding of every decoder layer, as transformers names it."""
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=True,
        auto_wrap_policy="transformer_based_wrap",
        cpu_offload=train.cpu_offload,
        cpu_ram_efficient_loading=False,
        state_dict_type="SHARDED_STATE_DICT",
    )


def shard_on_cpu(accelerator: Accelerator, plan: FullyShardedDataParallelPlugin) -> None:
    """accelerate shards only over accelerators; torch also shards over processes without any, which tests use."""
    if accelerator.device.type == "cpu" and accelerator.num_processes > 1:
        for state in (PartialState, AcceleratorState):
            state._shared_state["distributed_type"] = DistributedType.FSDP  # noqa: SLF001
        accelerator.state.fsdp_plugin = plan


def is_sharded(model: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a shard; a collective. Others as they are."""
    full: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach()


def gathered(lm: Any, *, keep: bool, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Every weight by its Hugging Face name, on the CPU, where `keep`; empty elsewhere. Every rank calls it."""
    weights: dict[str, Tensor] = {}
    for name, tensor in lm.state_dict().items():
        full = whole(tensor)
        if keep:
            weights[name] = full.to("cpu", dtype if full.is_floating_point() else None)
    return weights
