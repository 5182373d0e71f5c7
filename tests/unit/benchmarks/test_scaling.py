"""Sizes follow from costs, the first bottleneck is the fullest part, and what was not measured is said to be so."""

import asyncio

import msgspec
import pytest
from benchmarks.pipeline import GROUP_SIZE, SHAPES, converse, group
from benchmarks.scaling import (
    BLOCKS,
    COLLECTOR,
    GPU_COUNTS,
    LOOP,
    MODELS,
    NETWORK,
    SENDERS,
    Costs,
    demand,
    name_bottleneck,
    needed_groups,
    size_gpus,
    volume_table,
    weight_bytes,
)

from swarmq.config import GroupSettings
from swarmq.messages import DeliveryReport, Turn, decode, encode

COSTS = Costs(
    proxy_ms_per_token=0.05,
    proxy_streams=2000,
    broker_ms={name: {1: 2.0, 3: 6.0} for name in SHAPES},
    collector_ms=dict.fromkeys(SHAPES, 4.0),
    process_gain={2: 1.5, 4: 3.0},
    connection_kib=100.0,
    loop_tokens_per_s=dict.fromkeys(MODELS, 2.0 * LOOP.trained),
    loop_step_s=dict.fromkeys(MODELS, 10.0),
    message_bytes={name: dict.fromkeys(SENDERS, 1000.0 * shape.trained) for name, shape in SHAPES.items()},
    worker_ms=5.0,
    most_episodes_per_s=480.0,
    most_broker_ms=3.0,
    engine_tokens_per_s=20_000.0,
    learner_tokens_per_s={
        model: {"2k": (40_000.0, "FlashAttention 4"), "16k": (20_000.0, "FlexAttention")} for model in MODELS
    },
    rank_efficiency=dict.fromkeys(MODELS, 1.0),
    push_shares={"whole": 0.5, "difference": 0.25},
)


def test_a_rate_costs_each_part_what_an_episode_costs_it():
    asked = demand(COSTS, "chat", 100)
    assert asked.proxies == pytest.approx(100 * LOOP.trained * 0.05 / 1000)
    assert (asked.broker_cores, asked.cluster_cores, asked.collector) == pytest.approx((0.2, 0.6, 0.4))


def test_gpus_on_other_hosts_get_their_weights_over_the_network_of_rank_0():
    one_host, many = (size_gpus(COSTS, "4 B", gpus) for gpus in (8, 64))
    assert (one_host.engines, one_host.push_shares["whole"]) == (0, 0)
    assert (many.engines, many.pushed["whole"]) == (28, 28 * weight_bytes("Qwen3-4B") / 2)
    assert many.loads()[NETWORK] == many.push_shares["whole"] / 2
    assert many.demand.episodes_per_s == 8 * one_host.demand.episodes_per_s
    assert many.batch == 8 * one_host.batch


def test_the_fullest_part_is_the_first_bottleneck():
    slow, fast = (msgspec.structs.replace(COSTS, collector_ms=dict.fromkeys(SHAPES, ms)) for ms in (40.0, 0.001))
    assert name_bottleneck(size_gpus(slow, "1.7 B", 512).loads())[0] == "**the collector**, 41.0 times too slow"
    assert name_bottleneck(size_gpus(fast, "1.7 B", 512).loads())[0].startswith("**the network of rank 0's host**")
    assert name_bottleneck({COLLECTOR: 0.25}) == ("the GPUs; the collector is 25 % busy", "more GPUs")


@pytest.mark.parametrize("agents", [1, 320, 10_000])
def test_as_few_groups_as_let_so_many_episodes_run(agents):
    groups = GroupSettings()
    each = groups.group_size * (groups.max_staleness + 1)
    assert (needed_groups(agents) - 1) * each < agents <= needed_groups(agents) * each


def test_the_bytes_of_a_push_are_shared_by_the_tokens_of_a_batch():
    rows = {line.split(" | ")[0].strip("| "): line for line in volume_table(COSTS)}
    for kind, share in COSTS.push_shares.items():
        assert f" {share * weight_bytes('Qwen3-4B') / (512 * 250):,.0f} " in rows[f"push of Qwen3-4B, {kind}"]


def test_every_size_has_a_row_for_each_model():
    assert "".join(BLOCKS["growth_gpus"](COSTS)).count(" B | ") == len(GPU_COUNTS) * len(MODELS)


def test_the_messages_that_are_measured_are_those_of_a_whole_group():
    shape = SHAPES["chat"]
    turns = asyncio.run(converse(shape))
    messages = [decode(encode(message)) for message in group("t", turns)]
    sampled = [message for message in messages if isinstance(message, Turn)]
    assert sum(turn.num_sampled for turn in sampled) == GROUP_SIZE * shape.trained
    assert sum(len(turn.prompt_ids) // 4 for turn in sampled) == GROUP_SIZE * shape.turns * shape.prompt
    calls = {turn.call_id: turn.episode_id for turn in sampled}
    assert all(calls[turn.parent] == turn.episode_id for turn in sampled if turn.parent)
    reports = [message for message in messages if isinstance(message, DeliveryReport)]
    assert {call for one in reports for sent in one.sent.values() for call in sent} == calls.keys()


def test_the_learners_rates_name_their_attention():
    (row,) = (line for line in BLOCKS["growth_parts"](COSTS) if line.startswith("| learner |"))
    assert (
        "40,000 tokens/s in rows of 2k with FlashAttention 4, 20,000 tokens/s in rows of 16k with FlexAttention" in row
    )
