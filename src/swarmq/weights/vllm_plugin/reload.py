"""Runs inside vLLM: fixes what vLLM's reload of a served model (0.32) misses.

Some kernels reorder expert weights once, when they are created. vLLM keeps these kernels in a reload and gives them weights in
plain order: log-probabilities look plausible but are wrong. On a CPU the kernels are created again with the new weights;
elsewhere, where they may be part of a captured graph, the model is refused.

A tied head shares its weight with the embedding, but on a CPU computes with a packed copy, which is repacked after each reload.

Multi-head latent attention (DeepSeek) on a CPU with AMX packs a projection's weight and frees it, so a reload finds no memory for the new one.

Some models (gpt-oss: experts and attention sinks) write weights without the loaders that vLLM observes, into tensors without memory. Such writes
are recorded and done when the layer has memory. Weights that nothing has written, which would stay unchanged, are reported.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import layerwise, meta
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from swarmq.weights.format.conventions import UNTOUCHED

ORDER_KEEPING_KERNELS = {"FusedMoEExperts", "FlashInferExperts"}
"""vLLM's kernels that do not reorder unquantized weights when they are created."""


def prepare_reload(model: torch.nn.Module, device: torch.device) -> None:
    """Prepare the model for a reload. Raises ValueError, without any change, if the reload would leave wrong weights."""
    methods = {name: module.quant_method for name, module in model.named_modules() if _has_reordering_kernel(module)}
    if methods and device.type != "cpu":
        name, method = next(iter(methods.items()))
        kernel = type(method.moe_kernel.fused_experts).__name__
        raise ValueError(
            f"vLLM cannot reload the experts of {name} for {kernel}, {UNTOUCHED}: serve the model with another kernel for "
            "experts (--moe-backend, --all2all-backend)"
        )
    for method in methods.values():
        method.moe_kernel = None  # vLLM creates a new kernel with the loaded weights
    for module in model.modules():
        if getattr(module, "is_amx_bmm_enabled", False):
            _restore_memory(module.kv_b_proj, device)


def _has_reordering_kernel(module: Any) -> bool:
    """Return whether `module` has experts with a reordering kernel; quantized experts are reordered by vLLM itself."""
    method: Any = getattr(module, "quant_method", None)
    if getattr(method, "moe_kernel", None) is None:
        return False
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod  # noqa: PLC0415

    done_when_made = type(method.moe_kernel.fused_experts).process_weights_after_loading
    return (
        isinstance(method, UnquantizedFusedMoEMethod)
        and done_when_made.__qualname__.split(".")[0] not in ORDER_KEEPING_KERNELS
    )


def _restore_memory(layer: Any, device: torch.device) -> None:
    """Give the layer's weight the memory that vLLM freed after the last load."""
    shapes, _ = get_layerwise_info(layer).restore_metadata
    layer.weight = torch.nn.Parameter(torch.empty_like(shapes["weight"], device=device), requires_grad=False)


def has_untied_head(model: torch.nn.Module) -> bool:
    """Return whether the model has a head with a weight of its own, not tied to an embedding."""
    return len(_find_heads(model)) > len(_find_tied_heads(model))


def repack_tied_heads(model: torch.nn.Module) -> None:
    """Repack tied heads after a reload. Does nothing without a packed copy, as on a GPU."""
    for head in _find_tied_heads(model):
        if isinstance(head.quant_method, UnquantizedEmbeddingMethod):
            head.quant_method.process_weights_after_loading(head)


def _find_heads(model: torch.nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, ParallelLMHead)]


def _find_tied_heads(model: torch.nn.Module) -> list[Any]:
    others = (module for module in model.modules() if not isinstance(module, ParallelLMHead))
    places = {id(parameter) for module in others for parameter in module.parameters(recurse=False)}
    return [head for head in _find_heads(model) if id(head.weight) in places]


class DirectWrite(NamedTuple):
    """A copy into a part of a parameter."""

    name: str
    part: tuple[torch.Size, tuple[int, ...], int]
    """Size, stride and offset."""
    source: torch.Tensor


class DirectWrites(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what a model writes into its parameters past their loaders, between the beginning and the end of a reload:

    with DirectWrites(model) as writes:
        model.load_weights(weights)
    writes.finish()
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._writes: dict[torch.nn.Module, list[DirectWrite]] = {}
        self._places = {
            _get_storage(parameter): (layer, name)
            for layer in model.modules()
            if not is_deferred_attention_layer(layer)
            for name, parameter in layer.named_parameters(recurse=False)
            if parameter.is_meta
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[0].is_meta:
            target, source = args[:2]
            layer, name = self._places.get(_get_storage(target), (None, ""))
            if layer is not None and not _is_read(layer, name):
                part = (target.size(), target.stride(), target.storage_offset())
                self._writes.setdefault(layer, []).append(DirectWrite(name, part, source))
        return func(*args, **(kwargs or {}))

    def finish(self) -> None:
        """Write into every layer of which nothing is missing, and let vLLM process it as after its first load."""
        for layer, writes in self._writes.items():
            info = get_layerwise_info(layer)
            if not info.can_load() or not self._is_complete(layer, writes):
                continue
            meta.materialize_layer(layer, info)
            for write in writes:
                torch.as_strided(getattr(layer, write.name).data, *write.part).copy_(write.source)
            layerwise._layerwise_process(layer, info)  # noqa: SLF001 - vLLM's own loaders call it, too

    def _is_complete(self, layer: torch.nn.Module, writes: list[DirectWrite]) -> bool:
        def count(name: str) -> int:
            return sum(write.part[0].numel() for write in writes if write.name == name)

        names = get_layerwise_info(layer).restore_metadata[0]
        return all(_is_read(layer, name) or count(name) == getattr(layer, name).numel() for name in names)


def _get_storage(tensor: torch.Tensor) -> int:
    """Return a number that tensors share if they are parts of one another, also without memory."""
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - there is no public name


def _is_read(layer: torch.nn.Module, name: str) -> bool:
    """Return whether a loader of the parameter has been called in this reload."""
    return any(name == read for read, _ in reversed(get_layerwise_info(layer).loaded_weights))


def find_unloaded(model: torch.nn.Module) -> list[str]:
    """Return the parameters that would keep their old values. To be called after the weights are read and before the reload is
    finalized."""
    seen: list[Any] = []
    missed: dict[str, Any] = {}
    for prefix, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if not info.can_load():  # all weights of the layer are loaded
            seen += layer.parameters(recurse=False)
        elif not is_deferred_attention_layer(layer):
            read, (kept, _) = {name for name, _ in info.loaded_weights}, info.kernel_tensors
            for name in info.restore_metadata[0]:
                if name in read:
                    seen.append(kept.get(name))
                else:
                    missed[f"{prefix}.{name}"] = kept.get(name)
    places = {id(each) for each in seen if each is not None}  # compared by identity, so that a tied head is included
    return [name for name, parameter in missed.items() if id(parameter) not in places]
