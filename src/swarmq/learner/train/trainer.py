"""The trainer: one optimizer step from one batch record, on any number of ranks.

  episodes --build_rank_batch--> micro-batches --LayoutModel--> logprobs --loss--> backward ... clip, optimizer

Everything a step depends on is in the record and in the state of model and optimizer, so a replay repeats it. The gradient does
not depend on ranks, micro-batches, packing, folding or trees. If the gradient of a step is not finite, or filters remove all
tokens, the weights stay unchanged, but the version rises.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import structlog
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor

from swarmq.config import LOSSES_WITHOUT_RATIO, OPTIMIZERS_OF_WHOLE_PARAMETERS, Policy, Train
from swarmq.errors import MessageError, SetUpError
from swarmq.learner.batching.batch_split import merge_metrics, split_groups
from swarmq.learner.batching.micro_batches import (
    MicroBatch,
    ModelProfile,
    RankBatch,
    ValueTargets,
    build_rank_batch,
    exclude_episodes,
    reweight,
    set_estimates,
)
from swarmq.learner.batching.token_trace_builder import TraceBuilder
from swarmq.learner.checkpoint.discovery import Checkpoint, check_continues
from swarmq.learner.checkpoint.model_files import Adapters, HostCopies, ModelFiles
from swarmq.learner.checkpoint.save_load import restore
from swarmq.learner.distributed.accelerator import can_stay_gathered, make_accelerator
from swarmq.learner.distributed.rendezvous import COLLECTIVE_TIMEOUT
from swarmq.learner.distributed.send_from_rank0 import gather_on_rank0, send_model_files
from swarmq.learner.distributed.sharding import (
    accumulate_gradients,
    compute_dtype,
    gather_compute_weights,
    gather_tensors,
    is_sharded,
    keep_layers_gathered,
    prepare_model,
)
from swarmq.learner.memory.estimate import list_frozen_models
from swarmq.learner.memory.outline import load_config
from swarmq.learner.methods import registry
from swarmq.learner.methods.advantages.gae import Estimates, estimate
from swarmq.learner.methods.credit import TurnAdvantages, compute_advantages, group_by_slot
from swarmq.learner.methods.filters import apply_filters, list_filters
from swarmq.learner.methods.loss_weights import normalization_units
from swarmq.learner.methods.losses import LossInputs
from swarmq.learner.methods.optimizers import OptimizerFunction
from swarmq.learner.methods.policy_loss import policy_loss
from swarmq.learner.methods.schedules import ScheduleFunction
from swarmq.learner.model import lora, vision
from swarmq.learner.model.activation_checkpointing import ActivationCheckpointing
from swarmq.learner.model.context_parallel import ContextGroup
from swarmq.learner.model.hf_names import to_hf_names
from swarmq.learner.model.layout_attention import to_device
from swarmq.learner.model.layout_model import LayoutModel, PlacedLayout
from swarmq.learner.model.loading import get_vocab_size, load_lm
from swarmq.learner.store.records import BatchRecord
from swarmq.learner.store.routing_shape import RoutingShape
from swarmq.learner.store.token_trace import EpisodeTrace
from swarmq.learner.teachers.reference_models import ReferenceModels
from swarmq.learner.teachers.served_teacher import ServedTeacher, TeacherScores
from swarmq.learner.train import engine_agreement
from swarmq.learner.train.critic import Critic, value_loss
from swarmq.learner.train.gpu_errors import map_gpu_errors
from swarmq.learner.train.metrics import MetricSums
from swarmq.learner.train.throughput import count_head_flops, count_model_flops, measure_matrix_rate
from swarmq.messages import Rollout, check
from swarmq.timeline import resolve
from swarmq.weights.format.packing import NamedTensors, Weight, materialize

log = structlog.get_logger()

CPU_ROW_PASS = 2048
"""Number of tokens of packed rows that keep a CPU busy; the activations of more tokens do not fit its caches."""


class GradientTally(NamedTuple):
    """Sums that accompany an accumulated gradient, on this rank. Tensors count the tokens of each episode."""

    sums: MetricSums
    trained: Tensor
    """[num_episodes] float32: tokens with a weight that no filter removed."""
    nonfinite: Tensor
    """[num_episodes] float32: trained tokens whose loss is not finite."""
    traces: TraceBuilder | None

    @classmethod
    def start(cls, num_episodes: int, device: torch.device, *, traced: bool = False) -> GradientTally:
        trained, nonfinite = (torch.zeros(num_episodes, device=device) for _ in range(2))
        return cls(MetricSums(device), trained, nonfinite, TraceBuilder() if traced else None)


class Accumulated(NamedTuple):
    """Result of accumulating the gradient of one optimizer step."""

    fields: dict[str, Any]
    """Metrics, the same on every rank."""
    units_left: int
    """Number of tokens or episodes, depending on the normalisation, that no filter removed, over all ranks."""
    tally: GradientTally


class Trainer:
    """Model and optimizer of one policy. `version` counts the steps taken since the initial model."""

    def __init__(
        self,
        source: str,
        train: Train,
        *,
        version: int = 0,
        accelerator: Accelerator | None = None,
        initial: str | None = None,
        max_model_len: int | None = None,
        engine_gap_max: float = 0.0,
    ) -> None:
        """Load the weights in `source`.

        `initial`: the run's first model, if not `source`. `max_model_len`: context length of the engine, as for LayoutModel.
        `engine_gap_max`: largest accepted mean difference in nats between engine and learner, beyond which no step is taken; 0:
        no limit. Raises LearnerError if a model cannot be loaded or does not fit.
        """
        set_seed(train.seed)
        _repeat(train.deterministic)
        self.accelerator = accelerator or make_accelerator(train, source)
        send_model_files(initial or source)
        self._held = can_stay_gathered(self.accelerator, train, source)
        """Whether the layers of a sharded policy stay gathered between micro-batches."""
        if self._held:
            keep_layers_gathered(self.accelerator)
        self.train, self.version, self._engine_gap_max = train, version, engine_gap_max
        self.context = ContextGroup.of(self.accelerator, train.context_parallel, COLLECTIVE_TIMEOUT)
        dtype = compute_dtype(self.accelerator)
        lm = _policy_lm(source, initial or source, train, dtype, empty=not self.accelerator.is_main_process)
        self._blank: vision.PlacedImages | None = None
        """What the vision tower computes in a pass that shows no image, if several ranks compute it together."""
        if vision.takes_images(lm.config):
            _check_vision(source, train)
            if self.accelerator.num_processes > 1:
                self._blank = vision.PlacedImages.blank(lm.config, self.accelerator.device)
        policy = LayoutModel(
            lm,
            device=self.accelerator.device,
            dtype=dtype,
            pass_tokens=train.micro_batch_tokens,
            ranks=self.context.ranks,
            max_model_len=max_model_len,
            replays_routing=True,
        )
        self.routing = RoutingShape.of(lm.config) if train.routing_replay else None
        """Size of the routed experts that turns must have; None if they need none."""
        if train.layout == "tree" and policy.rows_only:
            raise SetUpError(f"train.layout: {source} cannot compute trees ({policy.rows_only}); set it to 'auto'")
        if train.uses_fp8:
            from swarmq.learner.model.float8 import convert_layers  # noqa: PLC0415 - defines an operator of torch

            convert_layers(lm, self.accelerator.device)
        policy._no_split_modules = policy.model._no_split_modules  # noqa: SLF001 - accelerate reads it to shard
        make_optimizer: OptimizerFunction = registry.find_method("optimizer", train.optimizer)
        self.model, self.optimizer = prepare_model(policy, self.accelerator, lambda named: make_optimizer(named, train))
        for group in self.optimizer.param_groups:
            group["method"] = train.optimizer  # checkpoints keep it
        if (what := OPTIMIZERS_OF_WHOLE_PARAMETERS.get(train.optimizer)) and is_sharded(self.model):
            raise SetUpError(
                f"train.optimizer: {train.optimizer!r} {what} whole parameters, but the ranks shard the model: set it to 'adamw', or "
                "train.sharding to 'none' if a GPU holds the model"
            )
        if is_sharded(self.model):
            ActivationCheckpointing.announce_sharding(policy, held=self._held)
        if not train.lora:  # layers with adapters are not compiled
            policy.compile_layers()
        self.num_parameters = sum(p.numel() for p in policy.parameters())
        self._initial = initial or source
        self.frozen = ReferenceModels(self._initial, self.accelerator, policy, train.lora)
        judges = self.frozen.of(train)
        if self.context.ranks > 1:
            _check_cut({source: policy.rows_only, **{f"the {role}": judge.rows_only for role, judge in judges.items()}})
        limits = [policy.rows_only, *(judge.rows_only for judge in judges.values())]
        self.traits = ModelProfile(
            cost=policy.cost,
            rows_only=next(filter(None, limits), None),
            row_pass=CPU_ROW_PASS if self.accelerator.device.type == "cpu" else None,
        )
        self.critic: Critic | None = None
        """The critic, while steps need it."""
        if train.needs_critic:
            self.make_critic(train)
        self._head_flops = count_head_flops(policy.model.get_output_embeddings().weight)
        self.token_traces: list[EpisodeTrace] = []
        """Token traces of the newest step, if `train.token_log`; all of them on rank 0, none on other ranks."""
        self._whole: dict[str, Weight] = {}
        """On rank 0 of a sharded policy: weights for engines, gathered after the newest step."""
        self.gather()

    def critic_state(self) -> dict[str, Any] | None:
        """Return what checkpoints keep of the critic, with tensors on rank 0 alone; None without critic. Every rank calls it."""
        return self.critic.state() if self.critic else None

    def load_critic(self, saved: Mapping[str, Any]) -> None:
        """Load the critic of a checkpoint, also if only batches that are in the log need it. Raises LearnerError if `train` names
        another one."""
        own = (
            self.train.critic
            if self.train.needs_critic
            else msgspec.convert(saved["settings"], type(self.train.critic))
        )
        self.make_critic(msgspec.structs.replace(self.train, critic=own)).load(saved)

    def make_critic(self, train: Train) -> Critic:
        """Return the critic; a new one if there is none. Raises LearnerError if its model cannot be loaded."""
        if self.critic is None:
            policy: LayoutModel = self.accelerator.unwrap_model(self.model)
            self.critic = Critic(
                self._initial,
                train,
                self.accelerator,
                vocab=self.vocab_size,
                ranks=policy.ranks,
                max_model_len=policy.max_model_len,
            )
            if self.context.ranks > 1:
                _check_cut({"the critic": self.critic.rows_only})
            self.traits = msgspec.structs.replace(self.traits, rows_only=self.traits.rows_only or self.critic.rows_only)
        return self.critic

    @property
    def lm(self) -> Any:
        """The transformers model inside all wrappers."""
        return self.accelerator.unwrap_model(self.model).model

    @property
    def vocab_size(self) -> int:
        return get_vocab_size(self.lm)

    @property
    def share(self) -> tuple[int, int]:
        """(index, number) of this rank's share of a batch. Ranks that compute one micro-batch together have the same share."""
        ranks = self.context.ranks
        return self.accelerator.process_index // ranks, self.accelerator.num_processes // ranks

    @property
    def max_length(self) -> int:
        """Maximum length of a model call that can be trained, in tokens."""
        made_for = getattr(self.lm.config.get_text_config(), "max_position_embeddings", None)
        return min(self.train.micro_batch_tokens, made_for or self.train.micro_batch_tokens)

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight by its Hugging Face name; a tied weight under each of its names, as engines expect.

        Weights have the compute dtype; weights with an adapter have the adapter's dtype. Only rank 0 has the weights of a sharded
        policy.
        """
        return ((name, materialize(weight)) for name, weight in self._weights())

    def weights_to_push(self) -> Iterator[tuple[str, Weight]]:
        """Yield the weights for engines, named as in the model's folder. Split and merged weights are computed when they are
        packed."""
        return to_hf_names(self.lm, self._weights())

    def _weights(self) -> NamedTensors:
        return self._whole.items() if self._whole else self._as_named(self.lm.state_dict())

    def save_weights(self, folder: Path) -> None:
        """Write the files that `from_pretrained` loads, and the adapters if there are any. Every rank calls it, rank 0 writes."""
        if (files := self.files()) is not None:
            files.write(folder)

    def files(self, copies: HostCopies | None = None) -> ModelFiles | None:
        """Return the files of the model on rank 0, None on other ranks. Every rank calls it. With `copies`, training may go on
        before the files are written."""
        sharded, is_main = is_sharded(self.model), self.accelerator.is_main_process
        named: Mapping[str, Weight] = self._parameters()
        adapters = lora.get_adapters(self.lm)
        if sharded:
            named, adapters = gather_tensors(named, keep=is_main), gather_tensors(adapters, keep=is_main)
        if not is_main:
            return None
        own = copies.of if copies and not sharded else lambda _, tensor: tensor.cpu().contiguous()
        return ModelFiles(
            # weights are copied one by one, because a GPU has no room for a second copy of the model
            weights={name: own(name, materialize(tensor).detach()) for name, tensor in self._to_write(named)},
            configs=(self.lm.config, *([self.lm.generation_config] if self.lm.can_generate() else [])),
            adapters=Adapters({name: own(name, each) for name, each in adapters.items()}, self.train.lora)
            if self.train.lora
            else None,
        )

    def weights_to_write(self) -> NamedTensors:
        """Return the weights that `files` writes, on a rank that holds the whole policy."""
        return self._to_write(self._parameters())

    def _parameters(self) -> dict[str, Weight]:
        """Return the trained weights by the model's own names; if the policy is sharded, this rank's shards of them."""
        return dict(self._as_named(self.lm.state_dict(keep_vars=True)))

    def _to_write(self, named: Mapping[str, Weight]) -> NamedTensors:
        """Return the weights by their names in the folder, without a tied head, which the folder omits."""
        configs = (self.lm.config, self.lm.config.get_text_config())  # a model with images says it in the former
        tied = any(getattr(each, "tie_word_embeddings", False) for each in configs)
        left_out = set(self.lm._tied_weights_keys or ()) if tied else set()  # noqa: SLF001 - it has no public name
        return to_hf_names(self.lm, ((name, tensor) for name, tensor in named.items() if name not in left_out))

    def gather(self) -> None:
        """Gather the weights of a sharded policy on rank 0, for `named_tensors`. Every rank calls it."""
        if is_sharded(self.model):
            keep = self.accelerator.is_main_process
            self._whole = gather_compute_weights(
                self.model, self.lm, keep=keep, into=self._whole, as_named=self._as_named
            )

    def _as_named(self, weights: Mapping[str, Tensor]) -> NamedTensors:
        """Return `weights` under the model's own names, without those of PEFT, and with the adapters' contribution."""
        return lora.defer_adapted_weights(self.lm, weights) if self.train.lora else weights.items()

    def step(self, record: BatchRecord) -> dict[str, Any]:
        """Train the batch and set `version` to the record's. Returns the metrics of the step, the same on every rank.

        Raises LearnerError if a GPU fails or is too small, or if the engine samples from another model; the files on disk are
        then unchanged.
        """
        assert record.index.version == self.version + 1, f"batch {record.index.version} after {self.version}"
        registry.adopt(record.methods)
        set_seed(
            (self.train.seed + record.index.version) % 2**32
        )  # a step's random numbers depend on nothing before it
        with map_gpu_errors(f"step {record.index.version}"):
            return self._step(record)

    def _step(self, record: BatchRecord) -> dict[str, Any]:
        began = time.perf_counter()
        train, (rank, world) = self.settings(record), self.share
        sound = [episode for episode in record.episodes if _is_sound(episode)]
        nothing: TurnAdvantages = {episode.episode_id: [None] * len(episode.turns) for episode in record.episodes}
        credit = {**nothing, **compute_advantages(group_by_slot(sound), train, record.baselines)}
        critic = self.critic = self.make_critic(train) if train.needs_critic else None
        parts = split_groups(record.episodes, train.steps_per_batch)
        works = [build_rank_batch(part, train, self.traits, rank=rank, world=world, credit=credit) for part in parts]
        supervised = [self.build_supervised(record.demonstrations[at :: len(parts)], train) for at in range(len(parts))]
        proximal = [None, *(self.score(work) for work in works[1:])]
        found = self.estimate(parts, works, train, among={episode.episode_id for episode in sound}) if critic else None
        if found:
            works = [set_estimates(work, part) for work, part in zip(works, found.split(parts), strict=True)]
        fields, self.token_traces = [], []
        for part, work, before, shown in zip(parts, works, proximal, supervised, strict=True):
            teacher = self.ask_teacher(part, work, train)
            metrics, traces = self._optimize(
                work, train, step=record.index.version, teacher=teacher, proximal=before, supervised=shown
            )
            fields.append(metrics)
            self.token_traces += traces.build(part) if traces else []
        if critic:
            critic.batches += 1
        self.token_traces = gather_on_rank0(self.token_traces)
        self.gather()
        self.version = record.index.version
        merged = merge_metrics(fields)
        merged["episodes_left_out"] += len(record.episodes) - len(sound)
        if found and (explained := found.explained_variance()) is not None:
            merged["explained_variance"] = explained
        return merged | self._measure_speed(merged, time.perf_counter() - began)

    def build_supervised(self, demonstrations: Sequence[Rollout], train: Train) -> RankBatch | None:
        """Return this rank's part of an optimizer step's demonstrations; None if there are none."""
        if not demonstrations or train.sft is None:
            return None
        (rank, world), plain = self.share, msgspec.structs.replace(train, normalisation="token", routing_replay=False)
        credit = {each.episode_id: [0.0] * len(each.turns) for each in demonstrations}
        return build_rank_batch(demonstrations, plain, self.traits, rank=rank, world=world, credit=credit)

    def settings(self, record: BatchRecord) -> Train:
        """Return the record's settings, but with this learner's layout, micro-batch size and teacher address, which do not
        change the result: a GPU may have been too small for the earlier settings, and a served teacher may have moved."""
        assert record.settings is not None
        teacher = self.train.teacher_url if record.settings.teacher_url else None
        most = self.train.micro_batch_tokens
        if most < record.settings.micro_batch_tokens:
            trained = (*record.episodes, *record.demonstrations)
            most = max(most, *(len(turn) for episode in trained for turn in resolve(episode.turns)))
        return msgspec.structs.replace(
            record.settings,
            micro_batch_tokens=most,
            layout=self.train.layout,
            teacher=teacher or record.settings.teacher,
        )

    def _measure_speed(self, fields: Mapping[str, Any], train_s: float) -> dict[str, float]:
        rate = measure_matrix_rate(self.accelerator.device, compute_dtype(self.accelerator))
        available = rate * train_s * self.accelerator.num_processes
        return {
            "train_s": train_s,
            "tokens_per_s": fields["tokens_computed"] / train_s,
            "mfu": fields["flops"] / available,
        }

    def score(self, work: RankBatch) -> list[Tensor]:
        """Return the log-probabilities [S] of each micro-batch under the present weights."""
        with torch.no_grad():
            return [self.model(self.place(one), self._to_device(one.temperatures)).logprobs for one in work.passes]

    def estimate(
        self, parts: Sequence[Sequence[Rollout]], works: Sequence[RankBatch], train: Train, *, among: Collection[str]
    ) -> Estimates:
        """Return the estimates of the advantage `gae` for the episodes `among`, by the critic's present values, on every rank.
        `works`: built from `parts`."""
        critic, every = self.make_critic(train), []
        for part, work in zip(parts, works, strict=True):
            count = sum(turn.num_sampled for episode in part for turn in episode.turns)
            values = torch.zeros(count, device=self.accelerator.device)
            for one in work.passes:
                scored = critic.score(self.place(one))
                if not one.idle:
                    values[self._to_device(one.places)] = scored
            every.append(self._sum(values))
        episodes = [episode for part in parts for episode in part]
        return estimate(episodes, torch.cat(every).double().cpu().numpy(), train, among=among)

    def place(self, one: MicroBatch) -> PlacedLayout:
        """Return this rank's inputs for a micro-batch on its device."""
        return PlacedLayout.of(one.layout, self.accelerator.device, context=self.context, blank=self._blank)

    def _optimize(
        self,
        work: RankBatch,
        train: Train,
        *,
        step: int,
        teacher: TeacherScores | None,
        proximal: Sequence[Tensor] | None,
        supervised: RankBatch | None,
    ) -> tuple[dict[str, Any], TraceBuilder | None]:
        """Take one optimizer step on this rank's part, and return its metrics and token traces. If the gradient is not finite,
        recomputes it without the episodes that cause this."""
        fields, units_left, tally = self.accumulate(
            work, train, teacher=teacher, proximal=proximal, supervised=supervised
        )
        engine_agreement.check_agreement(fields, self._engine_gap_max, type(self.lm).__name__)
        norm, spoilt = self._clip(train), list[int]()
        if not np.isfinite(norm) and (spoilt := self._sum(tally.nonfinite).nonzero().flatten().tolist()):
            self._zero_grad()
            fields, units_left, tally = self.accumulate(
                exclude_episodes(work, spoilt), train, teacher=teacher, proximal=proximal, supervised=supervised
            )
            norm = self._clip(train)
        anything = units_left > 0 or supervised is not None
        fields = fields | {"episodes_left_out": len(spoilt)} | self._update(norm, train, step, anything=anything)
        return fields, tally.traces

    def ask_teacher(self, episodes: Sequence[Rollout], work: RankBatch, train: Train) -> TeacherScores | None:
        """Return the scores of a served teacher for `work`, which was built from `episodes`; None if no teacher is served.

        Raises LearnerError if the teacher does not answer.
        """
        url = train.teacher_url
        return (
            self.context.run_on_first(
                lambda: ServedTeacher(
                    url, self._initial, top_k=train.loss.top_k, tokenizer=train.teacher_tokenizer
                ).scores(episodes, work)
            )
            if url
            else None
        )

    def accumulate(
        self,
        work: RankBatch,
        train: Train,
        *,
        teacher: TeacherScores | None = None,
        proximal: Sequence[Tensor] | None = None,
        supervised: RankBatch | None = None,
    ) -> Accumulated:
        """Accumulate the gradient of the objective in the parameters.

        `teacher`: a served teacher's scores. `proximal`: log-probabilities [S] of each micro-batch before the batch's first
        optimizer step; None in that step. `supervised`: this rank's demonstrations.
        """
        work, total = self._reweight_after_filters(work, train), work.totals.of(train.normalisation)
        traced = train.token_log and self.context.is_first
        tally = GradientTally.start(work.num_episodes, self.accelerator.device, traced=traced)
        for index, one in enumerate(work.passes):
            last = index == len(work.passes) - 1
            with accumulate_gradients(self.model, self.accelerator, last=last, held=self._held):
                before = proximal[index] if proximal else None
                self._backward(one, train, total, tally, teacher=teacher, proximal=before)
            if self.critic and one.value_targets:
                with self.critic.accumulating(last=last):
                    self._backward_critic(self.critic, one, one.value_targets, train, tally.sums)
        fields = tally.sums.reduce(self._sum) | {
            "layout": work.plan.way,
            "layout_reason": work.plan.reason,
            "passes": len(work.plan.layouts),
            "tokens_computed": work.plan.tokens,
            "flops": count_model_flops(work.plan.layouts, self.traits.cost, self._head_flops),
        }
        if normalization_units(train.normalisation) == "tokens":
            left = fields["tokens_trained"]
        else:
            left = int((self._sum(tally.trained) > 0).sum())
        if 0 < left != total:
            fields["loss"] *= total / left
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(total / left)
        if supervised and train.sft:
            fields["sft_loss"] = self._accumulate_cross_entropy(supervised, train.sft.weight)
            fields["tokens_computed"] += supervised.plan.tokens
            fields["flops"] += count_model_flops(supervised.plan.layouts, self.traits.cost, self._head_flops)
        if self._blank:
            self._drop_blank_gradients(work, supervised)
        return Accumulated(fields, left, tally)

    def _drop_blank_gradients(self, work: RankBatch, supervised: RankBatch | None) -> None:
        """Leave the vision towers without gradient if no rank computed an image, as they are on one rank."""
        shown = any(layout.shows_images for layout in work.plan.layouts)
        if not shown and not (supervised and any(layout.shows_images for layout in supervised.plan.layouts)):
            vision.drop_gradient(self.lm)
        if self.critic and not shown:
            vision.drop_gradient(self.accelerator.unwrap_model(self.critic.model).decoder.model)

    def _accumulate_cross_entropy(self, work: RankBatch, weight: float) -> float:
        """Add the gradient of `weight` times the demonstrations' mean cross-entropy per trained token, over all ranks, to the parameters.
        Returns this mean."""
        mean = torch.zeros((), dtype=torch.float64, device=self.accelerator.device)
        for index, one in enumerate(work.passes):
            last = index == len(work.passes) - 1
            with accumulate_gradients(self.model, self.accelerator, last=last, held=self._held):
                logprobs = self.model(self.place(one), self._to_device(one.temperatures)).logprobs
                part = torch.where(self._to_device(one.weights) > 0, -logprobs, 0).sum() / max(work.totals.tokens, 1)
                self.accelerator.backward(weight * part * self.accelerator.num_processes)
            mean += part.detach()
        return float(self._sum(mean))

    def _reweight_after_filters(self, work: RankBatch, train: Train) -> RankBatch:
        """Return the batch with weights recomputed from the tokens that filters leave of each episode, if the normalisation
        needs it.

        Filters depend on the present weights, and an episode may be spread over several micro-batches and ranks whose gradients
        cannot be separated later, so this takes an additional forward pass.
        """
        if train.normalisation != "episode" or not list_filters(train):
            return work
        left = torch.zeros(work.num_episodes, device=self.accelerator.device)
        for one, logprobs in zip(work.passes, self.score(work), strict=True):
            behavior_logprobs, credit, calls, weights = (
                self._to_device(x) for x in (one.layout.logprobs, one.advantages, one.calls, one.weights)
            )
            held = self._to_device(one.held)
            tokens = LossInputs(logprobs, behavior_logprobs, credit, calls, one.num_calls, held=held)
            filtered = apply_filters(tokens, train, weights > 0)
            if filtered and not one.idle:
                left.index_add_(0, self._to_device(one.layout.episodes), filtered.tokens.float())
        return reweight(work, train, self._sum(left).int().tolist())

    def _backward(
        self,
        one: MicroBatch,
        train: Train,
        total: int,
        tally: GradientTally,
        *,
        teacher: TeacherScores | None = None,
        proximal: Tensor | None = None,
    ) -> None:
        """Add the gradient of a micro-batch to the parameters and its sums to `tally`. Never waits for a GPU."""
        sums = tally.sums
        temperatures, behavior_logprobs, credit, calls, weights = (
            self._to_device(x) for x in (one.temperatures, one.layout.logprobs, one.advantages, one.calls, one.weights)
        )
        layout = self.place(one)
        judged = {
            role: model.score(layout, temperatures, top_k=train.loss.top_k if role == "teacher" else 0)
            for role, model in self.frozen.of(train).items()
        }
        top = judged["teacher"].top if "teacher" in judged else None
        if teacher and train.loss.top_k:
            top = teacher.top_of(one, self.accelerator.device).within(self.vocab_size)
        scored = self.model(layout, temperatures, candidates=top.ids if top else None)
        tokens = LossInputs(
            scored.logprobs,
            behavior_logprobs,
            credit,
            calls,
            one.num_calls,
            proximal=proximal,
            entropies=scored.entropies.detach(),
            candidates=scored.candidates,
            teacher_candidates=top.logprobs if top else None,
            held=self._to_device(one.held),
            **{role: each.logprobs for role, each in judged.items()},
        )
        if teacher:
            device = self.accelerator.device
            tokens = tokens._replace(teacher=teacher.of(one, device), spans=teacher.spans_of(one, device))
        result = policy_loss(tokens, train.loss)
        kept = weights > 0
        sums.add_mismatch(tokens, kept)
        if train.loss.name not in LOSSES_WITHOUT_RATIO:
            same = one.plain & (one.layout.versions == self.version)
            sums.add_same(
                tokens.logprobs if tokens.proximal is None else tokens.proximal,
                behavior_logprobs,
                self._to_device(same),
            )
        left_out = torch.zeros_like(kept)
        if (filtered := apply_filters(tokens, train, kept)) is not None:
            left_out = kept & ~filtered.tokens
            kept, weights = filtered.tokens, weights * filtered.tokens
            sums.add_filtered(result, left_out)
            sums.add(calls_left_out=filtered.calls_out, tokens_left_out=filtered.tokens_out)
        objective = torch.where(weights > 0, result.per_token * weights, 0).sum() / total
        self.accelerator.backward(objective * self.accelerator.num_processes)
        sums.add_tokens(tokens, scored.entropies, result, kept)
        if one.idle:
            return
        sums.add(loss=objective.detach())
        episodes = self._to_device(one.layout.episodes)
        tally.trained.index_add_(0, episodes, kept.float())
        tally.nonfinite.index_add_(0, episodes, (kept & ~result.per_token.detach().isfinite()).float())
        if tally.traces:
            tally.traces.add(one, tokens.logprobs, scored.entropies, result, left_out)

    def _backward_critic(
        self, critic: Critic, one: MicroBatch, targets: ValueTargets, train: Train, sums: MetricSums
    ) -> None:
        """Add the gradient of the micro-batch's value loss to the critic's parameters."""
        before, returns, known = (
            self._to_device(x) for x in (targets.values, targets.returns, targets.known & (one.weights > 0))
        )
        per_token = value_loss(critic.model(self.place(one)), before, returns, train.critic.value_clip)
        objective = torch.where(known, per_token, 0).sum() / max(targets.total, 1)
        sums.add(value_loss=objective.detach(), valued=known.sum())
        self.accelerator.backward(objective * self.accelerator.num_processes)

    def _to_device(self, values: np.ndarray) -> Tensor:
        return to_device(values, self.accelerator.device)

    def _clip(self, train: Train) -> float:
        """Clip the gradient and return its norm before clipping."""
        return float(self.accelerator.clip_grad_norm_(self.model.parameters(), train.grad_clip))

    def _update(self, norm: float, train: Train, step: int, *, anything: bool) -> dict[str, Any]:
        """Step the optimizers of policy and critic, unless no token is left (`anything` is false) or a gradient is not finite. While
        the critic is trained alone, the policy's learning rate is 0. Returns metrics.

        `step`: weight version after the batch, which sets the learning rate.
        """
        schedule: ScheduleFunction = registry.find_method("schedule", train.schedule)
        rate = train.learning_rate * min(1.0, step / max(train.warmup_steps, 1)) * schedule(step, train)
        critic, of_critic = self.critic, dict[str, float]()
        waits = critic is not None and critic.batches < train.critic.warmup_steps
        if critic:
            of_critic = {"value_grad_norm": critic.clip(train)}
        skipped = "nothing_left" if not anything else "" if np.isfinite(norm) else "gradient_not_finite"
        if not np.isfinite([*of_critic.values()]).all():
            skipped = "value_gradient_not_finite"
        if not skipped and not waits:
            for group in self.optimizer.param_groups:
                group.update(lr=rate, betas=train.betas, weight_decay=train.weight_decay)
            self.optimizer.step()
        if not skipped and critic:
            critic.step(train)
        self._zero_grad()
        return {
            "grad_norm": norm,
            "learning_rate": 0.0 if waits else rate,
            **of_critic,
            **({"skipped": skipped} if skipped else {}),
        }

    def _zero_grad(self) -> None:
        self.optimizer.zero_grad()
        if self.critic:
            self.critic.optimizer.zero_grad()

    def _sum(self, values: Tensor) -> Tensor:
        """Return the sum over all ranks. Ranks that compute one micro-batch together hold equal values, and only the first of
        them counts."""
        values = values if self.context.is_first else torch.zeros_like(values)
        return self.accelerator.reduce(values, "sum") if self.accelerator.num_processes > 1 else values


