"""What an engine says of its load."""

from __future__ import annotations

import pytest

from swarmq.engine.client.load import parse_load, read_load
from swarmq.errors import EngineError


def test_replicas_are_summed_and_their_cache_use_is_averaged() -> None:
    load = parse_load(
        "# TYPE vllm:num_requests_running gauge\n"
        'vllm:num_requests_running{engine="0"} 3.0\nvllm:num_requests_running{engine="1"} 1.0\n'
        'vllm:num_requests_waiting{engine="0"} 0.0\nvllm:num_requests_waiting{engine="1"} 4.0\n'
        'vllm:kv_cache_usage_perc{engine="0"} 0.5\nvllm:kv_cache_usage_perc{engine="1"} 0.25\n'
    )
    assert (load.running, load.waiting, load.kv) == (4, 4, 0.375)


def test_a_page_of_something_else_is_no_load() -> None:
    with pytest.raises(ValueError, match="no metrics of vLLM"):
        parse_load("process_open_fds 3\n")


def test_an_engine_that_is_away_is_named() -> None:
    with pytest.raises(EngineError, match=r"http://127.0.0.1:9/metrics"):
        read_load("http://127.0.0.1:9/", "s")
