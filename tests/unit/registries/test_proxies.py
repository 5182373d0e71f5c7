"""The list of a run's proxies: who serves now, known to everybody soon."""

import pytest
from structlog.testing import capture_logs

from swarmq.registries.proxies import ProxyRegistry

A, B, C = (f"http://127.0.0.1:{port}/v1" for port in (1, 2, 3))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "proxies.json"


def test_what_one_process_writes_another_reads(path):
    one, other = ProxyRegistry(path), ProxyRegistry(path)
    assert other.urls() == ()
    one.write([A, B])
    assert other.urls() == (A, B)
    other.add(C)
    other.add(C)
    one.remove(A)
    assert one.urls() == other.urls() == (B, C)


def test_a_damaged_list_leaves_everybody_with_the_proxies_they_know(path):
    path.write_text("rubbish")
    with capture_logs() as logs:
        assert ProxyRegistry(path).urls() == ()
    assert [line["event"] for line in logs] == ["proxies_unreadable"]