def _is_sound(episode: Rollout) -> bool:
    """Return whether all numbers of an episode are valid; only old batch logs contain episodes with invalid numbers."""
    try:
        check(episode)
    except MessageError as error:
        log.warning("episode_left_out", reason=str(error))
        return False
    return True


def _repeat(deterministic: bool) -> None:
    """Enable or disable torch's deterministic algorithms."""
    if deterministic:
        # required by torch for deterministic products on a GPU
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)


def _check_cut(reasons: Mapping[str, str | None]) -> None:
    """Raise LearnerError if ranks cannot share the micro-batches of one of the models.

    `reasons`: model -> reason why its micro-batches cannot be shared, or None.
    """
    for model, reason in reasons.items():
        if reason:
            raise SetUpError(
                f"train.context_parallel: ranks cannot share the passes of {model} ({reason}); set it to 1, and for long calls "
                "train.sharding = 'full'"
            )


def _check_vision(source: str, train: Train) -> None:
    """Raise LearnerError for settings with which a model that takes images cannot be trained."""
    if train.has_served_teacher:
        raise SetUpError(
            f"train.teacher: {source} takes images, and a served teacher would score answers without seeing them: set train.teacher to a "
            "model folder, which the learner then loads"
        )
    family = load_config(source).model_type
    for role, other in list_frozen_models(train, source).items():
        if other != source and (its := load_config(other).model_type) != family:
            raise SetUpError(
                f"train.{role}: {other} is of the type {its!r}, which does not take the images of {source} ({family!r}): use a model of the "
                "same type"
            )


