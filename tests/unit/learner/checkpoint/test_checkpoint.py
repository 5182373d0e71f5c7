"""A checkpoint continues a run to the bit, loads anywhere, and a bad one is passed over or refused."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import re
import resource
import shutil
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from unittest import mock

import msgspec
import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from click.testing import CliRunner
from safetensors.torch import load_file
from structlog.testing import capture_logs
from transformers import AutoModelForCausalLM

from support.disk import Disk
from support.episodes import make_group, make_qwen
from support.tiny_model import tiny_experts
from swarmq import cli
from swarmq.config import Lora, Policy, RunFolder, SwarmJob, Train
from swarmq.errors import LearnerError
from swarmq.learner.checkpoint import discovery, save_load
from swarmq.learner.checkpoint.model_files import CopyOutline, HostCopies, num_bytes, outline_copies
from swarmq.learner.feed.ipc import StopSignal
from swarmq.learner.memory.host import HostRoom
from swarmq.learner.model.loading import load_lm
from swarmq.learner.replay import replay
from swarmq.learner.store.batch_log import BatchLog
from swarmq.learner.store.records import BatchIndex, BatchRecord, CheckpointSaved, RunIdentity, Warn
from swarmq.learner.train import loop
from swarmq.learner.train import trainer as trainer_module
from swarmq.learner.train.loop import Learner
from swarmq.learner.train.trainer import Trainer, load_trainer

pytestmark = pytest.mark.slow

OURS = RunIdentity(run="r", policy="main", model="m")
CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
TRAIN = Train(gradient_checkpointing=False, learning_rate=1e-2, deterministic=True)


@pytest.fixture(autouse=True)
def no_leftover_state() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)
    AcceleratorState._reset_state()
    PartialState._reset_state()


def batch(version: int, train: Train = TRAIN) -> BatchRecord:
    group = make_group(f"g{version}")
    index = BatchIndex(record=version, version=version, trained=tuple(e.episode_id for e in group))
    return BatchRecord(index=index, episodes=tuple(group), settings=train)


def save(folder: Path, trainer: Trainer, keep: int = 3, model: str = "") -> int:
    return save_load.save_checkpoint(folder, trainer, OURS, model=model or str(folder), keep=keep)


def weights(trainer: Trainer) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in trainer.named_tensors()}


@pytest.mark.parametrize(("set_by_user", "taken"), [(None, ":4096:8"), (":16:8", ":16:8")])
def test_a_gpu_is_asked_for_products_that_repeat(tiny_qwen: Path, set_by_user: str | None, taken: str) -> None:
    """Without it torch refuses the first product that is to repeat."""
    with mock.patch.dict(os.environ, {CUBLAS: set_by_user} if set_by_user else {}):
        if set_by_user is None:
            os.environ.pop(CUBLAS, None)
        Trainer(str(tiny_qwen), TRAIN)
        assert os.environ[CUBLAS] == taken


def test_training_goes_on_to_the_bit(tiny_qwen: Path, tmp_path: Path) -> None:
    trainer = Trainer(str(tiny_qwen), TRAIN)
    trainer.step(batch(1))
    save(tmp_path, trainer)
    trainer.step(batch(2))
    drawn = torch.rand(3)
    torch.manual_seed(99)
    again = load_trainer(discovery.find_newest(tmp_path, OURS), Policy(model=str(tiny_qwen), train=TRAIN))
    assert again.version == 1
    again.step(batch(2))
    assert torch.equal(torch.rand(3), drawn), "a step draws what it would have drawn"
    assert weights(again) == weights(trainer)
    assert weights(again) != weights(Trainer(str(tiny_qwen), TRAIN))


MODELS = {
    "dense": (lambda folder: make_qwen(folder / "model"), TRAIN),
    "experts": (lambda _: tiny_experts("qwen3_moe"), TRAIN),
    "adapters": (lambda folder: make_qwen(folder / "model"), msgspec.structs.replace(TRAIN, lora=Lora(rank=4))),
}


@pytest.mark.parametrize("room", [True, False], ids=["room", "no room"])
@pytest.mark.parametrize("family", MODELS)
def test_training_goes_on_while_a_checkpoint_is_made_and_changes_nothing_of_it(
    family: str, room: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, train = MODELS[family]
    model = str(make(tmp_path))
    trainer, copies = Trainer(model, train), HostCopies()
    for version in (1, 3):
        trainer.step(batch(version, train))
        save_load.save_checkpoint(tmp_path / "wanted", trainer, OURS, model=model, keep=3)
        moments = num_bytes(outline_copies((), trainer.optimizer.state_dict()))
        needed = moments + 4 * trainer.num_parameters - copies.nbytes
        free = HostRoom(source="the host", total=1 << 40, free=2 * needed - (not room), bound=None)
        monkeypatch.setattr(save_load.host, "measure_rooms", lambda free=free: [free])
        draft = save_load.draft_checkpoint(tmp_path / "made", trainer, OURS, model=model, copies=copies)
        assert (draft.path / "state" / "optimizer.bin").exists() is not room
        assert not list(draft.path.rglob("*.safetensors")), "training waits for it"
        trainer.step(batch(version + 1, train))
        save_load.finish_checkpoint(draft, keep=3)
        made, wanted = (tmp_path / which / draft.target.name for which in ("made", "wanted"))
        names = {str(file.relative_to(wanted)) for file in wanted.rglob("*") if file.is_file()}
        assert names == {str(file.relative_to(made)) for file in made.rglob("*") if file.is_file()}
        for name in names - {"manifest.json"}:
            assert (made / name).read_bytes() == (wanted / name).read_bytes(), name


def test_the_memory_of_copies_is_kept_for_the_next_ones() -> None:
    moments = torch.ones(3)
    copies, state = HostCopies(), {"state": {0: {"exp_avg": moments, "step": torch.tensor(1.0)}}, "param_groups": [0.1]}
    first = copies.of_optimizer(state)
    moments += 1
    assert first["param_groups"] == [0.1]
    assert first["state"][0]["exp_avg"].tolist() == [1, 1, 1]
    again = copies.of_optimizer(state)
    assert again["state"][0]["exp_avg"] is first["state"][0]["exp_avg"]
    assert first["state"][0]["exp_avg"].tolist() == [2, 2, 2]
    assert copies.nbytes == num_bytes(outline_copies((), state)) == 16
    assert copies.of("another shape", torch.zeros(2)).tolist() == [0, 0]


@pytest.mark.parametrize("family", MODELS)
def test_memory_for_copies_is_got_beside_training_once_half_of_the_steps_are_made(family: str, tmp_path: Path) -> None:
    make, train = MODELS[family]
    train = msgspec.structs.replace(train, checkpoint_every=4)
    job = SwarmJob(run="r", folder=str(tmp_path), policies={"main": Policy(model=str(make(tmp_path)), train=train)})
    learner, link = Learner(job, "main", pusher=None, stop=StopSignal()), RecordingLink()
    got: list[int] = []
    for version in (1, 2, 3, 4):
        learner.trainer.step(batch(version, train))
        learner._save_if_due(link)  # type: ignore[arg-type]
        if learner._reserving:
            learner._reserving.result()
        got.append(learner._copies.nbytes)
        kept = {name: tensor.data_ptr() for name, tensor in learner._copies._kept.items()}
        if version == 3:
            reserved = kept
    learner._report_finished_checkpoint(link, wait=True)  # type: ignore[arg-type]
    adapters = sum(learner._copies._kept[name].nbytes for name in kept.keys() - reserved.keys())
    assert got[0] == 0 < got[1] == got[2] == got[3] - adapters
    assert reserved.items() <= kept.items()
    assert (adapters > 0) == (family == "adapters"), "which are small"


def test_no_memory_is_got_where_there_is_no_room(tiny_qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, copies = Trainer(str(tiny_qwen), TRAIN), HostCopies()
    trainer.step(batch(1))
    monkeypatch.setattr(
        save_load.host, "measure_rooms", lambda: [HostRoom(source="the host", total=1, free=1, bound=1)]
    )
    save_load.reserve_copies(trainer, copies)()
    assert copies.nbytes == 0


@pytest.mark.parametrize("room", [True, False], ids=["room", "no room"])
def test_what_ranks_have_gathered_of_a_policy_that_they_share_out_takes_no_room_a_second_time(
    tiny_qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: bool
) -> None:
    trainer = Trainer(str(tiny_qwen), TRAIN)
    trainer.step(batch(1))
    gathered = num_bytes(outline_copies((), trainer.optimizer.state_dict()))
    needed = gathered + 4 * trainer.num_parameters
    left = HostRoom(source="the host", total=1 << 40, free=2 * needed - gathered - (not room), bound=None)
    monkeypatch.setattr(save_load, "is_sharded", lambda _: True)
    monkeypatch.setattr(save_load.host, "measure_rooms", lambda: [left])
    draft = save_load.draft_checkpoint(tmp_path, trainer, OURS, model=str(tiny_qwen), copies=HostCopies())
    assert (draft.path / "state" / "optimizer.bin").exists() is not room


class Grudging(HostCopies):
    """Of a system that grants so many copies."""

    def __init__(self, granted: int) -> None:
        super().__init__()
        self.granted = granted

    def reserve(self, outlines: Iterable[CopyOutline]) -> None:
        for name, shape, dtype in outlines:
            wanted = shape if self.nbytes == 0 or len(self._kept) < self.granted else torch.Size([1 << 47])
            super().reserve([(name, wanted, dtype)])


@pytest.mark.parametrize("weights", [None, 5], ids=["not the optimizer", "not the weights"])
def test_what_the_system_grants_no_memory_for_is_written_while_training_waits(
    tiny_qwen: Path, tmp_path: Path, weights: int | None
) -> None:
    """`weights`: for the copies of so many there is memory."""
    trainer = Trainer(str(tiny_qwen), TRAIN)
    trainer.step(batch(1))
    moments = len(outline_copies((), trainer.optimizer.state_dict()))
    copies = Grudging(moments - 1 if weights is None else moments + weights)
    save_load.save_checkpoint(tmp_path / "wanted", trainer, OURS, model=str(tiny_qwen), keep=1)
    save_load.reserve_copies(trainer, copies)()
    assert copies.nbytes == 0, "training needs it more"
    with capture_logs() as said:
        draft = save_load.draft_checkpoint(tmp_path / "made", trainer, OURS, model=str(tiny_qwen), copies=copies)
    (waited,) = [line["action"] for line in said if line["event"] == "checkpoint_waited_for"]
    assert waited.startswith("the optimizer is" if weights is None else "all files are")
    assert (draft.path / "state" / "optimizer.bin").exists(), (
        "a copy of it would have the memory that weights of a GPU need"
    )
    trainer.step(batch(2))
    save_load.finish_checkpoint(draft, keep=1)
    for file in ("model.safetensors", "state/optimizer.bin"):
        made, wanted = (tmp_path / which / "step-00000001" / file for which in ("made", "wanted"))
        assert made.read_bytes() == wanted.read_bytes(), file


def test_the_memory_got_for_adapters_over_bf16_is_what_their_copies_take(
    tiny_qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU."""
    make = trainer_module._policy_lm
    monkeypatch.setattr(
        trainer_module,
        "_policy_lm",
        lambda source, initial, train, _, empty: make(source, initial, train, torch.bfloat16, empty=empty),
    )
    trainer, copies = Trainer(str(tiny_qwen), msgspec.structs.replace(TRAIN, lora=Lora(rank=4))), HostCopies()
    copies.reserve(outline_copies(trainer.weights_to_write(), trainer.optimizer.state_dict()))
    reserved = {name: tensor.data_ptr() for name, tensor in copies._kept.items()}
    trainer.files(copies)
    assert reserved.items() <= {name: tensor.data_ptr() for name, tensor in copies._kept.items()}.items()


