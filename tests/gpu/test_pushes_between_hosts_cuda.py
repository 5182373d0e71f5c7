"""Weights reach an engine on another host by NCCL: two network namespaces, each with a GPU of its own."""

from __future__ import annotations

import pytest
import torch
from benchmarks.hosts.machines import why_not

from support.push_elsewhere import push_between_machines
from support.tiny_model import tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]


def test_gpus_of_two_hosts_meet_by_nccl() -> None:
    pushed = push_between_machines(tiny_model(), gpus=(0, 1))
    assert pushed.methods == ["nccl"]
    assert pushed.gap < 0.01
    assert pushed.gap_before > 0.1
