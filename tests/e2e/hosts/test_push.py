"""Weights reach an engine on another host, with which the learner shares neither disk nor loopback."""

from __future__ import annotations

import pytest
from benchmarks.hosts.machines import why_not

from support.push_elsewhere import push_between_machines
from support.tiny_model import tiny_model

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]


def test_without_gpus_weights_reach_an_engine_on_another_host_by_http() -> None:
    pushed = push_between_machines(tiny_model(), gpus=None)
    assert pushed.methods == ["http"]
    assert pushed.gap < 1e-4
    assert pushed.gap_before > 0.1
