"""Training of any Hugging Face decoder on layouts: packed rows without cross-talk, and trees.

`LayoutModel` owns a model and computes the log-probability of every sampled token of a layout. A model whose attention can be
replaced computes a whole layout in one pass. A model whose attention cannot be replaced (it is recurrent, has an attention of its
own, or fails the check on a small tree) computes one row after another, and `rows_only` says why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import structlog
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation writes it
from transformers import AttentionInterface, PreTrainedModel

from swarmq.errors import LearnerError, SetUpError
from swarmq.learner.memory import host
from swarmq.learner.model import flash_attention, layout_attention, rotary_embeddings, vision
from swarmq.learner.model.attention_check import (
    AttentionCall,
    RecordingVisibility,
    agree_on_reason,
    broadcast_from_rank0,
    find_flash_refusal,
    find_refusal,
)
from swarmq.learner.model.compilations import log_compilations
from swarmq.learner.model.context_parallel import ALONE, ContextGroup, cut_for_rank
from swarmq.learner.model.flash_attention import Kind
from swarmq.learner.model.layout_attention import BLOCK, NoLayoutError, Visibility, to_device
from swarmq.learner.model.logprob_head import (
    Scored,
    TopTokens,
    find_top,
    find_top_of_logits,
    get_head,
    score_candidates,
    score_hidden,
    score_logits,
)
from swarmq.learner.model.routing_replay import ROUTING, install_replay
from swarmq.timeline import Cost, Layout, PrefixTree, lay_rows, make_resolved_turn, unfold
from swarmq.timeline.images import compute_positions

log = structlog.get_logger()

EAGER = "eager"
"""transformers' attention that implements every feature: the faster ones silently drop soft-capping and sinks."""

SUPPORTED_LAYER_TYPES = {"full_attention", "sliding_attention"}
"""Layer types whose computation is fully determined by the attention mask."""

EXPERTS = "experts"
"""Name of the module of routed experts in transformers; shared experts are in another module."""
ACTIVE_EXPERTS_KEYS = ("num_experts_per_tok", "top_k_experts", "moe_topk")
TOTAL_EXPERTS_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names for a layer's number of routed experts in the configurations of transformers."""

EXAMPLE = (([1, 2, 3], [4, 5]), ([1, 2, 3, 4, 5, 6], [7, 8]), ([1, 2, 3], [4, 9]), ([2, 3], [1, 1, 2]))
"""Forking prompts and samples with which a model is checked."""
GPU_ERRORS = (torch.OutOfMemoryError, torch.AcceleratorError)
"""Errors of the GPU, which say nothing about the model."""
TOLERANCE_NATS = 1e-3
"""Largest accepted difference in nats between two computations of a log-probability in `EXAMPLE`."""


@dataclass(frozen=True)
class PlacedLayout:
    """Model inputs of a layout on the device: all T tokens and S sampled tokens of the layout, or one rank's part if ranks share
    the pass."""

    input_ids: Tensor  # [1, T]
    position_ids: Tensor  # [1, T], or [3, 1, T] in time, height and width if there are images
    predictors: Tensor  # [S]
    targets: Tensor  # [S]
    visibility: Visibility
    sampled: Tensor | None = None  # [S] indices among the layout's sampled tokens; None: all of them
    num_sampled: int = 0
    """Number of sampled tokens of the whole layout."""
    images: vision.PlacedImages | None = None
    routing: Tensor | None = None  # [T, bytes] packed expert ids to replay

    @classmethod
    def of(
        cls,
        layout: Layout,
        device: torch.device,
        *,
        compiled: bool | None = None,
        context: ContextGroup = ALONE,
        blank: vision.PlacedImages | None = None,
    ) -> PlacedLayout:
        """Copy a layout to `device`. `compiled` chooses FlexAttention, by default on CUDA. `context`: the ranks that share the
        pass. `blank`: what the vision tower computes if the layout shows no image."""
        compiled = device.type == "cuda" if compiled is None else compiled
        part = cut_for_rank(layout, context, block=BLOCK if compiled else 1) if context.ranks > 1 else None
        mine = part or layout
        whole, tokens = (part.layout, part.tokens) if part else (layout, slice(None))
        images = vision.PlacedImages.of(layout, device, tokens=part.tokens if part else None)
        ids, positions, predictors, targets = (
            to_device(values.astype(np.int64), device)
            for values in (
                np.maximum(mine.token_ids, 0),  # marks of images
                compute_positions(whole)[:, None, tokens] if images else mine.positions[None],
                mine.predictors,
                mine.targets,
            )
        )
        return cls(
            input_ids=ids[None],
            position_ids=positions,
            predictors=predictors,
            targets=targets,
            visibility=Visibility(layout, device, compiled=compiled, part=part, context=context),
            sampled=to_device(part.sampled.astype(np.int64), device) if part else None,
            num_sampled=layout.num_trained,
            images=images or blank,
            routing=None if mine.routing is None else to_device(mine.routing, device),
        )