def _policy_lm(source: str, initial: str, train: Train, dtype: torch.dtype, *, empty: bool) -> Any:
    """Return the model to train, `empty` on ranks that get its weights from rank 0. Adapters of a checkpoint are loaded into
    the initial model, because the checkpoint's weights already contain them; the base weights have the compute dtype, since
    they do not change."""
    resumes = source != initial
    if resumes and not empty:
        check_continues(Path(source), train.lora)
    load = partial(load_lm, gradient_checkpointing=train.gradient_checkpointing, empty=empty)
    if not train.lora:
        return load(source)
    lm = load(initial, dtype=dtype)
    lora.add_lora(lm, train.lora)
    if resumes and not empty:
        lora.load_adapter(lm, Path(source))
    if train.gradient_checkpointing:
        lm.enable_input_require_grads()
    return lm


def load_trainer(
    found: Checkpoint | None, settings: Policy, accelerator: Accelerator | None = None, *, engine_gap_max: float = 0.0
) -> Trainer:
    """Return a policy's trainer that continues from the checkpoint `found`, or from the initial model if None."""
    trainer = Trainer(
        str(found.path) if found else settings.model,
        settings.train,
        accelerator=accelerator,
        initial=settings.model,
        max_model_len=settings.engine.max_model_len,
        engine_gap_max=engine_gap_max,
    )
    if found:
        restore(trainer, found)
    return trainer
