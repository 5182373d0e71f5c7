"""Runs inside vLLM: the search of `draft_search.py` on a GPU.

One program for each request and text; a match is ranked by a single number, so that the highest is found in any order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.triton_utils import tl, triton
from vllm.v1.worker.gpu.spec_decode.ngram import speculator

from swarmq.weights.format.conventions import LONGEST_MATCH, SHORTEST_MATCH
from swarmq.weights.vllm_plugin import drafts

if TYPE_CHECKING:
    from vllm.config import VllmConfig

BLOCK = 512


VllmDrafter = speculator.NgramGPUSpeculator


def register() -> None:
    """Make vLLM draft from all texts in this process where it was started with `DRAFT_SCHEDULE`."""
    speculator.NgramGPUSpeculator = make_drafter


def make_drafter(vllm_config: VllmConfig, *rest: Any) -> Any:
    return (Drafter if drafts.is_ours(vllm_config.speculative_config) else VllmDrafter)(vllm_config, *rest)


class Drafter(speculator.NgramGPUSpeculator):  # type: ignore[misc] # vLLM's kernels have no types
    """vLLM's n-gram drafts, from all texts."""

    def __init__(self, vllm_config: VllmConfig, *rest: Any) -> None:
        super().__init__(vllm_config, *rest)
        self._best = torch.zeros(self.max_num_reqs, dtype=torch.int64, device=self.device)

    @torch.inference_mode()
    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Any,
        aux_hidden_states: Any,
        num_sampled: Tensor,
        num_rejected: Any,
        last_sampled: Tensor,
        *rest: Any,
        num_speculative_tokens: int | None = None,
        dummy_run: bool = False,
        **fields: Any,
    ) -> Tensor:
        """Return drafts [requests, most drafts]; the runner drops those after the first `num_speculative_tokens`."""
        drafted: Tensor = self.drafts[: input_batch.num_reqs]
        if num_speculative_tokens != 0 and not dummy_run:
            state = self.req_states
            find_continuations(
                state.all_token_ids.gpu,
                state.total_len.gpu,
                input_batch.idx_mapping,
                num_sampled,
                last_sampled.view(-1),
                self._best[: len(drafted)],
                drafted,
            )
        return drafted


def find_continuations(
    texts: Tensor,  # [texts, tokens] int32
    lengths: Tensor,  # [texts] int32
    rows: Tensor,  # [requests]
    sampled: Tensor,  # [requests], number of tokens sampled in this step
    last: Tensor,  # [texts]
    best: Tensor,  # [requests] int64, overwritten
    drafts: Tensor,  # [requests, most drafts] int64, overwritten
) -> None:
    """Write to `drafts` what `draft_search.find_continuation` returns, followed by a text's last token where it returns fewer.

    Drafts beyond the longest text are cut off by the scheduler alone. With tensor parallelism each rank searches its own copy of the
    texts, in the same slots.
    """
    count, size = texts.shape
    best.zero_()
    _match[(len(rows), count)](
        texts,
        texts.stride(0),
        lengths,
        rows,
        sampled,
        best,
        count,
        size,
        SHORTEST=SHORTEST_MATCH,
        LONGEST=LONGEST_MATCH,
        BLOCK=BLOCK,
        num_warps=4,
    )
    _copy[(len(rows),)](
        texts,
        texts.stride(0),
        lengths,
        rows,
        last,
        best,
        drafts,
        drafts.stride(0),
        count,
        size,
        DRAFTS=drafts.shape[1],
        WIDTH=triton.next_power_of_2(drafts.shape[1]),
        num_warps=1,
    )


@triton.jit
def _match(
    texts,
    stride,
    lengths,
    rows,
    sampled,
    best,
    count,
    size,
    SHORTEST: tl.constexpr,
    LONGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request, text = tl.program_id(0), tl.program_id(1)  # programs that read the same text follow each other
    last_end = tl.load(lengths + text) - 2  # the last place that a token follows
    if (last_end >= 0) & (tl.load(sampled + request) > 0):
        row = tl.load(rows + request).to(tl.int64)
        newest = tl.load(lengths + row) - 1
        own, searched = texts + row * stride, texts + text.to(tl.int64) * stride
        highest = tl.zeros([BLOCK], tl.int64)
        for first in range(0, last_end + 1, BLOCK):
            ends = first + tl.arange(0, BLOCK)
            matches = ends <= last_end
            matched = tl.zeros([BLOCK], tl.int32)
            for back in tl.static_range(LONGEST):
                wanted = tl.load(own + newest - back, mask=newest >= back, other=-1)
                found = tl.load(searched + ends - back, mask=matches & (ends >= back), other=-2)
                matches = matches & (found == wanted)
                matched += matches.to(tl.int32)
            rank = (matched * 2 + (row == text).to(tl.int32)).to(tl.int64) * count + text
            highest = tl.maximum(highest, tl.where(matched >= SHORTEST, rank * size + ends + 1, 0))
        tl.atomic_max(best + request, tl.max(highest, axis=0))


@triton.jit
def _copy(
    texts,
    stride,
    lengths,
    rows,
    last,
    best,
    drafts,
    drafts_stride,
    count,
    size,
    DRAFTS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    request = tl.program_id(0)
    rank = tl.load(best + request)
    start = rank % size  # the place after the match, because ranks count from 1
    text = (rank // size) % count
    places = tl.arange(0, WIDTH)
    known = (rank > 0) & (start + places < tl.load(lengths + text))
    repeated = tl.load(last + tl.load(rows + request)).to(tl.int64)
    drafted = tl.load(texts + text * stride + start + places, mask=known, other=0).to(tl.int64)
    tl.store(drafts + request * drafts_stride + places, tl.where(known, drafted, repeated), mask=places < DRAFTS)