def test_a_learner_that_was_replaced_writes_nothing_more(tiny_qwen: Path, tmp_path: Path) -> None:
    """Its successor may be drawing the same checkpoint by now."""
    trainer, looks = Trainer(str(tiny_qwen), TRAIN), []
    trainer.step(batch(1))
    draft = save_load.draft_checkpoint(tmp_path, trainer, OURS, model=str(tiny_qwen), copies=HostCopies())

    def replaced() -> None:
        looks.append([file.name for file in draft.path.rglob("*.bin")])
        if len(looks) == 2:
            raise LearnerError("another learner has taken over")

    with pytest.raises(LearnerError, match="taken over"):
        save_load.finish_checkpoint(draft, keep=1, check=replaced)
    assert looks == [[], ["optimizer.bin"]]
    assert not list(tmp_path.rglob("*.safetensors"))
    assert discovery.find_newest(tmp_path, OURS) is None


class RecordingLink:
    """A link to the batch feeder that keeps the messages it is sent."""

    def __init__(self) -> None:
        self.messages: list[object] = []

    def send(self, message: object) -> None:
        self.messages.append(message)

    def next(self, **_: object) -> object:
        raise LearnerError("the batch feeder cannot go on")


def make_learner(tmp_path: Path, model: Path, **changed: object) -> Learner:
    train = msgspec.structs.replace(TRAIN, **changed)
    job = SwarmJob(run="r", folder=str(tmp_path), policies={"main": Policy(model=str(model), train=train)})
    return Learner(job, "main", pusher=None, stop=StopSignal())


