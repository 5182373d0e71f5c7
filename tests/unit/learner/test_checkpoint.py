"""A checkpoint continues a run to the bit, loads anywhere, and a bad one is passed over or refused."""

from __future__ import annotations

import json
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import msgspec
import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from click.testing import CliRunner
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from support.disk import Disk
from support.episodes import make_group, make_qwen
from support.tiny_model import tiny_experts
from swarmq import cli
from swarmq.config import Lora, Policy, RunFolder, SwarmJob, Train
from swarmq.errors import LearnerError
from swarmq.learner import checkpoint
from swarmq.learner.batch_log import BatchLog
from swarmq.learner.host import Room
from swarmq.learner.link import StopSignal
from swarmq.learner.loop import Learner, load
from swarmq.learner.model import load_lm
from swarmq.learner.model_files import HostCopies, num_bytes, outlines
from swarmq.learner.records import BatchRecord, Identity, Index, Kept
from swarmq.learner.replay import replay
from swarmq.learner.trainer import Trainer

pytestmark = pytest.mark.slow

OURS = Identity(run="r", policy="main", model="m")
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
    index = Index(record=version, version=version, trained=tuple(e.episode_id for e in group))
    return BatchRecord(index=index, episodes=tuple(group), settings=train)


def save(folder: Path, trainer: Trainer, keep: int = 3, model: str = "") -> int:
    return checkpoint.save(folder, trainer, OURS, model=model or str(folder), keep=keep)


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
    drawn = torch.rand(3)
    trainer.step(batch(2))
    torch.manual_seed(99)
    again = load(checkpoint.newest(tmp_path, OURS), Policy(model=str(tiny_qwen), train=TRAIN))
    assert again.version == 1
    assert torch.equal(torch.rand(3), drawn)
    again.step(batch(2))
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
        checkpoint.save(tmp_path / "wanted", trainer, OURS, model=model, keep=3)
        moments = num_bytes(outlines((), trainer.optimizer.state_dict()))
        needed = moments + 4 * trainer.num_parameters - copies.nbytes
        free = Room(whose="the host", total=1 << 40, free=2 * needed - (not room), bound=None)
        monkeypatch.setattr(checkpoint.host, "rooms", lambda free=free: [free])
        draft = checkpoint.draw(tmp_path / "made", trainer, OURS, model=model, copies=copies)
        assert (draft.path / "state" / "optimizer.bin").exists() is not room
        assert not list(draft.path.rglob("*.safetensors")), "training waits for it"
        trainer.step(batch(version + 1, train))
        checkpoint.finish(draft, keep=3)
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
    assert copies.nbytes == num_bytes(outlines((), state)) == 16
    assert copies.of("another shape", torch.zeros(2)).tolist() == [0, 0]


@pytest.mark.parametrize("family", MODELS)
def test_memory_for_copies_is_got_beside_training_once_half_of_the_steps_are_made(family: str, tmp_path: Path) -> None:
    make, train = MODELS[family]
    train = msgspec.structs.replace(train, checkpoint_every=4)
    job = SwarmJob(run="r", folder=str(tmp_path), policies={"main": Policy(model=str(make(tmp_path)), train=train)})
    learner, link = Learner(job, "main", pusher=None, stop=StopSignal()), Told()
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
    learner._saved(link, wait=True)  # type: ignore[arg-type]
    adapters = sum(learner._copies._kept[name].nbytes for name in kept.keys() - reserved.keys())
    assert got[0] == 0 < got[1] == got[2] == got[3] - adapters
    assert reserved.items() <= kept.items()
    assert (adapters > 0) == (family == "adapters"), "which are small"