def find_decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the decoder layers, recognised by the class names of transformers. FSDP2 subclasses these classes, so base classes
    are compared, too."""
    names = set(model._no_split_modules or ())  # noqa: SLF001 - it has no public name
    return [module for module in model.modules() if not names.isdisjoint(c.__name__ for c in type(module).__mro__)]


class LayoutModel(nn.Module):
    """A causal language model that scores the sampled tokens of layouts.

    Wrap it for data parallelism as a whole (`accelerator.prepare(LayoutModel(model))`), so that parameters are gathered when the
    head reads them. The model's attention is replaced if that reproduces the model's own results.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        pass_tokens: int = 0,
        ranks: int = 1,
        max_model_len: int | None = None,
        replays_routing: bool = False,
    ) -> None:
        """Wrap and check `model`.

        `device`, `dtype`: device and precision of attention in training; None: the present ones. `pass_tokens`: largest pass, in
        tokens, for which attention is compiled now; for larger passes it is compiled later. `ranks`: number of ranks that share
        each pass. `max_model_len`: context length of the engine, on which rotary positions may depend; None: the model's own.
        `replays_routing`: whether tokens with recorded experts are computed with these.
        """
        super().__init__()
        rotary_embeddings.pin_rotations(model, max_model_len)
        self.model: Any = model
        self.head_apart = True
        """Whether the head is applied apart from the model, to parts of the hidden states; otherwise the model returns all logits of a layout at
        once."""
        self.head_chunk: int | None = None
        """Number of tokens whose logits exist at once, and for which gradients are kept; None: as many as fit."""
        self.rows_only: str | None = "not checked yet"
        """Reason why the model cannot compute trees; None if it can."""
        self._windows: list[int | None] = []
        """Attention window of each layer; empty if unknown."""
        self._tree_slowdown = 1.0
        """Time of attention over a pair in a tree over that in packed rows."""
        self._row_attention: str = self.model.config._attn_implementation  # noqa: SLF001 - it has no public name
        """transformers' attention with which rows are computed one after another."""
        self.ranks, self.max_model_len = ranks, max_model_len
        self._replays = replays_routing and install_replay(model.config, find_decoder_layers(model))
        self._device = device or self.model.device
        self._check(self._device, dtype or self.model.dtype, pass_tokens)

    @property
    def cost(self) -> Cost:
        """Floating-point operations of a forward pass, for `swarmq.timeline.layout_plan`."""
        config = self.model.config.get_text_config()
        heads = getattr(config, "num_attention_heads", 0)
        width = heads * (getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1))
        ends = {id(end.weight) for end in (self.model.get_input_embeddings(), self.model.get_output_embeddings())}
        part = self.model.get_decoder() if vision.takes_images(self.model.config) else self.model
        inner = [(name, each) for name, each in part.named_parameters() if id(each) not in ends]
        share = _get_expert_share(config)
        prices = [2.0 * each.numel() * (share if EXPERTS in name.split(".") else 1) for name, each in inner]
        frozen = sum(price for price, (_, each) in zip(prices, inner, strict=True) if not each.requires_grad)
        layers, pair = Counter(self._windows or [None] * config.num_hidden_layers), 4.0 * width
        windowed = {window: pair * count for window, count in layers.items() if window is not None}
        return Cost(
            token=sum(prices),
            pair=pair * layers[None],
            windowed=windowed,
            frozen=frozen,
            tree_slowdown=self._tree_slowdown,
        )

    def compile_layers(self) -> None:
        """Let the first pass compile all operations between matrix products and attention into a few kernels, once for all layers
        and lengths. Requires CUDA.

        A layer that the compiler refuses is computed uncompiled, and torch logs it.
        """
        # `_device` is the device of training; the weights may still be in host memory
        if self.rows_only or self._device.type != "cuda":
            return
        log_compilations()
        config = torch._dynamo.config  # noqa: SLF001 - the only home of these switches
        config.suppress_errors = True
        # DDP's optimization would cut layers apart to overlap communication, which overlaps between layers anyway
        config.optimize_ddp = False
        decoder = set(self.model.get_decoder().modules())
        for layer in filter(decoder.__contains__, find_decoder_layers(self.model)):  # not those of a vision tower
            layer.forward = torch.compile(layer.forward, dynamic=True)  # hooks that gather its weights stay outside

    def forward(
        self,
        placed: PlacedLayout,
        temperatures: Tensor | float = 1.0,
        *,
        candidates: Tensor | None = None,
        top_k: int = 0,
    ) -> Scored:
        """Return the log-probabilities of the layout's S targets, including those that other ranks score.

        `temperatures`: one for all targets, or [S]. `candidates`: further tokens [S, K] to score. `top_k`: number of likeliest tokens to
        return. Neither is available if ranks share a micro-batch.
        """
        temperatures = torch.as_tensor(temperatures, dtype=torch.float32, device=placed.targets.device)
        shared = placed.sampled
        if shared is not None and temperatures.ndim:
            temperatures = temperatures[shared]
        temperatures = temperatures.expand(len(placed.targets))
        chosen = self._compute(placed, self.model.get_decoder() if self.head_apart else self.model)
        if self.head_apart:
            scored = score_hidden(chosen, get_head(self.model), placed.targets, temperatures, chunk=self.head_chunk)
        else:
            scored = score_logits(chosen, placed.targets, temperatures)
        if candidates is not None:
            scored = scored._replace(candidates=self._score_candidates(chosen, candidates, temperatures))
        if top_k:
            scored = scored._replace(top=self._find_top(chosen, temperatures, top_k))
        if shared is None:
            return scored
        logprobs, entropies = placed.visibility.context.combine_scores(
            torch.stack(scored[:2]), shared, placed.num_sampled
        )
        return Scored(logprobs.clone(), entropies.detach())  # FSDP2 warns about views

    def _score_candidates(self, chosen: Tensor, candidates: Tensor, temperatures: Tensor) -> Tensor:
        if self.head_apart:
            return score_candidates(chosen, get_head(self.model), candidates, temperatures, chunk=self.head_chunk)
        return (chosen.float() / temperatures[:, None]).log_softmax(-1).gather(1, candidates)

    def _find_top(self, chosen: Tensor, temperatures: Tensor, k: int) -> TopTokens:
        if self.head_apart:
            return find_top(chosen, get_head(self.model), temperatures, k, chunk=self.head_chunk)
        return find_top_of_logits(chosen, temperatures, k)

    def hidden_states(self, placed: PlacedLayout) -> Tensor:
        """Return the last hidden states, of which each predicts one of the layout's targets, [S, H], or this rank's part of them."""
        return self._compute(placed, self.model.get_decoder())

    def _compute(self, placed: PlacedLayout, network: Callable[..., tuple[Tensor, ...]]) -> Tensor:
        """Return the outputs of `network` that predict the layout's targets."""
        seen = vision.embed(self.model, placed.input_ids, placed.images) if placed.images else None
        if not self._replays:
            placed = replace(placed, routing=None)
        outputs = (_run_row_by_row if self.rows_only else _run_whole)(network, placed, seen)
        # At a fork one token predicts several tokens. An embedding sums their gradients in a fixed order.
        return F.embedding(placed.predictors, outputs)

    def _check(self, device: torch.device, dtype: torch.dtype, pass_tokens: int) -> None:
        """Check head and attention against the model's own computation of a small example, and compiled kernels against
        attention in batches."""
        turns = [make_resolved_turn(prompt, sampled, [0.0] * len(sampled)) for prompt, sampled in EXAMPLE]
        rows, (tree,) = lay_rows([(0, row) for row in unfold(turns)]), PrefixTree([turns]).layouts(budget=100)
        calls = [] if self.model.device.type == "meta" else self._try_layouts(rows, tree)
        self.head_apart, self.rows_only, self._windows, self._row_attention, calls = broadcast_from_rank0(
            (self.head_apart, self.rows_only, self._windows, self._row_attention, calls)
        )
        trained = any(parameter.requires_grad for parameter in self.parameters())
        if self.rows_only is None and device.type == "cuda":
            self.rows_only = find_refusal(
                calls, tree, device, dtype, backward=trained, pass_tokens=pass_tokens, ranks=self.ranks
            )
        self.rows_only = agree_on_reason(self.rows_only)
        if self.rows_only is None:
            self._attend_over_layouts()
            if device.type == "cuda":
                self._try_flash_attention(calls, device, dtype, backward=trained)
        else:
            self._attend_with(self._row_attention)
        if self.rows_only or not self.head_apart:
            log.warning(
                "slower_than_could_be",
                model=type(self.model).__name__,
                rows_only=self.rows_only,
                head_apart=self.head_apart,
                attention=self.model.config._attn_implementation,  # noqa: SLF001 - it has no public name
            )

    def _try_flash_attention(
        self, calls: Sequence[AttentionCall], device: torch.device, dtype: torch.dtype, *, backward: bool
    ) -> None:
        """Let FlashAttention compute packed rows if it can on every rank, and log which attention computes them."""
        shared = "ranks share each micro-batch" if self.ranks > 1 else None
        reason = agree_on_reason(shared or find_flash_refusal(calls, device, dtype, backward=backward))
        if reason is None:
            flash_attention.allow(Kind.of(*call)._replace(dtype=dtype, backward=backward) for call in calls)
            self._tree_slowdown = flash_attention.FLEX_SLOWDOWN
        log.info("packed_rows", attention="FlexAttention" if reason else "FlashAttention", reason=reason)

    def _try_layouts(self, rows: Layout, tree: Layout) -> list[AttentionCall]:
        """Set `rows_only` and `head_apart` from a trial of both layouts, and return the inputs of the model's attention."""
        few, forked = (PlacedLayout.of(layout, self.model.device, compiled=False) for layout in (rows, tree))
        recorded = RecordingVisibility(tree, self.model.device)
        with torch.no_grad(), full_precision(self.model):
            as_trained = _compute_reference(self.model, few)
        with evaluation_mode(self.model), full_precision(self.model):
            expected = _compute_reference(self.model, few)
            _check_noise(self.model, float((as_trained - expected).abs().max()))
            expected = self._compare_with_eager(few, expected)
            self.head_apart = self._find_flaw(few, expected) is None
            self.rows_only = find_tree_obstacle(self.model)
            if self.rows_only is None:
                self._attend_over_layouts()
                self.rows_only = self._find_flaw(replace(forked, visibility=recorded), expected)
                self.rows_only = self.rows_only or _find_hidden_window(self.model, recorded.windows)
                self._windows = [] if self.rows_only else recorded.windows
        if any(call.form.softcap is not None or call.form.sinks is not None for call in recorded.calls):
            # only eager attention implements both; so small an example may not show the difference
            self._row_attention = EAGER
        return recorded.calls

    def _compare_with_eager(self, few: PlacedLayout, expected: Tensor) -> Tensor:
        """Return log-probabilities by transformers' eager attention, which implements every feature of the configuration.

        `expected`: log-probabilities by the attention with which the model was loaded. Rows are computed by that attention if
        both agree, else by eager attention.
        """
        if self._row_attention == EAGER:
            return expected
        try:
            self._attend_with(EAGER)
        except (ValueError, NotImplementedError):  # the model has only its own attention
            self._attend_with(self._row_attention)
            return expected
        eagerly = _compute_reference(self.model, few)
        if not float((eagerly - expected).abs().max()) < TOLERANCE_NATS:
            self._row_attention = EAGER
        self._attend_with(self._row_attention)
        return eagerly

    def _attend_with(self, implementation: str) -> None:
        config = self.model.config
        if config._attn_implementation != implementation:  # noqa: SLF001 - it has no public name
            text = [name for name in config.sub_configs if getattr(config, name) is config.get_text_config()]
            # a vision tower keeps its own
            self.model.set_attn_implementation(dict.fromkeys(("", *text), implementation) if text else implementation)

    def _attend_over_layouts(self) -> None:
        AttentionInterface.register(layout_attention.NAME, layout_attention.attend)
        self._attend_with(layout_attention.NAME)

    def _find_flaw(self, placed: PlacedLayout, expected: Tensor) -> str | None:
        try:
            off = float((self(placed).logprobs - expected).abs().max())
        except GPU_ERRORS:
            raise
        except NoLayoutError:
            return "its layers do not hand the layout (visibility) on to their attention"
        except Exception as error:
            return f"a small example fails: {_describe_error(error)}"
        return None if off < TOLERANCE_NATS else f"a small example is off by {off:.2g}"


