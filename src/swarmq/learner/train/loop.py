"""The learner's main loop.

            ┌───────── batch feeder: queue ──> batch log ──> ack ─────────────────┐
            │ RequestBatch                                                        │ BatchReady
            │                                                                     v
  rank 0 ───┴─ wait ──> broadcast to all ranks ──> step ──> push weights ──> send StepDone ──> checkpoint? ──> wait
          SaveCheckpoint, TrainingDone                          │                  │
                                                             engines        StepReport, events

A checkpoint is copied between two steps, and written, verified, made durable and renamed while the next steps run; only then is
the batch log pruned. If the disk has no room for it, a warning is given and training goes on: the log still has every batch since
the previous checkpoint.

A slot is reported after its batch is trained and the weights are pushed. Whichever process dies at whatever point, the next start
loads the newest valid checkpoint, replays the batch log after it and continues with the queue; the resulting weights are the
same. A learner that was suspended while another took its place notices before it saves anything or touches an engine, and ends
(writer_lock.py). Only rank 0 talks to the batch feeder and to engines; the other ranks follow its commands.
"""

from __future__ import annotations

import contextlib
import math
import select
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import msgspec
import structlog
import torch.distributed

from swarmq.config import SwarmJob
from swarmq.errors import EngineError, LearnerError
from swarmq.learner.checkpoint import discovery, save_load
from swarmq.learner.checkpoint.model_files import HostCopies
from swarmq.learner.demonstrations import load_demonstrations
from swarmq.learner.distributed.accelerator import COMMAND_TIMEOUT, make_accelerator
from swarmq.learner.distributed.processes import is_main
from swarmq.learner.distributed.rendezvous import join_group
from swarmq.learner.feed.ipc import FeederLink, StopSignal
from swarmq.learner.methods import registry
from swarmq.learner.model.attention_check import broadcast_from_rank0
from swarmq.learner.store import records, token_trace
from swarmq.learner.store.durable_files import DiskFullError
from swarmq.learner.store.records import RunIdentity
from swarmq.learner.store.writer_lock import Fence
from swarmq.learner.teachers.availability import find_teacher_trouble
from swarmq.learner.teachers.tokenizer_checks import EngineTokenizers
from swarmq.learner.train import engine_agreement
from swarmq.learner.train.engine_updates import EngineUpdates, WeightPusherProtocol
from swarmq.learner.train.trackers import Trackers
from swarmq.learner.train.trainer import Trainer, load_trainer
from swarmq.messages import Evaluation
from swarmq.runtime.wording import count_of

log = structlog.get_logger()


class RankCommand(NamedTuple):
    """Command of rank 0 to all ranks."""

    name: str
    """`step`, `save` or `stop`."""
    body: bytes = b""
    """Encoded BatchRecord, for a step."""
    replayed: bool = False
    asked: int = 0
    """Sequence number of the `SaveCheckpoint` request, for a save; 0 for a regular checkpoint."""
    figures: dict[str, Any] = {}  # noqa: RUF012 - never changed


class _PendingCheckpoint(NamedTuple):
    """A checkpoint that was copied and is being written."""

    version: int
    oldest: Future[int]
    """Result once the checkpoint is complete: version of the oldest checkpoint kept."""
    asked: int
    """Sequence number of the `SaveCheckpoint` request; 0 for a regular checkpoint."""
    began: float
    """Start time on the monotonic clock."""
    drafted_s: float
    """Seconds that training waited for the copy."""


class LearnerIntervals(msgspec.Struct, frozen=True, kw_only=True):
    """Intervals of a learner."""

    ensure_s: float = 10.0
    """Seconds between two checks that engines serve the present weights, while the learner waits for a batch."""
    ensure_behind_s: float = 2.0
    """Seconds between two such checks while no engine is known to serve them, for instance while engines restart."""
    warn_s: float = 60.0
    """Seconds between two warnings that a batch waits for its teacher."""
    save_s: float = 10.0
    """Seconds between two attempts to write a requested checkpoint while the disk has no room for it."""


INTERVALS = LearnerIntervals()