@contextlib.contextmanager
def room_for_files(num_bytes: int) -> Iterator[None]:
    """None may become larger, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("room", [20_000, 4_000], ids=["for all but the weights", "for nothing"])
def test_training_goes_on_where_the_disk_has_no_room_for_a_checkpoint(
    tiny_qwen: Path, tmp_path: Path, room: int
) -> None:
    """The log keeps what goes on from the one before."""
    learner, link = make_learner(tmp_path, tiny_qwen, checkpoint_every=2, keep_checkpoints=1), RecordingLink()
    learner.trainer.version = 2
    learner._save_if_due(link)  # type: ignore[arg-type]
    learner._report_finished_checkpoint(link, wait=True)  # type: ignore[arg-type]
    learner.trainer.version = 4
    with room_for_files(room):
        learner._save_if_due(link)  # type: ignore[arg-type]
        learner._report_finished_checkpoint(link, wait=True)  # type: ignore[arg-type]
    kept, warning = link.messages
    assert kept == CheckpointSaved(oldest=2)
    assert isinstance(warning, Warn)
    assert re.search("no checkpoint 4 of main: .*free space there.*; training goes on, and that of 6", warning.text)
    assert [path.name for path in learner.folder.iterdir()] == ["step-00000002"]
    learner.trainer.version = 6
    learner._save_if_due(link)  # type: ignore[arg-type]
    learner._report_finished_checkpoint(link, wait=True)  # type: ignore[arg-type]
    assert link.messages[2:] == [CheckpointSaved(oldest=6)]


def test_a_checkpoint_without_room_is_told_once_and_holds_nothing_afterwards(tiny_qwen: Path, tmp_path: Path) -> None:
    """Where ranks share a policy out, what it would hold is all of the optimizer's state."""
    learner, link = make_learner(tmp_path, tiny_qwen, checkpoint_every=2), RecordingLink()
    for version, room in ((2, 20_000), (4, 4_000)):
        learner.trainer.version = version
        with room_for_files(room):
            learner._save_if_due(link)  # type: ignore[arg-type]
            learner._report_finished_checkpoint(link, wait=True)  # type: ignore[arg-type]
        assert learner._pending_checkpoint is None
    for _ in range(3):
        learner._report_finished_checkpoint(link)  # type: ignore[arg-type]
    told = [re.match(r"no checkpoint (\d)", message.text) for message in link.messages if isinstance(message, Warn)]
    assert [found[1] for found in told if found] == ["2", "4"]