def _get_expert_share(config: Any) -> float:
    """Return the share of a layer's routed experts that compute a token; 1 if the configuration does not say."""
    chosen, there = (
        next((value for name in names if isinstance(value := getattr(config, name, None), int) and value), None)
        for names in (ACTIVE_EXPERTS_KEYS, TOTAL_EXPERTS_KEYS)
    )
    return chosen / there if chosen and there else 1.0


def find_tree_obstacle(model: PreTrainedModel) -> str | None:
    """Return why a model cannot compute trees, as far as its class and configuration show, or None."""
    config = model.config.get_text_config()
    unsupported = set(getattr(config, "layer_types", None) or ()) - SUPPORTED_LAYER_TYPES
    if unsupported:
        return f"it has layers of kind {', '.join(sorted(unsupported))}"
    if not getattr(model, "_supports_attention_backend", False):
        return "its attention cannot be replaced"
    return None


def _find_hidden_window(model: PreTrainedModel, windows: Iterable[int | None]) -> str | None:
    """Return why a model cannot compute trees because its own masks apply a sliding window, or None. The example is too short
    to reveal such a window.

    `windows`: the windows that layers passed to attention.
    """
    config = model.config.get_text_config()
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    made_for = getattr(config, "max_position_embeddings", None)
    if any(windows) or not window or (kinds and "sliding_attention" not in kinds) or (made_for and window >= made_for):
        return None
    return f"its layers do not hand their sliding window ({window} tokens) on to their attention"


