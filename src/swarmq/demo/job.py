"""Sizes and job of the demo, tuned for two cores."""

from __future__ import annotations

import msgspec

from swarmq.config import EngineSettings, GroupSettings, Loss, Policy, SamplingDefaults, SwarmJob, Train
from swarmq.demo.agent import MAX_TOKENS
from swarmq.demo.problems import KINDS


class DemoSize(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the demo."""

    steps: int = 50
    held_out: int = 128
    """Number of held-out problems over all kinds."""
    concurrency: int = 24
    """Number of concurrent episodes over all clients."""
    spare_groups: float = 4.0
    """Number of tasks fed for each group of a step, because groups with equal rewards are replaced."""
    patience_s: float = 900.0


def demo_job(model: str, *, run: str, seed: int, size: DemoSize) -> SwarmJob:
    """Return the demo's job for a model folder or name."""
    return SwarmJob(
        run=run,
        mix={kind: 1 / len(KINDS) for kind in KINDS},
        policies={
            "main": Policy(
                model=model,
                engine=EngineSettings(
                    max_model_len=256,
                    dtype="float32",
                    arguments=("--max-num-seqs", "64"),
                ),
                sampling=SamplingDefaults(temperature=1.0, max_tokens=MAX_TOKENS),
                train=Train(
                    learning_rate=2e-4,
                    warmup_steps=3,
                    loss=Loss(name="tis_mask"),
                    max_steps=size.steps,
                    gradient_checkpointing=False,
                    mixed_precision="no",  # like the engine
                    checkpoint_every=10,
                    seed=seed,
                ),
            )
        },
        groups=GroupSettings(group_size=8, groups_per_batch=8, max_staleness=2),
    )