@pytest.mark.parametrize("room", [20_000, 4_000], ids=["for all but the weights", "for nothing"])
def test_a_checkpoint_that_was_asked_for_is_tried_at_every_pause(
    tiny_qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    learner, link, said = make_learner(tmp_path, tiny_qwen), RecordingLink(), list[str]()
    select, draw = loop.select.select, save_load.draft_checkpoint
    monkeypatch.setattr(loop.select, "select", lambda *given: said.append("pause") or select(*given[:3], 0))
    monkeypatch.setattr(
        loop.save_load, "draft_checkpoint", lambda *given, **named: said.append("try") or draw(*given, **named)
    )
    with room_for_files(room):
        for _ in range(3):
            learner._save(link, asked=3)  # type: ignore[arg-type]
            learner._report_finished_checkpoint(link)  # type: ignore[arg-type]
    assert said == ["try", "pause"] * 3


def test_a_checkpoint_that_was_asked_for_is_tried_until_there_is_room(tiny_qwen: Path, tmp_path: Path) -> None:
    learner, link = make_learner(tmp_path, tiny_qwen), RecordingLink()
    learner.stop.ask()  # which no pause outlasts
    with room_for_files(4_000):
        for _ in range(2):
            learner._save(link, asked=3)  # type: ignore[arg-type]
            learner._report_finished_checkpoint(link)  # type: ignore[arg-type]
    (warning,) = link.messages
    assert isinstance(warning, Warn)
    assert warning.text.endswith("it is tried again until there is room")
    learner._save(link, asked=3)  # type: ignore[arg-type]
    learner._report_finished_checkpoint(link)  # type: ignore[arg-type]
    assert link.messages[1:] == [CheckpointSaved(oldest=0, asked=3)]


def test_the_last_checkpoint_is_tried_again_at_the_end_and_without_it_the_learner_ends(
    tiny_qwen: Path, tmp_path: Path
) -> None:
    learner, link = make_learner(tmp_path, tiny_qwen, checkpoint_every=1), RecordingLink()
    learner.trainer.version = 1
    with room_for_files(20_000):
        learner._save_if_due(link)  # type: ignore[arg-type]
        with pytest.raises(LearnerError, match="the last checkpoint, of version 1: .*free space .*start the run again"):
            learner._save_last(link)  # type: ignore[arg-type]
    learner._save_last(link)  # type: ignore[arg-type]
    assert link.messages[1:] == [CheckpointSaved(oldest=1)]
    learner._save_last(link)  # type: ignore[arg-type]
    assert link.messages[2:] == [], "it is whole"


def test_a_learner_that_ends_waits_for_the_checkpoint_that_is_being_written(
    tiny_qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock is given back after that, and the next learner writes there, too."""
    seal, may_seal = save_load._seal, threading.Event()
    slow_disk = threading.Timer(0.5, may_seal.set)
    monkeypatch.setattr(save_load, "_seal", lambda draft: may_seal.wait(60) and seal(draft))
    learner, link = make_learner(tmp_path, tiny_qwen), RecordingLink()
    learner.trainer.version = 1
    learner._save(link)  # type: ignore[arg-type]
    slow_disk.start()
    with pytest.raises(LearnerError, match="cannot go on"):
        learner.run(link)  # type: ignore[arg-type]
    found = discovery.find_newest(learner.folder, learner.identity)
    assert found is not None
    assert found.version == 1


def test_the_batch_log_is_not_cut_before_a_checkpoint_is_whole(
    tiny_qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seal, may_seal = save_load._seal, threading.Event()
    monkeypatch.setattr(save_load, "_seal", lambda draft: may_seal.wait(60) and seal(draft))
    job = SwarmJob(run="r", folder=str(tmp_path), policies={"main": Policy(model=str(tiny_qwen), train=TRAIN)})
    learner, link = Learner(job, "main", pusher=None, stop=StopSignal()), RecordingLink()
    learner.trainer.step(batch(1))
    learner._save(link)  # type: ignore[arg-type]
    learner.trainer.step(batch(2))
    learner._report_finished_checkpoint(link)  # type: ignore[arg-type]
    assert link.messages == []
    may_seal.set()
    learner._report_finished_checkpoint(link, wait=True)  # type: ignore[arg-type]
    learner._report_finished_checkpoint(link, wait=True)  # type: ignore[arg-type]
    assert link.messages == [CheckpointSaved(oldest=1)]
    found = discovery.find_newest(learner.folder, learner.identity)
    assert found is not None
    assert found.version == 1


def test_an_optimizer_saved_in_parts_is_refused_with_what_to_do(tiny_qwen: Path, tmp_path: Path) -> None:
    trainer = Trainer(str(tiny_qwen), TRAIN)
    save(tmp_path, trainer)
    found = discovery.find_newest(tmp_path, OURS)
    assert found is not None
    (found.path / "state" / "optimizer.bin").unlink()
    with pytest.raises(LearnerError, match="saved in parts.* begin another run from the weights"):
        save_load.restore(trainer, found)


def test_two_runs_of_the_same_batches_give_the_same_figures(tiny_qwen: Path) -> None:
    def losses() -> list[float]:
        trainer = Trainer(str(tiny_qwen), TRAIN)
        steps = [trainer.step(batch(version)) for version in (1, 2)]
        return [step[figure] for step in steps for figure in ("loss", "grad_norm", "kl_k3", "entropy")]

    assert losses() == losses()


def test_a_checkpoint_outlives_a_crash_of_the_machine(
    tiny_qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    save(tmp_path, Trainer(str(tiny_qwen), TRAIN), model=str(tiny_qwen))
    (written,) = tmp_path.iterdir()
    assert disk.keeps(written)


def test_the_folder_is_a_hugging_face_model_with_its_tokenizer_files(tiny_qwen: Path, tmp_path: Path) -> None:
    model = make_qwen(tmp_path / "model")
    (model / "tokenizer.json").write_text("{}")
    (model / "chat_template.jinja").write_text("hello")
    trainer = Trainer(str(model), TRAIN)
    trainer.step(batch(1))
    save(tmp_path / "c", trainer, model=str(model))
    folder = tmp_path / "c" / "step-00000001"
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert {n: t.numpy().tobytes() for n, t in loaded.state_dict().items()} == weights(trainer)
    assert (folder / "chat_template.jinja").read_text() == "hello"
    assert not list((folder / "state").glob("*.safetensors")), "the weights are there twice"


def test_only_the_newest_are_kept_and_the_oldest_of_them_is_told(tiny_qwen: Path, tmp_path: Path) -> None:
    trainer = Trainer(str(tiny_qwen), TRAIN)
    oldest = []
    for version in (1, 2, 3):
        trainer.version = version
        oldest.append(save(tmp_path, trainer, keep=2))
    assert oldest == [1, 1, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


@pytest.mark.parametrize("damage", ["changed", "shortened", "file missing", "no manifest", "half a manifest"])
def test_a_damaged_one_is_passed_over_and_may_be_made_again(tiny_qwen: Path, tmp_path: Path, damage: str) -> None:
    trainer = Trainer(str(tiny_qwen), TRAIN)
    for version in (1, 2):
        trainer.version = version
        save(tmp_path, trainer)
    folder = tmp_path / "step-00000002"
    file = folder / "model.safetensors"
    match damage:
        case "changed":
            file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
        case "shortened":
            file.write_bytes(file.read_bytes()[:-1])
        case "file missing":
            (folder / "state" / "optimizer.bin").unlink()
        case "no manifest":
            (folder / "manifest.json").unlink()
        case "half a manifest":
            (folder / "manifest.json").write_bytes((folder / "manifest.json").read_bytes()[:100])
    found = discovery.find_newest(tmp_path, OURS)
    assert found is not None
    assert found.version == 1
    save(tmp_path, trainer)
    found = discovery.find_newest(tmp_path, OURS)
    assert found is not None
    assert found.version == 2


def test_a_checkpoint_that_is_whole_is_not_written_again(tiny_qwen: Path, tmp_path: Path) -> None:
    trainer = Trainer(str(tiny_qwen), TRAIN)
    for version in (1, 2):
        trainer.version = version
        save(tmp_path, trainer)
    before = (tmp_path / "step-00000002").stat().st_ino
    with room_for_files(0):
        assert save(tmp_path, trainer) == 1
    assert (tmp_path / "step-00000002").stat().st_ino == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def test_a_damaged_checkpoint_goes_when_another_stands_in_its_place(
    tiny_qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at any moment, the learner finds one."""
    trainer, remove, found = Trainer(str(tiny_qwen), TRAIN), save_load.shutil.rmtree, []
    save(tmp_path, trainer)
    (tmp_path / "step-00000000" / "model.safetensors").write_bytes(b"rubbish")

    def look_and_remove(path: Path, **how: bool) -> None:
        found.append(discovery.find_newest(tmp_path, OURS))
        remove(path, **how)

    monkeypatch.setattr(save_load.shutil, "rmtree", look_and_remove)
    save(tmp_path, trainer)
    assert found == [discovery.Checkpoint(path=tmp_path / "step-00000000", version=0)]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000000"]


def test_a_damaged_checkpoint_does_not_count_among_those_that_are_kept(tiny_qwen: Path, tmp_path: Path) -> None:
    trainer = Trainer(str(tiny_qwen), TRAIN)
    trainer.version = 4
    save(tmp_path, trainer)
    (tmp_path / "step-00000004" / "model.safetensors").write_bytes(b"rubbish")
    shutil.copytree(tmp_path / "step-00000004", tmp_path / "step-00000001-of-mine")
    trainer.version = 2
    assert save(tmp_path, trainer, keep=1) == 2
    found = discovery.find_newest(tmp_path, OURS)
    assert found is not None
    assert found.version == 2


@pytest.mark.parametrize("at", [1, 2, 3], ids=["optimizer", "weights", "name"])
def test_a_learner_and_its_successor_do_no_harm_to_each_others_drafts(tiny_qwen: Path, tmp_path: Path, at: int) -> None:
    """The one that was replaced stands still between its look at the lock and the next file."""
    old, new = Trainer(str(tiny_qwen), TRAIN), Trainer(str(tiny_qwen), TRAIN)
    for trainer in (old, new):
        trainer.step(batch(1))
    drawn: list[save_load.CheckpointDraft] = []
    looks = itertools.count(1)

    def draw(trainer: Trainer) -> save_load.CheckpointDraft:
        return save_load.draft_checkpoint(tmp_path, trainer, OURS, model=str(tiny_qwen), copies=HostCopies())

    def stand_still() -> None:
        if next(looks) == at:
            drawn.append(draw(new))

    with pytest.raises(LearnerError, match=r"removed while the checkpoint was written .*nothing is lost"):
        save_load.finish_checkpoint(draw(old), keep=1, check=stand_still)
    save_load.finish_checkpoint(drawn[0], keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert discovery.find_newest(tmp_path, OURS)


def test_what_cannot_be_removed_is_said_once_and_ends_nothing(
    tiny_qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else's results in an old checkpoint, or in a draft."""
    remove = save_load.shutil.rmtree

    def remove_ours(path: Path, *, ignore_errors: bool = False) -> None:
        for theirs in path.rglob("theirs"):
            if ignore_errors:
                return
            raise PermissionError(errno.EACCES, "Permission denied", str(theirs))
        remove(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(save_load.shutil, "rmtree", remove_ours)
    trainer = Trainer(str(tiny_qwen), TRAIN)
    (tmp_path / ".draft-step-00000009" / "theirs").mkdir(parents=True)
    save(tmp_path, trainer, keep=1)
    (tmp_path / "step-00000000" / "theirs").mkdir()
    with capture_logs() as logs:
        for version in (1, 2, 3):
            trainer.version = version
            assert save(tmp_path, trainer, keep=1) == version
    assert [line["event"] for line in logs].count("checkpoint_not_removed") == 1
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000003"]
    assert len(list(tmp_path.glob(".draft-*"))) == 2


def test_half_a_checkpoint_is_none_and_is_cleared_away(tiny_qwen: Path, tmp_path: Path) -> None:
    trainer = Trainer(str(tiny_qwen), TRAIN)
    draft = tmp_path / ".draft-step-00000001"
    draft.mkdir()
    (draft / "model.safetensors").write_bytes(b"half")
    assert discovery.find_newest(tmp_path, OURS) is None
    trainer.version = 1
    save(tmp_path, trainer)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize("field", ["run", "policy", "model"])
def test_one_of_something_else_is_refused_and_left_alone(tiny_qwen: Path, tmp_path: Path, field: str) -> None:
    save(tmp_path, Trainer(str(tiny_qwen), TRAIN))
    with pytest.raises(LearnerError, match=f"{field} is .* there and 'other' here"):
        discovery.find_newest(tmp_path, msgspec.structs.replace(OURS, **{field: "other"}))
    assert discovery.find_newest(tmp_path, OURS)


def test_one_of_a_newer_schema_is_refused(tiny_qwen: Path, tmp_path: Path) -> None:
    save(tmp_path, Trainer(str(tiny_qwen), TRAIN))
    manifest = tmp_path / "step-00000000" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"schema": 99}))
    with pytest.raises(LearnerError, match="newer swarmq"):
        discovery.find_newest(tmp_path, OURS)


@pytest.mark.skipif(os.geteuid() == 0 and not Path("/dev/full").exists(), reason="needs a place that cannot be written")
def test_a_folder_that_cannot_be_written_is_said(tiny_qwen: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LearnerError, match="Not a directory"):
        save(tmp_path / "file" / "checkpoints", Trainer(str(tiny_qwen), TRAIN), model=str(tiny_qwen))


@pytest.mark.parametrize("steps", [0, 1], ids=["weights", "optimizer"])
def test_a_full_disk_is_said_and_leaves_what_was_there(tiny_qwen: Path, tmp_path: Path, steps: int) -> None:
    """Without a step there is no optimizer state to write, and the weights are the first that do not fit."""
    trainer = Trainer(str(tiny_qwen), TRAIN)
    save(tmp_path, trainer)
    for version in range(1, steps + 1):
        trainer.step(batch(version))
    trainer.version += 1 - steps
    with (
        room_for_files(20_000),
        pytest.raises(LearnerError, match="cannot be written .*: free space there; earlier checkpoints"),
    ):
        save(tmp_path, trainer)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000000"]
    assert discovery.find_newest(tmp_path, OURS) == discovery.Checkpoint(path=tmp_path / "step-00000000", version=0)
    save(tmp_path, trainer)
    assert (found := discovery.find_newest(tmp_path, OURS))
    assert found.version == 1


def test_the_critic_is_gathered_before_rank_0_writes_so_that_a_full_disk_leaves_no_rank_waiting(
    tiny_qwen: Path, tmp_path: Path
) -> None:
    gathered: list[int] = []

    class Watched(Trainer):
        def critic_state(self) -> None:
            gathered.append(self.version)

    trainer = Watched(str(tiny_qwen), TRAIN)
    trainer.step(batch(1))
    with room_for_files(20_000), pytest.raises(LearnerError, match="cannot be written"):
        save(tmp_path, trainer)
    assert gathered == [1]


def test_a_replay_needs_checkpoint_and_log_alone_and_gives_the_same_weights(tiny_qwen: Path, tmp_path: Path) -> None:
    job = SwarmJob.build({"run": "r", "folder": str(tmp_path), "policies": {"main": {"model": str(tiny_qwen)}}})
    identity = RunIdentity.of(job, "main")
    log = BatchLog(job.run_folder.batch_log("main"), identity)
    trainer = Trainer(str(tiny_qwen), TRAIN)
    for version in (1, 2, 3):
        log.append(batch(version))
        trainer.step(batch(version))
        if version == 2:
            save_load.save_checkpoint(
                job.run_folder.checkpoints("main"), trainer, identity, model=str(tiny_qwen), keep=1
            )
    steps: list[int] = []
    for name, start in (("a", None), ("b", job.run_folder.checkpoints("main") / "step-00000002")):
        version = replay(
            job,
            "main",
            job.run_folder,
            to_folder=tmp_path / name,
            from_checkpoint=start,
            report=lambda f: steps.append(f["version"]),
        )
        assert version == 3
        got = load_file(tmp_path / name / "step-00000003" / "model.safetensors")
        assert all(t.numpy().tobytes() == weights(trainer)[n] for n, t in got.items())
    assert steps == [1, 2, 3, 3]
    with pytest.raises(LearnerError, match="none/main/batches: no batch was trained yet"):
        replay(job, "main", RunFolder(tmp_path / "none"), to_folder=tmp_path / "d")
    assert not (tmp_path / "d").exists()
    for taken in (tmp_path / "a", tiny_qwen / "config.json"):
        with pytest.raises(LearnerError, match="not empty"):
            replay(job, "main", job.run_folder, to_folder=taken)
    (job.run_folder.path / "resolved.toml").write_text(job.to_toml())
    copy = job.run_folder.path.rename(tmp_path / "moved")
    start = copy / "main" / "checkpoints" / "step-00000002"
    line = ["replay", str(copy), str(tmp_path / "c"), "--from", str(start), "--until", "3"]
    told = CliRunner().invoke(cli.main, line)
    assert (told.exit_code, told.output.count("step 3  loss")) == (0, 1), told.output
    assert f"version 3 written to {tmp_path / 'c'}" in told.output
    got = load_file(tmp_path / "c" / "step-00000003" / "model.safetensors")
    assert all(t.numpy().tobytes() == weights(trainer)[n] for n, t in got.items())
    told = CliRunner().invoke(cli.main, line)
    assert (told.exit_code, "not empty; name a new folder" in told.output) == (1, True)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: str(p / "nowhere"), "there is no such folder"),
        (str, "no config.json"),
        (lambda p: _config(p, {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}), "not a causal"),
        (lambda p: _config(p, {"model_type": "gemma3"}), "trains only qwen2_5_vl, qwen3_vl.*trained = false"),
        (lambda p: _config(p, {"model_type": "qwen3", "hidden_size": 32}), "weights cannot be loaded"),
        (lambda p: _config(p, {"model_type": "nonsense"}), "cannot be read"),
    ],
)
def test_a_model_that_cannot_be_trained_is_named_with_the_reason(tmp_path: Path, make: object, message: str) -> None:
    with pytest.raises(LearnerError, match=message) as raised:
        load_lm(make(tmp_path), gradient_checkpointing=False)  # type: ignore[operator]
    assert str(tmp_path) in str(raised.value)


def _config(folder: Path, config: dict[str, object]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)
