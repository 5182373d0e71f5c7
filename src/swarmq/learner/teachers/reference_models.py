"""Models that judge sampled tokens and never change: the reference of a divergence, the teacher of a distillation."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from accelerate import Accelerator
from torch import Tensor

from swarmq.config import Lora, Train
from swarmq.errors import SetUpError
from swarmq.learner.distributed.sharding import compute_dtype, frozen, is_sharded, without_weights
from swarmq.learner.memory.estimate import judges
from swarmq.learner.memory.outline import name_setting_in_errors
from swarmq.learner.model.layout_model import LayoutModel, Placed, evaluating
from swarmq.learner.model.loading import load_lm, vocab_size
from swarmq.learner.model.lora import without_adapters
from swarmq.learner.teachers.tokenizer_checks import check_judge


class Frozen:
    """One frozen model, laid out over the ranks as the policy is."""

    def __init__(
        self,
        source: str,
        accelerator: Accelerator,
        *,
        role: str,
        vocab: int,
        pass_tokens: int = 0,
        ranks: int = 1,
        max_model_len: int | None = None,
    ) -> None:
        """`pass_tokens`, `ranks` and `max_model_len` as for LayoutModel. Raises LearnerError when it cannot be loaded or has fewer tokens than the policy."""
        with name_setting_in_errors(f"train.{role}"):
            lm = load_lm(source, gradient_checkpointing=False, empty=without_weights(accelerator))
        if vocab_size(lm) < vocab:
            raise SetUpError(
                f"train.{role}: {source} knows {vocab_size(lm)} tokens, the policy {vocab}: take a model of its family"
            )
        lm = lm.requires_grad_(requires_grad=False)
        judge = LayoutModel(
            lm,
            device=accelerator.device,
            dtype=compute_dtype(accelerator),
            pass_tokens=pass_tokens,
            ranks=ranks,
            max_model_len=max_model_len,
        )
        self.rows_only = judge.rows_only
        judge._no_split_modules = lm._no_split_modules  # noqa: SLF001 - what accelerate shards by
        self._model: Any = frozen(judge, accelerator)

    def logprobs(self, placed: Placed, temperatures: Tensor) -> Tensor:
        """[S] float32, natural log, of the layout's targets."""
        with torch.no_grad():
            scored: Tensor = self._model(placed, temperatures).logprobs
        if is_sharded(self._model):
            self._model.reshard()  # no backward pass does, and the ends of the model are large
        return scored


class UnderAdapters:
    """The initial model where adapters are trained: the policy with them off. It takes no memory of its own."""

    def __init__(self, policy: LayoutModel) -> None:
        self.rows_only = policy.rows_only
        self._model = policy

    def logprobs(self, placed: Placed, temperatures: Tensor) -> Tensor:
        """As Frozen's. The policy is as before when this returns or raises."""
        with evaluating(self._model), without_adapters(self._model.model):
            scored: Tensor = self._model(placed, temperatures).logprobs
        return scored


class FrozenModels:
    """Loads what the losses ask for, when they first ask. Raises LearnerError for what has other tokens than the policy."""

    def __init__(self, initial: str, accelerator: Accelerator, policy: LayoutModel, lora: Lora | None) -> None:
        """`policy` is what this rank computes with, inside of all wrappers; `lora`: the adapters that it has."""
        self._initial, self._accelerator, self._vocab = initial, accelerator, vocab_size(policy.model)
        self._lora, self._under, self._ranks = lora, UnderAdapters(policy), policy.ranks
        self._max_model_len = policy.max_model_len
        self._loaded: dict[tuple[str, str], Frozen] = {}

    def of(self, train: Train) -> dict[str, Frozen | UnderAdapters]:
        """By role; a teacher that an engine serves is not among them (served_teacher.py)."""
        train = msgspec.structs.replace(train, lora=self._lora)  # a batch may be of a start with others
        wanted = judges(train, self._initial)
        under = {"reference": self._under} if train.loss.kl and "reference" not in wanted else {}
        return under | {role: self._load(role, source, train.micro_batch_tokens) for role, source in wanted.items()}

    def _load(self, role: str, source: str, pass_tokens: int) -> Frozen:
        if (role, source) not in self._loaded:
            if source != self._initial:
                check_judge(self._initial, source, role=role)
            self._loaded[role, source] = Frozen(
                source,
                self._accelerator,
                role=role,
                vocab=self._vocab,
                pass_tokens=pass_tokens,
                ranks=self._ranks,
                max_model_len=self._max_model_len,
            )
        return self._loaded[role, source]