def _describe_error(error: Exception) -> str:
    if isinstance(error, LearnerError):
        return str(error)
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _run_whole(
    network: Callable[..., tuple[Tensor, ...]], placed: PlacedLayout, seen: vision.SeenTokens | None = None
) -> Tensor:
    """Return the output of `network` for all T tokens, computed in one pass. `seen`: in place of the tokens."""
    return network(
        **(seen.inputs(slice(0, placed.input_ids.shape[1])) if seen else {"input_ids": placed.input_ids}),
        position_ids=placed.position_ids,
        attention_mask=None,
        use_cache=False,
        visibility=placed.visibility,
        **({} if placed.routing is None else {ROUTING: placed.routing}),
    )[0][0]


def _run_row_by_row(
    network: Callable[..., tuple[Tensor, ...]], placed: PlacedLayout, seen: vision.SeenTokens | None = None
) -> Tensor:
    """Return the output of `network` for packed rows, computed in one pass per row with the model's own attention. `seen`: in place of the
    tokens."""
    visibility = placed.visibility
    if visibility.part or any(path != [node] for node, path in zip(visibility.nodes, visibility.paths, strict=True)):
        raise LearnerError("this model computes only packed rows, each on one rank: plan with only='rows'")
    parts = [slice(a, b) for a, b in visibility.nodes]
    if seen is None:
        rows = [{"input_ids": placed.input_ids[:, p]} for p in parts]
    else:
        rows = [seen.inputs(p) | {"position_ids": placed.position_ids[..., p]} for p in parts]
    if placed.routing is not None:
        rows = [row | {ROUTING: placed.routing[p]} for row, p in zip(rows, parts, strict=True)]
    return torch.cat([network(**row, use_cache=False)[0][0] for row in rows])


