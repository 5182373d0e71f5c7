"""One run of verl's trainer in its own environment: its settings, and when each of its steps ended."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.peers.processes import started, wait_for_lines
from benchmarks.peers.work import (
    EPISODES,
    GROUP_SIZE,
    LEARNING_RATE,
    LONGEST_PROMPT,
    LONGEST_RESPONSE,
    PASS_TOKENS,
    PROMPTS,
    prompt,
)

HERE = Path(__file__).parent
GRAPH_SIZES = [1, 2, 4, *range(8, 129, 8)]
"""Numbers of sequences for which vLLM captures CUDA graphs: only those that occur, so that it starts in a third of the time."""


def run(
    folder: Path,
    model: Path,
    *,
    python: str,
    mode: str,
    bypass: bool,
    attention: str,
    logits: str,
    steps: int,
    least: int,
    deadline_s: float,
    **sizes: Any,
) -> dict[str, Any]:
    """Return when each step ended, in seconds after the start, and what verl logged of each.

    `mode` is verl's trainer mode; `bypass` leaves out the pass that computes the log-probabilities again before training.
    A run that did not reach all of its steps in time is described by those that it reached, if these are `least` or more.
    Raises PeerError with the end of verl's log.
    """
    write_tasks(folder / "tasks.parquet", count=(steps + 4) * PROMPTS)
    (folder / "agents.json").write_text(
        json.dumps([{"name": "peers", "_target_": "benchmarks.peers.theirs.verl_agent.Agent"}])
    )
    asked = settings(folder, model, mode, bypass=bypass, attention=attention, logits=logits, steps=steps, **sizes)
    command = [python, "-m", "verl.trainer.main_ppo", *(f"{key}={value}" for key, value in asked.items())]
    logged = folder / "steps.jsonl"
    began = time.monotonic()
    with started(command, ENVIRONMENT | {"VERL_FILE_LOGGER_PATH": str(logged)}, folder / "verl.log") as process:
        log = folder / "verl.log"
        ends = wait_for_lines(process, logged, steps, deadline=began + deadline_s, log=log, least=least)
    told = [json.loads(line)["data"] for line in logged.read_text().splitlines()[: len(ends)]]
    return {
        "ends": [end - began for end in ends],
        "episodes": EPISODES,
        "timing": [{key: value for key, value in step.items() if key.startswith("timing_s/")} for step in told],
        "response_tokens": [step["response_length/mean"] for step in told],
        "memory_gib": [step.get("actor/perf/max_memory_allocated_gb") for step in told],
        "settings": {key: str(value) for key, value in asked.items()},
    }


ENVIRONMENT = {
    "HYDRA_FULL_ERROR": "1",
    "RAY_agent_register_timeout_ms": "120000",  # Ray and its agents start from a cold disk
    "RAY_raylet_start_wait_time_s": "120",
    "RAY_memory_monitor_refresh_ms": "0",  # which counts memory that the machine has not grown to yet
    "RAY_AUTH_MODE": "disabled",
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_DISABLE_COMPILE_CACHE": "0",  # verl's default is 1: every start compiles again
}


def settings(
    folder: Path,
    model: Path,
    mode: str,
    *,
    bypass: bool,
    attention: str,
    logits: str,
    steps: int,
    device: str = "cuda",
    liger: bool = True,
    checkpointing: bool = False,
    pass_tokens: int = PASS_TOKENS,
    gpu_share: float = 0.5,
) -> dict[str, Any]:
    """Return verl's settings: GRPO with FP32 master weights under BF16 (its default), no KL, nothing saved or validated."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    buffer = "Buffer" if mode == "sync" else "AsyncBuffer"
    return {
        "algorithm.adv_estimator": "grpo",
        "algorithm.rollout_correction.bypass_mode": bypass,
        "data.train_files": folder / "tasks.parquet",
        "data.val_files": folder / "tasks.parquet",
        "data.train_batch_size": PROMPTS,
        "data.max_prompt_length": LONGEST_PROMPT,
        "data.max_response_length": LONGEST_RESPONSE,
        "data.dataloader_num_workers": 0,
        "actor_rollout_ref.model.path": model,
        "++actor_rollout_ref.model.override_config.attn_implementation": attention,
        "actor_rollout_ref.model.external_lib": "benchmarks.peers.theirs.flash_attention_4",
        "actor_rollout_ref.model.use_liger": liger,
        "actor_rollout_ref.model.enable_gradient_checkpointing": checkpointing,
        "actor_rollout_ref.model.use_fused_kernels": logits != "flash",
        "actor_rollout_ref.model.fused_kernel_options.impl_backend": "torch" if logits == "flash" else logits,
        f"{actor}.strategy": "fsdp2",
        f"{actor}.optim.lr": LEARNING_RATE,
        f"{actor}.ppo_mini_batch_size": PROMPTS,
        f"{actor}.use_dynamic_bsz": True,
        f"{actor}.ppo_max_token_len_per_gpu": pass_tokens,
        f"{actor}.fsdp_config.reshard_after_forward": False,
        f"{rollout}.name": "vllm",
        f"{rollout}.n": GROUP_SIZE,
        f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.gpu_memory_utilization": gpu_share,
        f"{rollout}.max_model_len": LONGEST_PROMPT + LONGEST_RESPONSE,
        f"{rollout}.cudagraph_capture_sizes": json.dumps(GRAPH_SIZES, separators=(",", ":")),
        f"{rollout}.agent.num_workers": 4,
        f"{rollout}.agent.default_agent_loop": "peers",
        f"{rollout}.agent.agent_loop_config_path": folder / "agents.json",
        "reward.num_workers": 1,
        "trainer.device": device,
        "trainer.n_gpus_per_node": 1,
        "trainer.logger": "[console,file]",
        "trainer.total_training_steps": steps,
        "trainer.val_before_train": False,
        "trainer.resume_mode": "disable",
        "trainer.v1.trainer_mode": mode,
        "trainer.v1.sampler.custom_sampler.path": HERE / "theirs" / "verl_agent.py",
        "trainer.v1.sampler.custom_sampler.name": buffer,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 2,
        "hydra.run.dir": folder / "hydra",
        "ray_kwargs.ray_init.num_cpus": 16,
        "++ray_kwargs.ray_init.address": "local",
        "++ray_kwargs.ray_init.object_store_memory": 4_000_000_000,
        "++ray_kwargs.ray_init.include_dashboard": False,
    }


def write_tasks(path: Path, count: int) -> None:
    rows = [{"prompt": prompt(n), "data_source": "peers", "extra_info": {"index": n}} for n in range(count)]
    pq.write_table(pa.Table.from_pylist(rows), path)
