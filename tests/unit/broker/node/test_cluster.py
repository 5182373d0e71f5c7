"""The nodes of a private cluster, before any of them is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarmq.broker.node.cluster import PrivateCluster
from swarmq.config import BrokerSettings
from swarmq.errors import BrokerError


def test_one_node_lives_in_the_folder_itself_and_several_in_folders_of_their_own(tmp_path: Path) -> None:
    assert [node.folder for node in PrivateCluster(tmp_path, BrokerSettings()).nodes] == [tmp_path]
    cluster = PrivateCluster(tmp_path, BrokerSettings(nodes=3))
    assert [node.folder for node in cluster.nodes] == [tmp_path / f"node{number}" for number in (1, 2, 3)]


@pytest.mark.parametrize(("before", "now"), [(1, 3), (3, 1), (3, 5)])
async def test_the_number_of_nodes_cannot_change(tmp_path: Path, before: int, now: int) -> None:
    for path in [tmp_path] if before == 1 else [tmp_path / f"node{number + 1}" for number in range(before)]:
        path.mkdir(exist_ok=True)
        (path / "node.json").touch()
    with pytest.raises(
        BrokerError, match=f"has {before} nodes?, and broker.nodes is {now}.*set broker.nodes to {before}"
    ):
        await PrivateCluster(tmp_path, BrokerSettings(nodes=now)).start()


def test_an_even_number_of_nodes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"nodes must be odd \(got 2\): 2 nodes survive no more failures than 1"):
        BrokerSettings(nodes=2)
