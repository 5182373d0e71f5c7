"""What a run of many GPUs or many agents would need, computed from measured costs: a calculation, no measurement.

A GPU's demand is that of the measured whole loop, times the number of GPUs; what an episode costs the other parts comes from the
result files that `Costs` names. The tables of docs/explanation/scaling.md are made by the same functions
(`python -m benchmarks.tables`).

    python -m benchmarks.scaling
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any, NamedTuple

import msgspec

from benchmarks.gpu_sizing import make_facts
from benchmarks.pipeline import SHAPES, Shape
from benchmarks.report import RESULTS
from benchmarks.tables.common import table
from swarmq.config import GroupSettings, Train
from swarmq.learner.memory.estimate import HALF_BYTES

GPU_COUNTS = (8, 64, 512)
MODELS = {"1.7 B": "1p7b", "4 B": "4b"}
"""Models whose whole loop was measured, and what the figures call them."""
LOOP = SHAPES["chat"]
"""The shape of the loop benchmark's episodes."""
GPUS_PER_HOST = 8
LINK_BYTES_PER_S = 100e9 / 8
"""Assumed network of the learner's host: 100 Gbit/s."""
AGENTS = 10_000
EPISODE_S = (10, 60, 600)
PUSHED = ("Qwen3-4B", "Qwen3-32B")
BATCH_EPISODES = 512
RATE = f"{Train().learning_rate:g}"
"""Learning rate of the optimizer steps whose differences are quoted: the default."""
COLLECTOR, NETWORK = "the collector", "the network of rank 0's host"
NEXT_STEPS = {
    COLLECTOR: "`collector.processes`; then several runs, or longer answers in fewer turns",
    NETWORK: "NCCL, LoRA, or fewer steps with larger batches",
}
SENDERS = {
    "EpisodeBegin": ("begin", "client to RabbitMQ to collector"),
    "Turn": ("turns", "proxy to RabbitMQ to collector"),
    "DeliveryReport": ("delivery reports", "proxy to RabbitMQ to collector"),
    "EpisodeEnd": ("end", "client to RabbitMQ to collector"),
    "Rollout": ("rollout on `ready`", "collector to RabbitMQ to learner"),
    "StepReport": ("step report", "learner to RabbitMQ to collector"),
}


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured."""

    proxy_ms_per_token: float
    """Processor time of a proxy for a sampled token of a stream, all work of the call included (proxy_h200)."""
    proxy_streams: int
    """Streams that one proxy held at once (proxy)."""
    broker_ms: dict[str, dict[int, float]]
    """Shape -> number of nodes -> processor time of all nodes for an episode (pipeline)."""
    collector_ms: dict[str, float]
    """Shape -> processor time of the collector for an episode (pipeline)."""
    process_gain: dict[int, float]
    """Number of the collector's processes -> episodes per second that they carry over those of one process (hosts_processes)."""
    connection_kib: float
    """RabbitMQ's memory for a client's connection (pipeline)."""
    loop_tokens_per_s: dict[str, float]
    """Model -> tokens that one GPU samples and trains in the whole loop (loop_h200)."""
    loop_step_s: dict[str, float]
    message_bytes: dict[str, dict[str, float]]
    """Shape -> record -> bytes of all such messages of an episode (pipeline)."""
    worker_ms: float
    """Processor time of the client's process for an episode of one call (swarm)."""
    most_episodes_per_s: float
    """Highest rate at which a whole pipeline was run (swarm)."""
    most_broker_ms: float
    engine_tokens_per_s: float
    """Of a 1.7 B model on one GPU, through the proxy (proxy_h200)."""
    learner_tokens_per_s: dict[str, dict[str, tuple[float, str]]]
    """Model -> length of rows -> tokens that a learner with a GPU of its own computes, and with which attention (learner_h200)."""
    rank_efficiency: dict[str, float]
    """Model -> share of a second rank that is gained, with FlexAttention (scaling_h200)."""
    push_shares: dict[str, float]
    """Kind of a push over HTTP -> share of the BF16 weights' bytes that travels, compressed (hosts_push)."""

    @classmethod
    def read(cls, known: Mapping[str, Any]) -> Costs:
        """Take the costs from result files, by name."""
        pipeline, loop = known["pipeline"], known["loop_h200"]["figures"]
        pushes, processes = known["hosts_push"]["figures"], known["hosts_processes"]["figures"]
        learner, workers = known["learner_h200"], known["swarm"]["detail"]["scale"]["workers"][-1]
        by_nodes: dict[str, dict[int, float]] = {}
        for name in SHAPES:
            found = {nodes: f"broker_ms_{name}{f'_{nodes}_nodes' if nodes > 1 else ''}" for nodes in (1, 3)}
            by_nodes[name] = {nodes: pipeline["figures"][key] for nodes, key in found.items()}
        return cls(
            proxy_ms_per_token=median(
                row["proxies"] for row in known["proxy_h200"]["detail"]["micros_a_token"]["proxy"]
            )
            / 1000,
            proxy_streams=int(known["proxy"]["figures"]["streams_held"]),
            broker_ms=by_nodes,
            collector_ms={name: pipeline["figures"][f"collector_ms_{name}"] for name in SHAPES},
            process_gain={
                num: processes[f"collector_carried_{num}"] / processes["collector_carried_1"] for num in (2, 4)
            },
            connection_kib=pipeline["figures"]["broker_kib_per_connection"],
            loop_tokens_per_s={
                model: min(loop[f"sampled_tokens_per_s_{key}"], loop[f"trained_tokens_per_s_{key}"])
                for model, key in MODELS.items()
            },
            loop_step_s={model: loop[f"step_{key}_s"] for model, key in MODELS.items()},
            message_bytes={row["shape"]: row["bytes"] for row in pipeline["detail"]["costs"]},
            worker_ms=workers["cpu_ms"]["worker"],
            most_episodes_per_s=workers["episodes_per_s"],
            most_broker_ms=workers["cpu_ms"]["broker"],
            engine_tokens_per_s=known["proxy_h200"]["figures"]["tokens_per_s_proxy"],
            learner_tokens_per_s={
                model: {
                    length: (
                        learner["figures"][f"tokens_per_s_{key}_{length}"],
                        learner["detail"][f"{key}_{length}"].get("attention", "FlexAttention"),
                    )
                    for length in ("2k", "16k")
                }
                for model, key in MODELS.items()
            },
            rank_efficiency={
                model: known["scaling_h200"]["figures"][f"fsdp2{'' if model == '1.7 B' else '_4b'}_efficiency_2"]
                for model in MODELS
            },
            push_shares={"whole": pushes["whole_share_large"], "difference": pushes[f"delta_share_large_{RATE}"]},
        )