def test_no_memory_is_got_where_there_is_no_room(tiny_qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, copies = Trainer(str(tiny_qwen), TRAIN), HostCopies()
    trainer.step(batch(1))
    monkeypatch.setattr(checkpoint.host, "rooms", lambda: [Room(whose="the host", total=1, free=1, bound=1)])
    checkpoint.reserve(trainer, copies)()
    assert copies.nbytes == 0


def test_a_learner_that_was_replaced_writes_nothing_more(tiny_qwen: Path, tmp_path: Path) -> None:
    """Its successor may be drawing the same checkpoint by now."""
    trainer, looks = Trainer(str(tiny_qwen), TRAIN), []
    trainer.step(batch(1))
    draft = checkpoint.draw(tmp_path, trainer, OURS, model=str(tiny_qwen), copies=HostCopies())

    def replaced() -> None:
        looks.append([file.name for file in draft.path.rglob("*.bin")])
        if len(looks) == 2:
            raise LearnerError("another learner has taken over")

    with pytest.raises(LearnerError, match="taken over"):
        checkpoint.finish(draft, keep=1, check=replaced)
    assert looks == [[], ["optimizer.bin"]]
    assert not list(tmp_path.rglob("*.safetensors"))
    assert checkpoint.newest(tmp_path, OURS) is None


class Told:
    """A link that keeps what it is told."""

    def __init__(self) -> None:
        self.messages: list[object] = []

    def tell(self, message: object) -> None:
        self.messages.append(message)


def test_the_batch_log_is_not_cut_before_a_checkpoint_is_whole(
    tiny_qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seal, may_seal = checkpoint._seal, threading.Event()
    monkeypatch.setattr(checkpoint, "_seal", lambda draft: may_seal.wait(60) and seal(draft))
    job = SwarmJob(run="r", folder=str(tmp_path), policies={"main": Policy(model=str(tiny_qwen), train=TRAIN)})
    learner, link = Learner(job, "main", pusher=None, stop=StopSignal()), Told()
    learner.trainer.step(batch(1))
    learner._save(link)  # type: ignore[arg-type]
    learner.trainer.step(batch(2))
    learner._saved(link)  # type: ignore[arg-type]
    assert link.messages == []
    may_seal.set()
    learner._saved(link, wait=True)  # type: ignore[arg-type]
    learner._saved(link, wait=True)  # type: ignore[arg-type]
    assert link.messages == [Kept(oldest=1)]
    found = checkpoint.newest(learner.folder, learner.identity)
    assert found is not None
    assert found.version == 1


def test_an_optimizer_saved_in_parts_is_refused_with_what_to_do(tiny_qwen: Path, tmp_path: Path) -> None:
    trainer = Trainer(str(tiny_qwen), TRAIN)
    save(tmp_path, trainer)
    found = checkpoint.newest(tmp_path, OURS)
    assert found is not None
    (found.path / "state" / "optimizer.bin").unlink()
    with pytest.raises(LearnerError, match="saved in parts.* begin another run from the weights"):
        checkpoint.restore(trainer, found)


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
    found = checkpoint.newest(tmp_path, OURS)
    assert found is not None
    assert found.version == 1
    save(tmp_path, trainer)
    found = checkpoint.newest(tmp_path, OURS)
    assert found is not None
    assert found.version == 2


def test_half_a_checkpoint_is_none_and_is_cleared_away(tiny_qwen: Path, tmp_path: Path) -> None:
    trainer = Trainer(str(tiny_qwen), TRAIN)
    draft = tmp_path / ".draft-step-00000001"
    draft.mkdir()
    (draft / "model.safetensors").write_bytes(b"half")
    assert checkpoint.newest(tmp_path, OURS) is None
    trainer.version = 1
    save(tmp_path, trainer)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize("field", ["run", "policy", "model"])
def test_one_of_something_else_is_refused_and_left_alone(tiny_qwen: Path, tmp_path: Path, field: str) -> None:
    save(tmp_path, Trainer(str(tiny_qwen), TRAIN))
    with pytest.raises(LearnerError, match=f"{field} is .* there and 'other' here"):
        checkpoint.newest(tmp_path, msgspec.structs.replace(OURS, **{field: "other"}))
    assert checkpoint.newest(tmp_path, OURS)


def test_one_of_a_newer_schema_is_refused(tiny_qwen: Path, tmp_path: Path) -> None:
    save(tmp_path, Trainer(str(tiny_qwen), TRAIN))
    manifest = tmp_path / "step-00000000" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"schema": 99}))
    with pytest.raises(LearnerError, match="newer swarmq"):
        checkpoint.newest(tmp_path, OURS)


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
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(LearnerError, match="cannot be written .*: free space there; the checkpoints before it"):
            save(tmp_path, trainer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000000"]
    assert checkpoint.newest(tmp_path, OURS) == checkpoint.Checkpoint(path=tmp_path / "step-00000000", version=0)
    save(tmp_path, trainer)
    assert (found := checkpoint.newest(tmp_path, OURS))
    assert found.version == 1


def test_a_replay_needs_checkpoint_and_log_alone_and_gives_the_same_weights(tiny_qwen: Path, tmp_path: Path) -> None:
    job = SwarmJob.build({"run": "r", "folder": str(tmp_path), "policies": {"main": {"model": str(tiny_qwen)}}})
    identity = Identity.of(job, "main")
    log = BatchLog(job.run_folder.batch_log("main"), identity)
    trainer = Trainer(str(tiny_qwen), TRAIN)
    for version in (1, 2, 3):
        log.append(batch(version))
        trainer.step(batch(version))
        if version == 2:
            checkpoint.save(job.run_folder.checkpoints("main"), trainer, identity, model=str(tiny_qwen), keep=1)
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
        (lambda p: _config(p, {"model_type": "gemma3"}), "tokens alone.*trained = false"),
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
