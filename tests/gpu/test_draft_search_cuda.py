"""The search for drafts on a GPU finds what the one on a CPU finds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.filterwarnings("ignore"),  # compilers warn about many things
]

DRAFTS = 8


@pytest.mark.parametrize(("texts", "size", "requests"), [(5, 70, 3), (64, 4096, 48), (1, 600, 1)])
def test_both_searches_draft_the_same(texts: int, size: int, requests: int) -> None:
    from swarmq.weights.vllm_plugin.draft_search import find_continuation
    from swarmq.weights.vllm_plugin.draft_search_gpu import find_continuations

    dice = np.random.default_rng(texts)
    drafted = 0
    for _ in range(20):
        table = dice.integers(0, 4 if size < 1000 else 40, (texts, size)).astype(np.int32)
        lengths = dice.integers(0, size - DRAFTS, texts).astype(np.int32)
        rows = dice.permutation(texts)[:requests]
        lengths[rows] = np.maximum(lengths[rows], 1)
        sampled = dice.integers(0, 3, requests).astype(np.int32)
        last = torch.tensor([table[row, max(lengths[row] - 1, 0)] for row in range(texts)], dtype=torch.int64)
        found = torch.full((requests, DRAFTS), -1, device="cuda")
        best = torch.full((requests,), 7, device="cuda")
        find_continuations(
            *(torch.as_tensor(each, device="cuda") for each in (table, lengths, rows, sampled, last)), best, found
        )
        for request, row in enumerate(rows):
            known = find_continuation(table, lengths, int(row), DRAFTS) if sampled[request] else []
            drafted += len(known)
            assert found[request].tolist() == [*known, *[int(last[row])] * (DRAFTS - len(known))]
    assert drafted > 50, "too few texts repeated themselves"
