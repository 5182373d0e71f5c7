"""The table of plans is what `swarmq up` would plan, of models with the sizes that they are known for."""

import pytest
from benchmarks import gpu_sizing
from benchmarks.gpu_sizing import GPUS, QWEN3, TRAININGS, make_facts, memory_table, plan_tables, size
from benchmarks.tables.render import ROOT
from transformers import Qwen3Config

from swarmq.config import Policy
from swarmq.engine.server.gpus import GpuCapacity
from swarmq.errors import ConfigError
from swarmq.learner.memory.estimate import HEADROOM, learner_bytes
from swarmq.learner.memory.outline import build_outline
from swarmq.up.placement import place, to_learner_shape

FULL, LORA = TRAININGS.values()


@pytest.mark.parametrize(
    ("model", "billions"),
    [("Qwen3-0.6B", 0.60), ("Qwen3-4B", 4.02), ("Qwen3-8B", 8.19), ("Qwen3-14B", 14.77), ("Qwen3-32B", 32.76)],
)
def test_a_model_has_the_number_of_parameters_that_its_card_states(model, billions):
    assert make_facts(model).parameters / 1e9 == pytest.approx(billions, abs=0.006)


@pytest.mark.parametrize("model", ["Qwen3-0.6B", "Qwen3-8B"])
def test_the_count_is_that_of_the_model_that_transformers_builds(model):
    outline = build_outline(model, Qwen3Config(**QWEN3[model]))
    counted = sum(p.numel() for p in outline.parameters())
    assert make_facts(model).parameters == pytest.approx(counted, rel=1e-4)  # norms of queries and keys are not counted


def test_a_plan_fits_its_gpu_and_none_is_made_where_nothing_fits():
    one = size("Qwen3-4B", FULL, gpu=GPUS["141 GB"], count=1)
    assert (one.placement.kind, one.placement.sleep, one.context) == ("shared", False, 16384)
    assert learner_bytes(to_learner_shape(make_facts("Qwen3-4B")), FULL) < HEADROOM * GPUS["141 GB"]
    assert size("Qwen3-32B", FULL, gpu=GPUS["141 GB"], count=1) is None
    assert str(size("Qwen3-8B", FULL, gpu=GPUS["80 GB"], count=4)) == "3 + 1, sharded, 16k"


def test_smaller_micro_batches_are_tried_and_marked():
    cramped = size("Qwen3-14B", LORA, gpu=GPUS["24 GB"], count=4)
    assert cramped.micro_batch < gpu_sizing.MICRO_BATCHES[0]
    assert str(cramped).endswith("*")


def test_every_model_has_a_row_for_each_training_and_size_of_gpu():
    rows = len(QWEN3) * len(TRAININGS)
    assert "".join(memory_table()).count("| Qwen3-") == rows
    assert "".join(plan_tables()).count("| Qwen3-") == rows * len(GPUS)


def quoted(page):
    """The words of a page, in one line."""
    return " ".join((ROOT / "docs/how-to" / page).read_text().split())


def test_the_pages_quote_what_a_plan_says():
    facts, gpus = make_facts("Qwen3-4B"), {name: [GpuCapacity(total=size, free=size)] for name, size in GPUS.items()}
    assert str(place(Policy(model="Qwen3-4B"), facts, gpus["141 GB"])) in quoted("gpu-sizing.md")
    with pytest.raises(ConfigError) as refused:
        place(Policy(model="Qwen3-4B"), facts, gpus["80 GB"])
    assert str(refused.value).partition("take more GPUs")[0] in quoted("out-of-memory.md")
