"""Ranks meet at a store: those that are missing or differ are named."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from swarmq.errors import LearnerError, SetUpError
from swarmq.learner.distributed import rendezvous
from swarmq.learner.distributed.rank_monitor import RankFacts
from swarmq.learner.distributed.rendezvous import find_difference, join_group
from swarmq.runtime.processes import find_free_port


def facts(rank: int, **changed: Any) -> RankFacts:
    fixed = {"versions": {"torch": "2.13.0", "swarmq": "1"}, "settings": {"policies.main.model": "m"}}
    return RankFacts(rank=rank, host=f"gpu{rank}", pid=7, **fixed | changed)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({}, ""),
        ({"settings": None}, ""),
        (
            {"versions": {"torch": "2.12.0", "swarmq": "1"}},
            "rank 2 on gpu2 (process 7) has torch 2.12.0, rank 0 on gpu0 (process 7) has 2.13.0: install the same version",
        ),
        (
            {"settings": {"policies.main.model": "other"}},
            "the job file of rank 2 on gpu2 (process 7) has policies.main.model = 'other', that of rank 0 on gpu0 (process 7) has 'm'",
        ),
    ],
)
def test_hosts_with_other_versions_or_settings_are_named_with_both_values(changed: dict[str, Any], says: str) -> None:
    found = find_difference([facts(0), facts(1), facts(2, **changed)])
    assert found.startswith(says)
    assert bool(found) == bool(says)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set the environment of a rank, as a launcher does."""

    def set_environment(rank: int, world: int = 2, address: str = "127.0.0.1") -> None:
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        for name, value in {
            "RANK": rank,
            "WORLD_SIZE": world,
            "MASTER_ADDR": address,
            "MASTER_PORT": find_free_port(),
        }.items():
            monkeypatch.setenv(name, str(value))

    return set_environment


def test_ranks_that_never_come_are_named_with_the_address_of_rank_0(launched: Callable[..., None]) -> None:
    launched(0, world=3)
    port = os.environ["MASTER_PORT"]
    with pytest.raises(SetUpError, match=rf"rank 1, 2 of 3 did not come to 127\.0\.0\.1:{port} within 0\.2 s"):
        join_group(meet_s=0.2)


def test_a_rank_0_that_cannot_be_reached_is_named_by_its_address(launched: Callable[..., None]) -> None:
    launched(1)
    port = os.environ["MASTER_PORT"]
    with pytest.raises(LearnerError, match=rf"rank 1 on .* does not reach rank 0 at 127\.0\.0\.1:{port} within 0\.2 s"):
        join_group(meet_s=0.2)


def test_an_address_that_resolves_to_nothing_is_named(launched: Callable[..., None]) -> None:
    launched(1, address="nowhere.invalid")
    with pytest.raises(SetUpError, match=r"MASTER_ADDR: .* cannot resolve 'nowhere\.invalid'"):
        join_group(meet_s=0.2)


def test_a_missing_variable_is_named(launched: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    launched(1)
    monkeypatch.delenv("MASTER_ADDR")
    with pytest.raises(SetUpError, match="WORLD_SIZE is 2, but MASTER_ADDR is not set"):
        join_group(meet_s=0.2)


def test_the_interface_that_reaches_rank_0_is_chosen_unless_the_user_has_chosen(
    launched: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched(1)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    rendezvous.choose_interface()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth9")
    rendezvous.choose_interface()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth9"


def test_a_rank_that_is_started_again_takes_no_answer_that_its_former_process_got(
    launched: Callable[..., None],
) -> None:
    """The store of a launcher outlives the ranks, and keeps what they wrote."""
    launched(0)
    store: Any = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for key, value in {"start": "before", "before/facts/1": "of a dead process", "before/verdict": ""}.items():
        store.set(key, value)
    with ThreadPoolExecutor() as threads:
        second = threads.submit(rendezvous.exchange_facts, store.clone(), 1, None, 30.0)
        _, seen_by_first = rendezvous.exchange_facts(store, 0, {"run": "r"}, 30.0)
        ours, seen_by_second = second.result()
    assert [each.rank for each in seen_by_second] == [0, 1]
    assert seen_by_second == seen_by_first
    assert ours.check(["facts/1"])
    assert store.get("before/facts/1") == b"of a dead process"


def test_a_rank_waits_for_a_start_of_rank_0_not_as_long_as_for_its_verdict(launched: Callable[..., None]) -> None:
    """Its launcher may have joined one that was about to end, and must start it again then."""
    launched(1)
    store: Any = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for key, value in {"start": "before", "before/facts/1": "of a dead process"}.items():
        store.set(key, value)
    with pytest.raises(
        LearnerError, match=r"rank 0 did not answer within 0 s: start the launchers of both hosts again"
    ):
        rendezvous.exchange_facts(store, 1, None, 0.2)
    store.set("start", "now")
    with ThreadPoolExecutor() as threads:
        second = threads.submit(rendezvous.exchange_facts, store.clone(), 1, None, 2.0)
        threading.Timer(1.5, store.set, ["now/verdict", "its flaw"]).start()  # after more than half of the time to meet
        with pytest.raises(SetUpError, match="its flaw"):
            second.result()


def test_a_launcher_has_lost_the_store_once_that_has_ended_and_until_it_joins_the_next() -> None:
    own = os.getpid()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not rendezvous.has_lost_store(own, port)
        with socket.create_connection(("127.0.0.1", port)):
            store = server.accept()[0]
            assert not rendezvous.has_lost_store(own, port)
            store.close()
            assert rendezvous.has_lost_store(own, port)
            with socket.create_connection(("127.0.0.1", port)):
                assert not rendezvous.has_lost_store(own, port)
        assert not rendezvous.has_lost_store(own, port)


def test_a_rank_that_loses_the_store_while_it_waits_says_where(launched: Callable[..., None]) -> None:
    launched(1)

    class LostStore:
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError(f"Failed to recv {keys}")

    with pytest.raises(
        LearnerError, match=rf"lost the store at 127\.0\.0\.1:{os.environ['MASTER_PORT']} \(Failed to recv"
    ):
        rendezvous.exchange_facts(LostStore(), 1, None, 6.0)