class Demand(NamedTuple):
    """What so many episodes per second of a shape ask of the parts between agents and learner."""

    episodes_per_s: float
    proxies: float
    """Processes, each of which uses one core."""
    broker_cores: float
    """Of one node."""
    cluster_cores: float
    """Of three nodes together."""
    collector: float
    """Share of the one core that the collector has."""


def demand(costs: Costs, shape: str, episodes_per_s: float) -> Demand:
    """Return what the parts must do at a rate of episodes."""
    tokens_per_s = episodes_per_s * SHAPES[shape].trained
    return Demand(
        episodes_per_s,
        tokens_per_s * costs.proxy_ms_per_token / 1000,
        episodes_per_s * costs.broker_ms[shape][1] / 1000,
        episodes_per_s * costs.broker_ms[shape][3] / 1000,
        episodes_per_s * costs.collector_ms[shape] / 1000,
    )


class GpuSizing(NamedTuple):
    """A run of several GPUs, half of which serve."""

    demand: Demand
    batch: float
    """Episodes of a step, as many for each GPU as were measured on one."""
    engines: int
    """Engines on other hosts than rank 0's."""
    pushed: dict[str, float]
    """Kind of a push -> bytes that leave rank 0's host for all of them."""
    push_shares: dict[str, float]
    """Kind -> time of that over the time of a step."""

    def loads(self) -> dict[str, float]:
        """Return, for each part that a run has once, what is asked of it over what it can do; pushes are differences."""
        return {COLLECTOR: self.demand.collector, NETWORK: self.push_shares["difference"]}


def size_gpus(costs: Costs, model: str, gpus: int) -> GpuSizing:
    """Return what a run needs in which every GPU does as much as the measured one."""
    rate, step_s = gpus * costs.loop_tokens_per_s[model] / LOOP.trained, costs.loop_step_s[model]
    away = max(0, gpus - GPUS_PER_HOST) // 2
    pushed = {kind: away * share * weight_bytes(_qwen3(model)) for kind, share in costs.push_shares.items()}
    shares = {kind: size / LINK_BYTES_PER_S / step_s for kind, size in pushed.items()}
    return GpuSizing(demand(costs, "chat", rate), rate * step_s, away, pushed, shares)


def name_bottleneck(loads: Mapping[str, float]) -> tuple[str, str]:
    """Return what limits the run, in words, and the next step: the part with the greatest load, or the GPUs if none is full."""
    part, load = max(loads.items(), key=lambda item: item[1])
    if load < 1:
        return f"the GPUs; {part} is {_percent(load)} busy", "more GPUs"
    return f"**{part}**, {load:.1f} times too slow", NEXT_STEPS[part]


def weight_bytes(model: str) -> int:
    return HALF_BYTES * make_facts(model).parameters