def _check_noise(model: PreTrainedModel, noise: float) -> None:
    """Raise LearnerError if the model computes differently in training mode. `noise`: largest difference in nats."""
    if noise > TOLERANCE_NATS:
        raise SetUpError(
            f"{type(model).__name__} computes a small example differently in training mode, by {noise:.2g} nats, so "
            "engines would differ from training: remove dropout or noise from its config.json, or train another model"
        )


def _compute_reference(model: PreTrainedModel, placed: PlacedLayout) -> Tensor:
    """Return log-probabilities as the model itself computes them. Raises LearnerError if it cannot."""
    try:
        logits = _run_row_by_row(model, placed)[placed.predictors]
    except GPU_ERRORS:
        raise
    except Exception as error:
        if host.is_out_of_memory(error):
            raise LearnerError(
                f"the host has no memory for a small example of {type(model).__name__}: {_describe_error(error)}; free some of it, or raise "
                "the limit of this process (ulimit -v, the container's)"
            ) from error
        raise SetUpError(
            f"{type(model).__name__} cannot compute a small example: {_describe_error(error)}; train another model"
        ) from error
    return score_logits(logits, placed.targets, torch.ones(len(logits), device=logits.device)).logprobs


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Compute without gradients and in evaluation mode inside the block."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def full_precision(model: PreTrainedModel) -> Iterator[None]:
    """Compute in FP32 inside the block if weights have less precision, because rounding would hide errors or look like errors.
    Weights of a decoder layer are converted only while the layer is computed."""
    narrow: dict[int, Tensor] = {}
    layers = find_decoder_layers(model)
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    outside = [parameter for parameter in model.parameters() if id(parameter) not in inside]

    def widen(parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.is_floating_point() and parameter.itemsize < torch.float32.itemsize:
                narrow[id(parameter)] = parameter.data
                parameter.data = parameter.data.float()

    def put_back(parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            parameter.data = narrow.pop(id(parameter), parameter.data)

    hooks = [layer.register_forward_pre_hook(lambda own, _: widen(own.parameters())) for layer in layers]
    hooks += [
        layer.register_forward_hook(lambda own, *_: put_back(own.parameters()), always_call=True) for layer in layers
    ]
    widen(outside)
    try:
        yield
    finally:
        put_back(outside)
        for hook in hooks:
            hook.remove()
