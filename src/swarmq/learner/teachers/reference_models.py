"""Frozen models that score sampled tokens: the reference of a divergence, and the teacher of a distillation."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from accelerate import Accelerator
from torch import Tensor

from swarmq.config import Lora, Train
from swarmq.errors import SetUpError
from swarmq.learner.distributed.send_from_rank0 import send_model_files
from swarmq.learner.distributed.sharding import compute_dtype, is_sharded, prepare_frozen_model
from swarmq.learner.memory.estimate import list_frozen_models
from swarmq.learner.memory.outline import name_setting_in_errors
from swarmq.learner.model.layout_model import LayoutModel, PlacedLayout, evaluation_mode
from swarmq.learner.model.loading import get_vocab_size, load_lm
from swarmq.learner.model.logprob_head import Scored
from swarmq.learner.model.lora import without_adapters
from swarmq.learner.teachers.tokenizer_checks import check_judge


class FrozenModel:
    """A frozen model, distributed over the ranks like the policy."""

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
        """Load the model. `role`: `reference` or `teacher`, for errors. `vocab`: number of tokens of the policy.
        `pass_tokens`, `ranks` and `max_model_len` as for LayoutModel.

        Raises LearnerError if the model cannot be loaded or has fewer tokens than the policy.
        """
        with name_setting_in_errors(f"train.{role}"):
            send_model_files(source)
            lm = load_lm(source, gradient_checkpointing=False, empty=not accelerator.is_main_process)
        if get_vocab_size(lm) < vocab:
            raise SetUpError(
                f"train.{role}: {source} has {get_vocab_size(lm)} tokens, the policy {vocab}: use a model of the policy's family"
            )
        lm = lm.requires_grad_(requires_grad=False)
        judge = LayoutModel(
            lm,
            device=accelerator.device,
            dtype=compute_dtype(accelerator),
            pass_tokens=pass_tokens,
            ranks=ranks,
            max_model_len=max_model_len,
            replays_routing=role == "reference",  # so that equal weights have no divergence
        )
        self.rows_only = judge.rows_only
        judge._no_split_modules = lm._no_split_modules  # noqa: SLF001 - accelerate reads it to shard
        self._vocab = vocab
        self._model: Any = prepare_frozen_model(judge, accelerator)

    def score(self, placed: PlacedLayout, temperatures: Tensor, *, top_k: int = 0) -> Scored:
        """Return the scores of the layout's targets, with the `top_k` likeliest tokens among the policy's."""
        with torch.no_grad():
            scored: Scored = self._model(placed, temperatures, top_k=top_k)
        if is_sharded(self._model):
            self._model.reshard()  # without a backward pass, embeddings and head would stay gathered, and they are large
        return scored._replace(top=scored.top.within(self._vocab)) if scored.top else scored


class InitialModelUnderAdapters:
    """The initial model, computed by the policy's own model with its adapters switched off, so that it takes no additional
    memory."""

    def __init__(self, policy: LayoutModel) -> None:
        self.rows_only = policy.rows_only
        self._model = policy

    def score(self, placed: PlacedLayout, temperatures: Tensor, *, top_k: int = 0) -> Scored:
        """Return the scores of the layout's targets, as FrozenModel does. The policy is unchanged when this returns or raises."""
        with evaluation_mode(self._model), without_adapters(self._model.model):
            scored: Scored = self._model(placed, temperatures, top_k=top_k)
        return scored


class ReferenceModels:
    """The frozen models that losses need, each loaded at its first use. Raises LearnerError for a model with another vocabulary
    than the policy's."""

    def __init__(self, initial: str, accelerator: Accelerator, policy: LayoutModel, lora: Lora | None) -> None:
        """`policy`: this rank's model inside all wrappers; `lora`: settings of its adapters."""
        self._initial, self._accelerator, self._vocab = initial, accelerator, get_vocab_size(policy.model)
        self._lora, self._under, self._ranks = lora, InitialModelUnderAdapters(policy), policy.ranks
        self._max_model_len = policy.max_model_len
        self._loaded: dict[tuple[str, str], FrozenModel] = {}

    def of(self, train: Train) -> dict[str, FrozenModel | InitialModelUnderAdapters]:
        """Return the models by role. A served teacher is not among them (served_teacher.py)."""
        # the batch may have been logged under other adapter settings
        train = msgspec.structs.replace(train, lora=self._lora)
        wanted = list_frozen_models(train, self._initial)
        under = {"reference": self._under} if train.loss.needs_reference and "reference" not in wanted else {}
        return under | {
            role: self._load(role, source, train.micro_batch_tokens)
            for role, source in wanted.items()
            if role != "critic"
        }

    def _load(self, role: str, source: str, pass_tokens: int) -> FrozenModel:
        if (role, source) not in self._loaded:
            if source != self._initial and self._accelerator.is_main_process:
                check_judge(self._initial, source, role=role)
            self._loaded[role, source] = FrozenModel(
                source,
                self._accelerator,
                role=role,
                vocab=self._vocab,
                pass_tokens=pass_tokens,
                ranks=self._ranks,
                max_model_len=self._max_model_len,
            )
        return self._loaded[role, source]
