"""The critic of the advantage `gae`: a model of its own with adapters (LoRA) and a linear head, and its optimizer.

  batch ──critic──> values ──estimate──> advantages ──> policy, its loss
                                    └──> returns ─────> critic, value loss

Its base model is frozen, so a critic takes the memory of a reference model, and what checkpoints keep of it is small. Policy and
critic share no weights, so neither loss moves the other. The head begins at 0, where the advantages are those of rewards less
their mean. Ranks shard the critic if they shard the policy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation writes it

from swarmq.config import Train
from swarmq.errors import SetUpError
from swarmq.learner.distributed.send_from_rank0 import send_model_files, send_optimizer_state
from swarmq.learner.distributed.sharding import (
    accumulate_gradients,
    compute_dtype,
    gather_optimizer_state,
    gather_tensors,
    is_sharded,
    prepare_model,
)
from swarmq.learner.memory.outline import name_setting_in_errors
from swarmq.learner.model import lora
from swarmq.learner.model.activation_checkpointing import ActivationCheckpointing
from swarmq.learner.model.layout_model import LayoutModel, PlacedLayout
from swarmq.learner.model.loading import get_vocab_size, load_lm


class ValueModel(nn.Module):
    """A decoder with a linear head: V = w x + b for x, a hidden state scaled to a root mean square of 1."""

    def __init__(self, decoder: LayoutModel) -> None:
        super().__init__()
        self.decoder = decoder
        self.weight = nn.Parameter(torch.zeros(decoder.model.config.get_text_config().hidden_size))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, placed: PlacedLayout) -> Tensor:
        """Return the values [S] float32 of the contexts before the layout's S targets, including those of other ranks' targets."""
        hidden = self.decoder.hidden_states(placed)
        with torch.autocast(hidden.device.type, enabled=False):
            x = F.rms_norm(hidden.float(), hidden.shape[-1:])
            values = x @ self.weight.float() + self.bias.float()
        if placed.sampled is None:
            return values
        # a copy, because FSDP2 warns about views
        return placed.visibility.context.combine_scores(values, placed.sampled, placed.num_sampled).clone()


class Critic:
    """A critic with its optimizer, distributed over the ranks like the policy."""

    def __init__(
        self, initial: str, train: Train, accelerator: Accelerator, *, vocab: int, ranks: int, max_model_len: int | None
    ) -> None:
        """Load the model. `initial`: the policy's first model, the default. `vocab`: number of tokens of the policy. `ranks` and
        `max_model_len` as for LayoutModel.

        Raises LearnerError if the model cannot be loaded, has fewer tokens than the policy, or cannot be a critic.
        """
        source = train.critic.model or initial
        self.settings: dict[str, Any] = msgspec.to_builtins(train.critic)
        """Settings with which the critic was made; `model` and `lora` must stay."""
        self._accelerator = accelerator
        with name_setting_in_errors("train.critic"):
            send_model_files(source)
            lm = load_lm(
                source,
                gradient_checkpointing=train.gradient_checkpointing,
                empty=not accelerator.is_main_process,
                dtype=compute_dtype(accelerator),
            )
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(train.seed)  # the adapters are the same whenever the critic is made
                lora.add_lora(lm, train.critic.lora)
        if get_vocab_size(lm) < vocab:
            raise SetUpError(
                f"train.critic.model: {source} has {get_vocab_size(lm)} tokens, the policy {vocab}: use a model of the policy's family"
            )
        if train.gradient_checkpointing:
            lm.enable_input_require_grads()
        decoder = LayoutModel(
            lm,
            device=accelerator.device,
            dtype=compute_dtype(accelerator),
            pass_tokens=train.micro_batch_tokens,
            ranks=ranks,
            max_model_len=max_model_len,
        )
        self.rows_only = decoder.rows_only
        if not decoder.head_apart:
            raise SetUpError(
                f"train.critic.model: {source} does not return hidden states, which a critic needs; name another model"
            )
        values = ValueModel(decoder)
        values._no_split_modules = lm._no_split_modules  # noqa: SLF001 - accelerate reads it to shard
        self.model, self.optimizer = prepare_model(
            values,
            accelerator,
            lambda named: torch.optim.AdamW([parameter for _, parameter in named], weight_decay=0.0),
            further=True,
        )
        if is_sharded(self.model):
            ActivationCheckpointing.announce_sharding(values, held=False)
        self.batches = 0
        """Number of batches that the critic was trained with."""

    def score(self, placed: PlacedLayout) -> Tensor:
        """Return the values [S] of a micro-batch, without gradient."""
        with torch.no_grad():
            values: Tensor = self.model(placed)
        if is_sharded(self.model):
            self.model.reshard()  # without a backward pass, embeddings and head would stay gathered, and they are large
        return values

    def accumulating(self, *, last: bool) -> contextlib.AbstractContextManager[Any]:
        return accumulate_gradients(self.model, self._accelerator, last=last)

    def clip(self, train: Train) -> float:
        """Clip the gradient and return its norm before clipping."""
        return float(self._accelerator.clip_grad_norm_(self.model.parameters(), train.grad_clip))

    def step(self, train: Train) -> None:
        for group in self.optimizer.param_groups:
            group.update(lr=train.critic.learning_rate, betas=train.betas)
        self.optimizer.step()

    def _trained(self) -> dict[str, Tensor]:
        """Return the adapters and the head; if the critic is sharded, this rank's shards of them."""
        named = self._accelerator.unwrap_model(self.model).named_parameters()
        return {name: parameter for name, parameter in named if parameter.requires_grad}

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint. Every rank calls it; only rank 0 gets tensors."""
        keep = self._accelerator.is_main_process
        weights, sharded = self._trained(), is_sharded(self.model)
        return {
            "weights": gather_tensors(weights, keep=keep) if sharded else {n: w.detach() for n, w in weights.items()},
            "optimizer": gather_optimizer_state(self.optimizer, keep=keep) if sharded else self.optimizer.state_dict(),
            "batches": self.batches,
            "settings": self.settings,
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Load the state that `state` returned on rank 0. Every rank calls it. Raises SetUpError if it is that of another critic."""
        for name in ("model", "lora"):
            before, now = saved["settings"][name], self.settings[name]
            if before != now:
                raise SetUpError(
                    f"train.critic.{name} is {now!r}, but the checkpoint continues a critic with {before!r}: set it back, or begin another "
                    "run from the weights: policies.<name>.model = the checkpoint's folder"
                )
        for name, parameter in self._trained().items():
            whole = saved["weights"][name].to(self._accelerator.device)
            if isinstance(parameter, DTensor):
                whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=0)
            with torch.no_grad():
                parameter.copy_(whole.to(parameter.device))
        state = saved["optimizer"] if self._accelerator.is_main_process else None
        send_optimizer_state(self.optimizer, state, self._accelerator.device)
        self.batches = saved["batches"]


def value_loss(values: Tensor, before: Tensor, returns: Tensor, clip: float) -> Tensor:
    """Return the loss of each value, [S]: half the squared error of the value or of the value clipped to `before` +- `clip`,
    whichever is larger (1707.06347, as in its authors' code)."""
    clipped = before + (values - before).clamp(-clip, clip)
    return 0.5 * torch.maximum((values - returns).square(), (clipped - returns).square())
