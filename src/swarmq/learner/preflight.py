"""What a learner refuses for good and can be told before anything is started: `swarmq up` looks first, the learner again. No torch in
here."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata

from swarmq.config import SwarmJob, Train
from swarmq.errors import SetUpError
from swarmq.learner.checkpoint import discovery
from swarmq.learner.memory.estimate import judges
from swarmq.learner.store.records import Identity
from swarmq.learner.teachers.tokenizer_checks import check_judge

PACKAGES = {"tensorboard": ("tensorboard", "tensorboardX"), "mlflow": ("mlflow", "mlflow-skinny")}
"""Of trackers, where they are called otherwise than these: any of them will do."""


def check(job: SwarmJob, policy: str, *, ranks: int) -> None:
    """Raises LearnerError for what the policy's learner, of so many ranks, would refuse. Models that judge are compared by their
    tokenizers, for which alone transformers is loaded."""
    model, train = job.policies[policy].model, job.train_of(policy)
    check_settings(train, ranks)
    if found := discovery.newest(job.run_folder.checkpoints(policy), Identity.of(job, policy), hashed=False):
        discovery.check_goes_on(found.path, train.lora)
    for role, source in judges(train, model).items():
        if source != model:
            check_judge(model, source, role=role)


def check_settings(train: Train, ranks: int) -> None:
    """Raises LearnerError for what no model has to be there for."""
    check_trackers(train.trackers)
    check_groups(train, ranks)
    check_offload(train, ranks)


def check_trackers(names: Sequence[str]) -> None:
    """Raises LearnerError for trackers whose package is not installed: a folder of its name is none."""
    if missing := [name for name in names if not any(map(_is_installed, PACKAGES.get(name, (name,))))]:
        raise SetUpError(
            f"train.trackers: not installed: {', '.join(missing)}; pip install {' '.join(missing)}, or leave them out"
        )


def check_groups(train: Train, ranks: int) -> None:
    """Raises LearnerError when the ranks do not make whole groups of those that share passes."""
    if ranks % train.context_parallel:
        raise SetUpError(
            f"train.context_parallel: {train.context_parallel} ranks share each pass, and there are {ranks}: give the learner a multiple "
            "of that many (GPUs under `swarmq up`; --num-gpus or accelerate launch --num_processes where it is started by hand), or "
            "set it to a number that divides them"
        )


def check_offload(train: Train, ranks: int) -> None:
    """Raises LearnerError for one rank that is to offload."""
    if ranks == 1 and train.cpu_offload:
        raise SetUpError(
            "train.cpu_offload: one rank keeps the whole model where it computes, and nothing of it in host memory; give the learner "
            "two ranks or more (GPUs under `swarmq up`; --num-gpus or accelerate launch --num_processes where it is started by hand), "
            "or leave train.cpu_offload out"
        )


def _is_installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True
