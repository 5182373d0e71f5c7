"""TRL's side of the work, in an environment that has TRL and vLLM: a line of JSON at the end of every step.

python -m benchmarks.peers.theirs.trl_process SETTINGS_JSON STEPS_JSONL
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import AutoTokenizer, TrainerCallback
from vllm import SamplingParams

import benchmarks.peers.theirs.flash_attention_4  # noqa: F401 - so that it runs
import trl
from benchmarks.peers.work import (
    EPISODES,
    GROUP_SIZE,
    LEARNING_RATE,
    LONGEST_PROMPT,
    LONGEST_RESPONSE,
    PROMPTS,
    SAMPLED,
    TURNS,
    next_turn,
    observation,
    prompt,
)


def main(settings: dict[str, Any], steps: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    episodes = Episodes(tokenizer)
    dice = random.Random(0)

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()
            told = {"trl": trl.__version__, "response_tokens": episodes.tokens / EPISODES}
            episodes.tokens = 0
            with steps.open("a") as file:
                file.write(json.dumps(told | {"memory_gib": torch.cuda.max_memory_allocated() / 2**30}) + "\n")

    def reward(completions: list[Any], **_: Any) -> list[float]:
        return [dice.random() for _ in completions]

    micro = settings["micro_batch"]
    config = trl.GRPOConfig(
        output_dir=settings["folder"],
        max_steps=settings["steps"],
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=EPISODES // micro,
        num_generations=GROUP_SIZE,
        max_completion_length=LONGEST_RESPONSE,
        beta=0.0,
        loss_type="dapo",
        temperature=1.0,
        learning_rate=LEARNING_RATE,
        bf16=settings["weights"] == "float32",
        gradient_checkpointing=settings["checkpointing"],
        use_liger_kernel=settings["liger"],
        model_init_kwargs={"dtype": settings["weights"], "attn_implementation": settings["attention"]},
        save_strategy="no",
        report_to="none",
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=settings["gpu_share"],
        vllm_max_model_length=LONGEST_PROMPT + LONGEST_RESPONSE,
        vllm_importance_sampling_correction=settings["correction"],
    )
    trainer = trl.GRPOTrainer(
        model=settings["model"],
        args=config,
        reward_funcs=reward,
        train_dataset=datasets.Dataset.from_list([{"prompt": prompt(n)} for n in range(settings["steps"] * PROMPTS)]),
        processing_class=tokenizer,
        rollout_func=episodes,
        callbacks=[Clock()],
    )
    trainer.train()


class Episodes:
    """A rollout function: all conversations take their turns together, because all calls have the same length."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.tokens = 0
        """Number of response tokens since this was last set to zero."""

    def __call__(self, prompts: list[list[dict[str, str]]], trainer: Any) -> dict[str, list[Any]]:
        dice = random.Random()
        sampling = SamplingParams(max_tokens=SAMPLED, ignore_eos=True, temperature=1.0, logprobs=0)
        begins = [self._encode(self._render(messages)) for messages in prompts]
        responses: list[list[int]] = [[] for _ in prompts]
        masks: list[list[int]] = [[] for _ in prompts]
        logprobs: list[list[float]] = [[] for _ in prompts]
        for turn in range(TURNS):
            if turn:
                for number in range(len(prompts)):
                    rendered = self._render([{"role": "user", "content": observation(dice)}])
                    seen = self._encode(next_turn(rendered, self._tokenizer.eos_token))
                    responses[number] += seen
                    masks[number] += [0] * len(seen)
                    logprobs[number] += [0.0] * len(seen)
            asked = [{"prompt_token_ids": begin + response} for begin, response in zip(begins, responses, strict=True)]
            answers = trainer.vllm_generation.llm.generate(asked, sampling, use_tqdm=False)
            for number, answer in enumerate(answers):
                ids, likely = answer.outputs[0].token_ids, answer.outputs[0].logprobs
                responses[number] += ids
                masks[number] += [1] * len(ids)
                logprobs[number] += [entry[token].logprob for token, entry in zip(ids, likely, strict=True)]
        self.tokens += sum(map(len, responses))
        return {"prompt_ids": begins, "completion_ids": responses, "logprobs": logprobs, "env_mask": masks}

    def _render(self, messages: list[dict[str, str]]) -> str:
        return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
