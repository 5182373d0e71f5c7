"""TRL's side of benchmarks/trl/run.py, in an environment that has TRL and vLLM: writes when each step ended.

python -m benchmarks.trl.trl_process SETTINGS_JSON RESULT
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, TrainerCallback

from benchmarks import report

WORDS = ("sum", "of", "is", "one", "two", "three", "four")
"""As the agents of benchmarks/loop/agent.py put prompts together."""


def main(settings: dict[str, Any], result: Path) -> None:
    import datasets  # noqa: PLC0415 - the environment of the other benchmarks need not have these two

    import trl  # noqa: PLC0415

    made: dict[str, Any] = {"versions": report.versions() | {"trl": trl.__version__}, "ends": [], "tokens": []}

    def reward(completions: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
        made["sampled"] = made.get("sampled", 0) + sum(map(len, completion_ids))
        return [dice.random() for _ in completions]

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if settings["cuda"]:
                torch.cuda.synchronize()
            made["ends"].append(time.perf_counter())
            made["tokens"].append(made.pop("sampled", 0))

    dice = random.Random(0)
    batch = settings["prompts"] * settings["group_size"]
    micro = max(n for n in range(1, settings["micro_batch"] + 1) if batch % n == 0)
    vllm = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": settings["gpu_share"],
        "vllm_max_model_length": 512 + 3 * settings["words"] + settings["sampled"],
    }
    config = trl.GRPOConfig(
        output_dir=settings["folder"],
        max_steps=settings["steps"],
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=batch // micro,
        num_generations=settings["group_size"],
        max_completion_length=settings["sampled"],
        beta=0.0,
        loss_type="dapo",
        temperature=1.0,
        learning_rate=1e-6,
        bf16=settings["cuda"],
        use_cpu=not settings["cuda"],
        gradient_checkpointing=True,
        model_init_kwargs={"dtype": "float32"},
        save_strategy="no",
        report_to="none",
        **(vllm if settings["cuda"] else {}),
    )
    prompts = [
        [{"role": "user", "content": prompt(f"t{n}", settings["words"])}]
        for n in range(settings["steps"] * settings["prompts"])
    ]
    trainer = trl.GRPOTrainer(
        model=settings["model"],
        args=config,
        reward_funcs=reward,
        train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
        processing_class=AutoTokenizer.from_pretrained(settings["model"]),
        callbacks=[Clock()],
    )
    trainer.train()
    made.pop("sampled", None)
    result.write_text(json.dumps(made | {"micro_batch": micro}))


def prompt(task: str, words: int) -> str:
    dice = random.Random(task)
    return " ".join(dice.choice(WORDS) for _ in range(words))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
