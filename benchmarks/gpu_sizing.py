"""The plans that `swarmq up` would make for Qwen3 models on common GPUs, by its own estimate: a calculation, no measurement.

Model sizes are those of the published configurations, GPU sizes those that nvidia-smi reports. Nothing is downloaded, and no GPU
is needed. The tables of docs/how-to/gpu-sizing.md are made by the same functions (`python -m benchmarks.tables`).

    python -m benchmarks.gpu_sizing
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from benchmarks.tables.common import table
from swarmq.config import Lora, Policy, Train
from swarmq.engine.server.gpus import MIB, GpuCapacity
from swarmq.engine.server.model_check import ModelFacts, count_fans, count_parameters
from swarmq.errors import ConfigError
from swarmq.learner.memory.estimate import GIB, host_bytes, learner_bytes, state_bytes
from swarmq.up.placement import Placement, choose_context_limits, place, to_learner_shape

COMMON = {"vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 40960}


def _shape(hidden: int, inner: int, layers: int, heads: int, *, tied: bool) -> dict[str, int | bool]:
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    return COMMON | sizes | {"num_attention_heads": heads, "tie_word_embeddings": tied}


QWEN3 = {
    "Qwen3-0.6B": _shape(1024, 3072, 28, 16, tied=True),
    "Qwen3-1.7B": _shape(2048, 6144, 28, 16, tied=True),
    "Qwen3-4B": _shape(2560, 9728, 36, 32, tied=True),
    "Qwen3-8B": _shape(4096, 12288, 36, 32, tied=False),
    "Qwen3-14B": _shape(5120, 17408, 40, 40, tied=False),
    "Qwen3-32B": _shape(5120, 25600, 64, 64, tied=False),
}
"""Model -> the fields of its config.json on which memory depends."""
GPUS = {"24 GB": 24564 * MIB, "48 GB": 46068 * MIB, "80 GB": 81559 * MIB, "141 GB": 143771 * MIB}
"""GPU -> bytes that nvidia-smi reports for an RTX 4090, an L40S, an H100 and an H200."""
COUNTS = (1, 2, 4, 8)
MICRO_BATCHES = (Train().micro_batch_tokens, 8192, 4096)
"""Tokens of a micro-batch: the default, and what is tried if that does not fit."""
TRAININGS = {"all parameters": Train(), "LoRA, rank 32": Train(lora=Lora(rank=32, alpha=64.0))}


class Sizing(NamedTuple):
    """A plan and the longest call that it allows."""

    placement: Placement
    context: int
    micro_batch: int

    def __str__(self) -> str:
        plan = self.placement
        context = f"{self.context / 1024:g}k"
        if plan.kind == "shared":
            how = "take turns" if plan.sleep else "side by side"
        else:
            how = f"{len(plan.learner)} + {sum(map(len, plan.engines))}"
        sharded = ", sharded" if plan.sharding == "full" else ""
        return f"{how}{sharded}, {context}{'' if self.micro_batch == MICRO_BATCHES[0] else '*'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    print(*memory_table(), *plan_tables(), sep="", end="")


def make_facts(model: str) -> ModelFacts:
    """Return what `swarmq up` reads of a model's config.json."""
    config = QWEN3[model]
    return ModelFacts(
        name=model,
        architecture="Qwen3ForCausalLM",
        hidden_size=config["hidden_size"],
        is_folder=True,
        max_length=config["max_position_embeddings"],
        layers=config["num_hidden_layers"],
        parameters=count_parameters(config),
        fans=count_fans(config),
        kv_values_per_token=2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"],
        tool_call_parser=None,
    )


def size(model: str, train: Train, *, gpu: int, count: int) -> Sizing | None:
    """Return the plan for a policy with otherwise default settings on `count` empty GPUs of `gpu` bytes; None if it does not fit."""
    facts, gpus = make_facts(model), [GpuCapacity(total=gpu, free=gpu)] * count
    for tokens in MICRO_BATCHES:
        policy = Policy(model=model, train=msgspec.structs.replace(train, micro_batch_tokens=tokens))
        try:
            limit = choose_context_limits({"main": policy}, {"main": facts}, gpus, host_cache=0)["main"]
            return Sizing(place(limit.apply_to(policy), facts, gpus), limit.tokens, tokens)
        except ConfigError:
            continue
    return None


def memory_table() -> Iterator[str]:
    """Yield what one GPU and the host hold of each model, in GiB."""
    heads = ("model", "parameters", "trained", "between steps", "in a step", "engine's weights", "host")
    rows = []
    for model in QWEN3:
        facts = make_facts(model)
        shape = to_learner_shape(facts)
        for words, train in TRAININGS.items():
            host = host_bytes(shape, train, here=range(1), ranks=1, full=False, cuda=True, judge_sizes=())
            sizes = (state_bytes(shape, train), learner_bytes(shape, train), 2 * facts.parameters, host)
            rows.append((model, f"{facts.parameters / 1e9:.2f} B", words, *(f"{each / GIB:.0f}" for each in sizes)))
    yield "\n"
    yield from table(heads, rows)
    yield "\n"


def plan_tables() -> Iterator[str]:
    """Yield a table of plans for each size of GPU."""
    for name, gpu in GPUS.items():
        yield f"\nGPUs of {name}:\n\n"
        heads = ("model", "trained", *(f"{count} GPU{'s'[: count > 1]}" for count in COUNTS))
        yield from table(
            heads,
            (
                (model, words, *(size(model, train, gpu=gpu, count=count) or "-" for count in COUNTS))
                for model in QWEN3
                for words, train in TRAININGS.items()
            ),
        )
    yield "\n"


if __name__ == "__main__":
    main()