def needed_groups(agents: int) -> int:
    """Return the `groups.groups_per_batch` at which tickets let so many episodes run, with other settings at their default."""
    groups = GroupSettings()
    return -(-agents // (groups.group_size * (groups.max_staleness + 1)))


def size_table(costs: Costs) -> Iterator[str]:
    """Yield a row for every number of GPUs and model."""
    heads = (
        *("GPUs", "model", "episodes/s", "tokens/s", "batch, step", "proxies", "RabbitMQ, cores: 1 node, 3 nodes"),
        *("collector's core", "a push, share of a step: whole, difference", "first bottleneck", "next step"),
    )

    def cells(gpus: int, model: str) -> Iterator[Any]:
        sizing = size_gpus(costs, model, gpus)
        asked = sizing.demand
        yield from (gpus, model, _number(asked.episodes_per_s), f"{asked.episodes_per_s * LOOP.trained:,.0f}")
        yield f"{_number(sizing.batch)} episodes, {costs.loop_step_s[model]:.1f} s"
        yield _whole(asked.proxies)
        yield f"{_number(asked.broker_cores)}, {_number(asked.cluster_cores)}"
        yield _percent(asked.collector)
        pushes = (
            f"{_number(sizing.pushed[kind] / 1e9)} GB, {_percent(share)}" for kind, share in sizing.push_shares.items()
        )
        yield "; ".join(pushes) if sizing.engines else "within the host"
        yield from name_bottleneck(sizing.loads())

    yield from _block(heads, [cells(gpus, model) for gpus in GPU_COUNTS for model in MODELS])


def full_table(costs: Costs) -> Iterator[str]:
    """Yield, for every model, how many GPUs use up each part of which a run has one."""

    def cells(model: str) -> Iterator[Any]:
        one = size_gpus(costs, model, 1).demand
        yield from (model, *(f"{1 / each:,.0f}" for each in (one.proxies, one.collector)))
        engines = costs.loop_step_s[model] * LINK_BYTES_PER_S / weight_bytes(_qwen3(model))
        yield from (f"{GPUS_PER_HOST + 2 * engines / share:,.0f}" for share in costs.push_shares.values())
        yield f"{1 / one.broker_cores:,.0f}"

    heads = ("model", "one proxy process", "the collector", "rank 0's network with whole weights", "with differences")
    yield from _block((*heads, "each core of RabbitMQ"), map(cells, MODELS))


def agent_table(costs: Costs) -> Iterator[str]:
    """Yield what 10,000 agents ask for, by how long an episode lasts."""
    heads = (
        *("an episode lasts", "shape", "episodes/s", "proxies", "RabbitMQ, cores: 1 node, 3 nodes", "collector's core"),
        *("first bottleneck", "next step"),
    )

    def cells(seconds: int, shape: str) -> Iterator[Any]:
        asked = demand(costs, shape, AGENTS / seconds)
        yield from (f"{seconds} s", f"`{shape}`", _number(asked.episodes_per_s))
        yield _whole(max(asked.proxies, AGENTS / costs.proxy_streams))
        yield f"{_number(asked.broker_cores)}, {_number(asked.cluster_cores)}"
        yield _percent(asked.collector)
        yield from name_bottleneck({COLLECTOR: asked.collector})

    yield from _block(heads, [cells(seconds, shape) for seconds in EPISODE_S for shape in ("chat", "agent")])
    groups = GroupSettings()
    at_once = groups.groups_per_batch * groups.group_size * (groups.max_staleness + 1)
    memory = AGENTS * costs.connection_kib * 1024 / 1e9
    yield (
        f"With default settings tickets let {at_once:,} episodes run at once (`groups_per_batch` x `group_size` x (`max_staleness` + 1)), so "
        f"{AGENTS:,} agents need `groups.groups_per_batch = {needed_groups(AGENTS)}`. If each is a process with a connection of its own, "
        f"RabbitMQ needs {memory:.1f} GB of memory for them ({costs.connection_kib:.0f} KiB each).\n\n"
    )


def part_table(costs: Costs) -> Iterator[str]:
    """Yield, for every part, with what its work grows, what was measured of it, and how a run gets more of it."""
    broker_cores = costs.most_episodes_per_s * costs.most_broker_ms / 1000
    learner = "; ".join(
        f"{model}: "
        + ", ".join(
            f"{rate:,.0f} tokens/s in rows of {length} with {attention}" for length, (rate, attention) in rates.items()
        )
        + f"; two ranks {2 * costs.rank_efficiency[model]:.2f} times as many as one, both with FlexAttention"
        for model, rates in costs.learner_tokens_per_s.items()
    )
    rows = (
        (
            "client library",
            "episodes, calls",
            f"{costs.worker_ms:.1f} ms of a core for an episode of one call",
            "more processes, on any host",
            "`swarm`",
        ),
        (
            "proxy",
            "sampled tokens, calls",
            f"{1000 / costs.proxy_ms_per_token:,.0f} streamed tokens/s a process; {costs.proxy_streams:,} streams held",
            "`proxy.count`, other hosts",
            "`proxy_h200`, `proxy`",
        ),
        (
            "RabbitMQ",
            "messages, bytes",
            f"at most {costs.most_episodes_per_s:.0f} episodes/s of one call were run, with {broker_cores:.1f} cores",
            "a host with more cores",
            "`swarm`, `pipeline`",
        ),
        (
            "collector",
            "episodes, turns, bytes",
            "the table below, of one process; "
            + ", ".join(f"{num} carry {gain:.1f} times as many episodes" for num, gain in costs.process_gain.items()),
            "`collector.processes`, on one host",
            "`pipeline`, `hosts_processes`",
        ),
        (
            "engine",
            "sampled tokens, prompt tokens",
            f"1.7 B: {costs.engine_tokens_per_s:,.0f} tokens/s on one H200, 256 streams",
            "more engines, also on other hosts",
            "`proxy_h200`",
        ),
        (
            "learner",
            "tokens computed",
            f"on one H200, {learner}",
            "more ranks, also on other hosts",
            "`learner_h200`, `scaling_h200`",
        ),
        (
            "learner and engine on one GPU",
            "both",
            ", ".join(f"{model}: {rate:,.0f}" for model, rate in costs.loop_tokens_per_s.items())
            + " tokens/s sampled and trained",
            "as above",
            "`loop_h200`",
        ),
    )
    yield from _block(("part", "its work grows with", "measured", "more of it", "result"), rows)


def cost_table(costs: Costs) -> Iterator[str]:
    """Yield what an episode of each shape costs the parts in the middle, and the rate at which one core is full."""
    heads = (
        *("shape", "turns", "new prompt tokens, sampled tokens of a turn", "proxy", "RabbitMQ, 1 node", "3 nodes"),
        *("collector", "episodes/s of one process"),
    )

    def cells(name: str, shape: Shape) -> Iterator[Any]:
        yield from (f"`{name}`", shape.turns, f"{shape.prompt:,}, {shape.sampled}")
        yield f"{shape.trained * costs.proxy_ms_per_token:.0f}"
        yield from (f"{costs.broker_ms[name][nodes]:.1f}" for nodes in (1, 3))
        yield from (f"{costs.collector_ms[name]:.1f}", f"{1000 / costs.collector_ms[name]:.0f}")

    yield from _block(heads, [cells(*item) for item in SHAPES.items()])


def volume_table(costs: Costs) -> Iterator[str]:
    """Yield the bytes of every part for each trained token, by shape."""
    names = tuple(SHAPES)
    rows = [
        [words, way, *(f"{_number(costs.message_bytes[name][record] / SHAPES[name].trained)}" for name in names)]
        for record, (words, way) in SENDERS.items()
    ]
    totals = [sum(costs.message_bytes[name].values()) / SHAPES[name].trained for name in names]
    rows.append(["all messages", "once each way", *map(_number, totals)])
    for model in PUSHED:
        size = weight_bytes(model)
        tokens = [BATCH_EPISODES * SHAPES[name].trained for name in names]
        for kind, share in costs.push_shares.items():
            sent = (share * size / each for each in tokens)
            rows.append([f"push of {model}, {kind}", "rank 0 to each engine", *map(_number, sent)])
        rows.append(
            [
                f"gradients of {model}, `hybrid`",
                "each of two learner hosts to the other",
                *(f"{2 * size / each:,.0f}" for each in tokens),
            ]
        )
    yield from _block(("what", "from, to", *(f"`{name}`" for name in names)), rows)


def _qwen3(model: str) -> str:
    """Return the published model whose shape the loop benchmark's model has."""
    return f"Qwen3-{model.replace(' ', '')}"


def _block(heads: tuple[Any, ...], rows: Any) -> Iterator[str]:
    yield "\n"
    yield from table(heads, rows)
    yield "\n"


def _whole(value: float) -> str:
    return f"{-(-value // 1):,.0f}"


def _percent(share: float) -> str:
    return f"{share:,.0%}".replace("%", " %")


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


BLOCKS = {
    "growth_parts": part_table,
    "growth_costs": cost_table,
    "growth_gpus": size_table,
    "growth_full": full_table,
    "growth_agents": agent_table,
    "growth_volume": volume_table,
}
"""Figures block of docs/explanation/scaling.md -> the function that makes it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    costs = Costs.read({path.stem: json.loads(path.read_text()) for path in RESULTS.glob("*.json")})
    for block in BLOCKS.values():
        print(*block(costs), sep="", end="")


if __name__ == "__main__":
    main()
