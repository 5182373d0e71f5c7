"""Who starts a run is told how clients join and how to look at the queues, without a secret: what is printed ends up in logs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swarmq.config import Policy, SwarmJob
from swarmq.keys import Invite
from swarmq.up.deployment import Deployment

JOB = SwarmJob(run="math", folder="/data/my runs", policies={"main": Policy(model="m")})
INVITE = Invite(
    run="math", client="host", secret=b"client secret", amqp_url="amqp://host:topsecret@127.0.0.1:5672/",
    base_url="http://127.0.0.1:8000/v1", policies=("main",), kinds=("default",), group_size=8,
)  # fmt: skip
IDENTITY = SimpleNamespace(management_url="http://127.0.0.1:15672", user="swarmq", password="hidden-management")
NODE: Any = SimpleNamespace(identity=IDENTITY)


@pytest.mark.parametrize("node", [NODE, None])
def test_no_secret_is_printed_and_the_commands_that_show_one_are(node: Any) -> None:
    told = "\n".join(Deployment(JOB, node, INVITE, engines={}, placements={}).welcome())
    for secret in (INVITE.encode(), "topsecret", IDENTITY.password):
        assert secret not in told
    assert "export SWARMQ_INVITE='/data/my runs/math'" in told
    assert "swarmq client add NAME --run '/data/my runs/math'" in told
    assert str(Path("/data/my runs/math/invite")) in told
    assert "dashboard: http://127.0.0.1:8000/dashboard; `swarmq token '/data/my runs/math' --role read`" in told
    assert "/metrics (collector); all of them are in /data/my runs/math/prometheus.json" in told
    assert ("swarmq viewer '/data/my runs/math'" in told) == (node is not None)
