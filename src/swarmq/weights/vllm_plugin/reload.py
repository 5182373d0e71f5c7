"""Runs inside vLLM: what vLLM's reload of a model that is being served (0.32) does not see to.

Some kernels lay experts out in an order of their own, once, when they are made. vLLM keeps them when it reloads and puts plain
weights in their place: log-probabilities that look sound and are of another model. A CPU's kernels are made anew with the
weights that come. Others may be part of a captured graph: their model is refused.

A tied head shares its weight with the embedding, but on a CPU computes with a packed copy, which is made anew after each reload.

Some models write weights past the loaders that vLLM watches. What it has not seen it leaves as it was.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from swarmq.weights.format.conventions import UNTOUCHED

ORDER_KEEPING_KERNELS = {"FusedMoEExperts", "FlashInferExperts"}
"""Kernels of vLLM that, when they are made, leave weights that are not quantized as they are."""


def prepare_reload(model: torch.nn.Module, device: torch.device) -> None:
    """Before a reload. Raises ValueError, nothing being changed, when it would leave wrong weights."""
    methods = {name: module.quant_method for name, module in model.named_modules() if _has_reordering_kernel(module)}
    if methods and device.type != "cpu":
        name, method = next(iter(methods.items()))
        kernel = type(method.moe_kernel.fused_experts).__name__
        raise ValueError(
            f"vLLM cannot reload the experts of {name} for {kernel}, {UNTOUCHED}: serve the model with another kernel for "
            "experts (--moe-backend, --all2all-backend)"
        )
    for method in methods.values():
        method.moe_kernel = None  # vLLM makes one with the weights that it loads


def _has_reordering_kernel(module: Any) -> bool:
    """Whether these are experts with such a kernel; those that are quantized, vLLM lays out again by itself."""
    method: Any = getattr(module, "quant_method", None)
    if getattr(method, "moe_kernel", None) is None:
        return False
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod  # noqa: PLC0415

    done_when_made = type(method.moe_kernel.fused_experts).process_weights_after_loading
    return (
        isinstance(method, UnquantizedFusedMoEMethod)
        and done_when_made.__qualname__.split(".")[0] not in ORDER_KEEPING_KERNELS
    )


def has_untied_head(model: torch.nn.Module) -> bool:
    """Whether there is a head whose weight is not an embedding's."""
    return len(_find_heads(model)) > len(_find_tied_heads(model))


def repack_tied_heads(model: torch.nn.Module) -> None:
    """After a reload. Does nothing where there is no packed copy, as on a GPU."""
    for head in _find_tied_heads(model):
        if isinstance(head.quant_method, UnquantizedEmbeddingMethod):
            head.quant_method.process_weights_after_loading(head)


def _find_heads(model: torch.nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, ParallelLMHead)]


def _find_tied_heads(model: torch.nn.Module) -> list[Any]:
    others = (module for module in model.modules() if not isinstance(module, ParallelLMHead))
    places = {id(parameter) for module in others for parameter in module.parameters(recurse=False)}
    return [head for head in _find_heads(model) if id(head.weight) in places]


def find_unloaded(model: torch.nn.Module) -> list[str]:
    """Between reading weights and the end of the reload: the parameters that would stay as they were."""
    seen: list[Any] = []
    missed: dict[str, Any] = {}
    for prefix, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if not info.can_load():  # it has all of its weights
            seen += layer.parameters(recurse=False)
        elif not is_deferred_attention_layer(layer):
            read, (kept, _) = {name for name, _ in info.loaded_weights}, info.kernel_tensors
            for name in info.restore_metadata[0]:
                if name in read:
                    seen.append(kept.get(name))
                else:
                    missed[f"{prefix}.{name}"] = kept.get(name)
    places = {id(each) for each in seen if each is not None}  # of a tied head, too
    return [name for name, parameter in missed.items() if id(parameter) not in places]