class Learner:
    """Training of one policy, on this rank."""

    def __init__(
        self,
        job: SwarmJob,
        policy: str,
        *,
        pusher: WeightPusherProtocol | None,
        stop: StopSignal,
        tokenizers: EngineTokenizers | None = None,
        intervals: LearnerIntervals = INTERVALS,
    ) -> None:
        """Load the newest valid checkpoint or the initial model. Raises LearnerError if that fails."""
        self.job, self.policy, self.stop = job, policy, stop
        self._tokenizers, self._intervals = tokenizers, intervals
        self.settings = job.policies[policy]
        registry.look_in(job.methods_folder)
        self.identity = RunIdentity.of(job, policy)
        self.folder, self._tokens = job.run_folder.checkpoints(policy), job.run_folder.token_log(policy)
        self.fence = Fence(self.folder.parent / "lock" if is_main() else None)
        self.engines = EngineUpdates(
            pusher, policy=policy, take_turns=bool(self.settings.engine.sleep), fence=self.fence
        )
        self.trainer = self._load()
        self.saved = self.trainer.version
        """Version of the newest complete checkpoint, on rank 0."""
        self._no_room: int | None = None
        """Version of the checkpoint for which a full disk was reported; None if a checkpoint was written since then."""
        self._pending_checkpoint: _PendingCheckpoint | None = None
        self._background, self._copies = ThreadPoolExecutor(1, thread_name_prefix="checkpoint"), HostCopies()
        self._reserving: Future[None] | None = None
        """Allocation of memory for the copy of the first checkpoint, on rank 0; begun halfway to that checkpoint."""
        self._train = self.settings.train
        """Settings of the newest step, which may change while the run is up."""
        self._evaluations_logged = set[float]()
        self._trackers = Trackers(
            self.trainer.accelerator,
            self.settings.train,
            run=job.run,
            policy=policy,
            folder=job.run_folder.trackers(policy),
        )

    @property
    def is_main(self) -> bool:
        return bool(self.trainer.accelerator.is_main_process)

    def _load(self) -> Trainer:
        """Return the trainer. Engines that share the learner's GPUs sleep while it is loaded, as during a step."""
        join_group()
        train, folder = self.job.train_of(self.policy), self.job.methods_folder
        settings = msgspec.structs.replace(self.settings, train=train)
        self._own_methods = broadcast_from_rank0(registry.read_own(train, folder) if is_main() else ())
        registry.adopt(self._own_methods)
        self._demonstrations = load_demonstrations(settings.model, train) if is_main() else ()
        found = broadcast_from_rank0(discovery.find_newest(self.folder, self.identity) if is_main() else None)
        accelerator = make_accelerator(train, str(found.path) if found else settings.model)
        self._control = _control_group()
        self.engines.sleep()
        self._wait_for_ranks()
        try:
            limit = engine_agreement.agreement_limit(settings, cuda=accelerator.device.type == "cuda")
            trainer = load_trainer(found, settings, accelerator, engine_gap_max=limit)
        except LearnerError:
            self.engines.wake()  # they would sleep until the next start, which may be much later
            raise
        path = str(found.path) if found else None
        log.info("loaded", model=settings.model, version=trainer.version, checkpoint=path)
        self._give_room_back()
        return trainer

    def hello(self) -> records.Hello:
        return records.Hello(
            job=self.job,
            policy=self.policy,
            version=self.trainer.version,
            vocab_size=self.trainer.vocab_size,
            max_length=self.trainer.max_length,
            routing=self.trainer.routing,
            methods=self._own_methods,
            demonstrations=self._demonstrations,
        )

    def run(self, link: FeederLink | None) -> None:
        """Train until stopped, or until the batch feeder reports the last step. `link`: rank 0's link to the batch feeder; None
        on other ranks."""
        try:
            self._run(link)
        finally:  # stop writers before the lock is released
            self._background.shutdown(cancel_futures=True)

    def _run(self, link: FeederLink | None) -> None:
        if link:
            self.engines.repair(self.trainer)
            if trouble := self._teacher_trouble():
                self._warn(link, f"its teacher {trouble}: start it; batches wait for it")
        while True:
            began = time.monotonic()
            command = self._broadcast(self._next(link) if link else None)
            if command.name == "stop":
                break
            if command.name == "save":
                self._save(link, asked=command.asked)
                continue
            self._step(link, command, wait_s=time.monotonic() - began, began=began)
            if traces := self.trainer.token_traces:
                token_trace.write_trace(self._tokens, self.trainer.version, traces)
            self._save_if_due(link)
        self._save_last(link)
        self._trackers.close()
        if link:
            if not self.stop.asked:  # if a finished run is started again, engines get its last weights
                self._while_waiting(link, again=False)
            log.info("ended", version=self.trainer.version, reason="asked to" if self.stop.asked else "train.max_steps")
            link.finish()

    def _next(self, link: FeederLink) -> RankCommand:
        self._report_finished_checkpoint(link)
        if self.stop.asked:
            return RankCommand("stop")
        link.send(records.PhaseChange(phase="waiting"))
        match link.next(
            idle=partial(self._while_waiting, link),
            idle_s=self._idle_s,
            evaluated=partial(self._log_evaluation, link),
        ):
            case records.BatchReady(record=record, replayed=replayed, figures=figures):
                self._check_tokenizers(link)
                if not self._teacher_answers(link):
                    return RankCommand("stop")  # the batch is in the log
                self.engines.sleep()
                return RankCommand("step", record, replayed, figures=figures)
            case records.SaveCheckpoint(asked=asked):
                return RankCommand("save", asked=asked)
            case None:
                return RankCommand("stop")

    def _step(self, link: FeederLink | None, command: RankCommand, *, wait_s: float, began: float) -> None:
        if link:
            link.send(records.PhaseChange(phase="training"))
        record = records.decode_record(command.body)
        self._train = record.settings or self._train
        fields = self.trainer.step(record)
        self._give_room_back()
        if link is None:
            return
        if fields["episodes_left_out"]:
            what = f"{count_of(fields['episodes_left_out'], 'episode')} of the batch left out for non-finite losses or invalid numbers"
            link.send(records.Warn(text=f"learner {self.policy}, step {self.trainer.version}: {what}"))
        fields |= {"wait_s": wait_s, **self.engines.push(self.trainer, link, replayed=command.replayed)}
        fields |= {"step_s": time.monotonic() - began, "replayed": command.replayed}
        fields["folding"] = command.figures.get("tokens_unfolded", 0) / max(fields["tokens_computed"], 1)
        link.send(records.StepDone(version=self.trainer.version, fields=fields))
        self._trackers.log(self.trainer.version, command.figures | fields)
        self._trackers.log_samples(self.trainer.version, record.episodes)
        log.info(
            "step",
            version=self.trainer.version,
            layout=fields["layout"],
            layout_reason=fields["layout_reason"],
            **{
                key: round(fields[key], 6)
                for key in ("loss", "kl_k3", "grad_norm", "entropy", "wait_s", "train_s", "push_s")
            },
        )

    def _log_evaluation(self, link: FeederLink, evaluation: Evaluation) -> None:
        """Log the results of an evaluation round and report that they were logged. Results that were already logged are
        skipped; a batch feeder that died before it recorded the report sends them again."""
        if evaluation.began_at not in self._evaluations_logged:
            self._trackers.log_evaluation(evaluation.version, evaluation.results, now=self.trainer.version)
            self._evaluations_logged.add(evaluation.began_at)
        link.send(records.EvaluationLogged(began_at=evaluation.began_at))

    def _wait_for_ranks(self) -> None:
        """Wait until every rank has reached this call."""
        if self._control is not None:
            torch.distributed.barrier(group=self._control)

    def _give_room_back(self) -> None:
        """Wake sleeping engines once no rank needs their GPU memory."""
        if not self.settings.engine.sleep:
            return
        torch.cuda.empty_cache()
        self._wait_for_ranks()
        self.engines.wake()

    def _idle_s(self) -> float:
        return self._intervals.ensure_behind_s if self.engines.behind else self._intervals.ensure_s

    def _while_waiting(self, link: FeederLink, *, again: bool) -> None:
        self._report_finished_checkpoint(link)
        self._check_tokenizers(link)
        self.engines.ensure(self.trainer, link, again=again)

    def _check_tokenizers(self, link: FeederLink) -> None:
        """Check the engines' tokenizers and models before anything is trained or pushed. Raises LearnerError if one differs."""
        if self._tokenizers is None:
            return
        try:
            self._tokenizers.check()
        except EngineError as error:
            log.warning("tokenizers_not_compared", reason=str(error))
        while self._tokenizers.warnings:
            link.send(records.Warn(text=f"learner {self.policy}: {self._tokenizers.warnings.pop(0)}"))

    def _teacher_trouble(self) -> str:
        """Return a text with the URL of the served teacher and why it does not answer, or "" if it answers or no teacher is
        served."""
        url = self.settings.train.teacher_url
        return f"at {url} {trouble}" if url and (trouble := find_teacher_trouble(url)) else ""

    def _teacher_answers(self, link: FeederLink) -> bool:
        """Wait until the teacher answers, warning repeatedly and keeping engines updated. Returns False if the learner is
        stopped first."""
        warned_at = -math.inf
        while trouble := self._teacher_trouble():
            if self.stop.asked:
                return False
            if (now := time.monotonic()) - warned_at >= self._intervals.warn_s:
                warned_at = now
                self._warn(link, f"a batch waits for its teacher {trouble}: start it; nothing is lost")
            self._while_waiting(link, again=True)
            select.select([self.stop.wakeup], [], [], self._intervals.ensure_s)
        return True

    def _warn(self, link: FeederLink, what: str) -> None:
        log.warning("teacher_away", reason=what)
        link.send(records.Warn(text=f"learner {self.policy}: {what}"))

    def _save_if_due(self, link: FeederLink | None) -> None:
        since, interval = self.trainer.version % self._train.checkpoint_every, self._train.checkpoint_every
        if link and self._reserving is None and since >= interval // 2:
            self._reserving = self._background.submit(save_load.reserve_copies(self.trainer, self._copies))
        if since == 0:
            self._save(link)

    def _save(self, link: FeederLink | None, *, asked: int = 0) -> None:
        """Copy the state of a checkpoint, which is written while training goes on."""
        if link:
            self._report_finished_checkpoint(link, wait=True)
        with self._tolerate_full_disk(link, self.trainer.version, asked=asked):
            self._draft_checkpoint(link, asked=asked)

    def _draft_checkpoint(self, link: FeederLink | None, *, asked: int = 0) -> None:
        began = time.monotonic()
        if self._reserving:
            self._reserving.result()
        self.fence.check()
        draft = save_load.draft_checkpoint(
            self.folder, self.trainer, self.identity, model=self.settings.model, copies=self._copies
        )
        if link:
            keep = self.settings.train.keep_checkpoints
            oldest = self._background.submit(save_load.finish_checkpoint, draft, keep=keep, check=self.fence.check)
            self._pending_checkpoint = _PendingCheckpoint(draft.version, oldest, asked, began, time.monotonic() - began)

    def _report_finished_checkpoint(self, link: FeederLink, *, wait: bool = False) -> None:
        """Report the checkpoint that is being written once it is complete. With `wait`, or if it was requested, wait for it.

        Raises LearnerError if the checkpoint cannot be written.
        """
        now = self._pending_checkpoint
        if now is None or not (wait or now.asked or now.oldest.done()):
            return
        with self._tolerate_full_disk(link, now.version, asked=now.asked):
            self._complete_checkpoint(link, now)

    def _complete_checkpoint(self, link: FeederLink, now: _PendingCheckpoint) -> None:
        self._pending_checkpoint = None  # also if it failed, so that its memory is freed
        oldest = now.oldest.result()
        self.saved, self._no_room = now.version, None
        link.send(records.CheckpointSaved(oldest=oldest, asked=now.asked))
        if not self.settings.train.keep_batches:
            token_trace.prune_traces(self._tokens, oldest)
        seconds = {"training_waited_s": now.drafted_s, "seconds": time.monotonic() - now.began}
        log.info("checkpoint", version=now.version, **{name: round(value, 3) for name, value in seconds.items()})

    @contextlib.contextmanager
    def _tolerate_full_disk(self, link: FeederLink | None, version: int, *, asked: int) -> Iterator[None]:
        """Warn if the disk has no room for a checkpoint; the next regular checkpoint tries again.

        A requested checkpoint is retried until there is room or the learner is stopped, and nothing is trained until then.
        """
        try:
            yield
        except DiskFullError as error:
            self.fence.check()
            if link and self._no_room != version:
                self._warn_disk_full(link, version, error, asked=asked)
            self._no_room = version
            if link and asked:
                select.select([self.stop.wakeup], [], [], self._intervals.save_s)
        except LearnerError:
            self.fence.check()  # after a takeover, the other learner removes drafts, which causes such errors
            raise

    def _warn_disk_full(self, link: FeederLink, version: int, error: DiskFullError, *, asked: int) -> None:
        due = self.trainer.version + 1
        due += -due % self._train.checkpoint_every
        then = "it is tried again until there is room" if asked else f"training goes on, and that of {due} is tried"
        log.warning("checkpoint_without_room", version=version, reason=str(error), action=then)
        link.send(records.Warn(text=f"no checkpoint {version} of {self.policy}: {error}; {then}"))

    def _save_last(self, link: FeederLink | None) -> None:
        """Save a last checkpoint if the newest complete one lacks a step. Raises LearnerError if it cannot be written."""
        if link:
            self._report_finished_checkpoint(link, wait=True)
        due = "save" if self.trainer.version > self.saved else "stop"
        if self._broadcast(RankCommand(due) if link else None).name == "stop":
            return
        try:
            self._draft_checkpoint(link)
            if link and self._pending_checkpoint:
                self._complete_checkpoint(link, self._pending_checkpoint)
        except DiskFullError as error:
            raise LearnerError(
                f"the last checkpoint, of version {self.trainer.version}: {error}; then start the run again, which rebuilds it from the "
                "batch log"
            ) from error

    def _broadcast(self, command: RankCommand | None) -> RankCommand:
        """Send rank 0's command to every rank and return it."""
        if self._control is None:
            assert command is not None
            return command
        box = [command]
        torch.distributed.broadcast_object_list(box, src=0, group=self._control)
        assert box[0] is not None
        return box[0]


def _control_group() -> Any:
    """Return a CPU process group for commands, so that waiting ranks keep their GPUs idle; None for a single rank."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    return torch.distributed.new_group(backend="gloo", timeout=COMMAND_TIMEOUT)
