"""Modes of `accelerate launch`, set by options or accelerate's configuration file, that a learner refuses.

accelerate reads the modes from each rank's environment even if an `Accelerator` is created with other arguments, and they would
change the computation.
"""

from __future__ import annotations

from collections.abc import Mapping

from swarmq.errors import SetUpError

CUTS = {"CP": "context", "SP": "sequence", "TP": "tensor"}
SHARED_OUT = "to divide a model among ranks set train.sharding = 'full', to divide its passes train.context_parallel"
MODES = {
    "ACCELERATE_USE_DEEPSPEED": ("--use_deepspeed", SHARED_OUT),
    "ACCELERATE_USE_MEGATRON_LM": ("--use_megatron_lm", SHARED_OUT),
    "ACCELERATE_USE_FSDP": ("--use_fsdp", SHARED_OUT),
    "ACCELERATE_USE_PARALLELISM_CONFIG": ("--use_parallelism_config", SHARED_OUT),
    "ACCELERATE_DYNAMO_BACKEND": ("--dynamo_backend", "swarmq compiles layers by itself where it helps"),
    "ACCELERATE_FP8_BACKEND": ("--fp8_backend", "train.mixed_precision sets the precision of layers"),
}
"""Environment variable of a mode -> its option, and swarmq's alternative."""
OFF = {"", "0", "false", "no"}


def refuse_modes(environment: Mapping[str, str], *, cuda: bool) -> None:
    """Raise LearnerError if accelerate would apply a mode that changes the computation. `cuda`: whether there is a GPU."""
    for axis, name in CUTS.items():
        if (ranks := int(environment.get(f"PARALLELISM_CONFIG_{axis}_SIZE") or 1)) > 1:
            raise SetUpError(
                f"accelerate's {name} parallelism is not supported: it needs plain causal attention over one row, but swarmq "
                f"computes packed rows and trees. Leave --parallelism-config-{axis.lower()}-size out, and set "
                f"train.context_parallel = {ranks} to divide passes among ranks, or train.sharding = 'full' to divide the model"
            )
    for variable, (option, instead) in MODES.items():
        if _is_on(environment.get(variable, "")):
            raise SetUpError(
                f"accelerate launch {option} ({variable}={environment[variable]}) is not supported, because it would change the "
                f"computation: remove it from the command and from accelerate's configuration file; {instead}"
            )
    if cuda and _is_on(environment.get("ACCELERATE_USE_CPU", "")):
        raise SetUpError(
            "accelerate launch --cpu (ACCELERATE_USE_CPU) cannot be used where there are GPUs, for which precision and memory "
            "are planned: leave it out, or hide the GPUs (CUDA_VISIBLE_DEVICES='')"
        )


def _is_on(value: str) -> bool:
    return value.lower() not in OFF
