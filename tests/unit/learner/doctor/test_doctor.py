"""The doctor tells a sound run from a broken one, and names what broke it."""

from __future__ import annotations

import math
import os
import shutil
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from numpy.typing import NDArray

from support.episodes import make_group
from swarmq.cli import main
from swarmq.config import EngineSettings, Policy, SwarmJob, Train
from swarmq.learner.batching.micro_batches import build_rank_batch
from swarmq.learner.checkpoint import save_load
from swarmq.learner.doctor import checks as doctor_checks
from swarmq.learner.doctor.checks import _engine_arguments, _weights, checks
from swarmq.learner.doctor.examine import examine, head_agrees, layouts_agree
from swarmq.learner.doctor.mismatch import Compared, certify_fp8, compare, explain
from swarmq.learner.health.findings import Finding, verdict
from swarmq.learner.health.signs import SIGNS, find_signs
from swarmq.learner.model import layout_model, logprob_head
from swarmq.learner.model.layout_model import LayoutModel, PlacedLayout
from swarmq.learner.model.logprob_head import score_hidden
from swarmq.learner.store.batch_log import BatchLog
from swarmq.learner.store.records import BatchIndex, BatchRecord, RunIdentity
from swarmq.learner.train.trainer import Trainer
from swarmq.messages import Event, Rollout, Sampling, VersionSpan, pack_floats
from swarmq.timeline import resolve

pytestmark = pytest.mark.slow

TRAIN = Train(gradient_checkpointing=False, learning_rate=1e-3, warmup_steps=0, token_log=False)
SOUND = {
    "entropy": 1.0, "kl_k3": 0.001, "effective_samples": 0.9, "episodes": 8, "dropped": {}, "equal_groups": 0.1,
    "clipped_positive": 0.0, "clipped_negative": 0.0, "filtered_positive": 0.01, "filtered_negative": 0.01, "truncated": 0.0, "grad_norm": 1.0,
    "staleness": {"0": 4, "4": 4}, "explained_variance": 0.5, "value_loss": 1.0,
}  # fmt: skip
SICK: dict[str, dict[str, Any]] = {
    "entropy collapse": {"entropy": 0.1},
    "no entropy left": {"entropy": 0.005},
    "entropy explosion": {"entropy": 4.0},
    "mismatch": {"kl_k3": 0.1},
    "broken mismatch": {"kl_k3": 1.0},
    "few effective samples": {"effective_samples": 0.1},
    "stale episodes": {"dropped": {"stale": 4}},
    "staleness near its bound": {"staleness": {"3": 4, "4": 4}},
    "zero-variance groups": {"equal_groups": 0.9},
    "clipped upwards": {"clipped_positive": 0.8},
    "clipped downwards": {"clipped_negative": 0.3, "masked_negative": 0.3},
    "filtered upwards": {"filtered_positive": 0.2},
    "filtered downwards": {"filtered_negative": 0.2},
    "truncated answers": {"truncated": 0.5},
    "gradient growing": {"grad_norm": 20.0},
    "misleading critic": {"explained_variance": -1.0},
    "diverging critic": {"value_loss": 20.0},
    "steps skipped": {"skipped": "gradient_not_finite"},
}


def test_every_sign_has_a_case() -> None:
    assert SICK.keys() == {sign.name for sign in SIGNS}


@pytest.mark.parametrize("name", SICK)
def test_a_sign_is_named_when_its_limit_is_crossed_and_not_before(name: str) -> None:
    sound, sick = [SOUND] * 10, [SOUND | SICK[name]] * 10
    assert {f.level for f in find_signs(sound + sound, 4)} == {"ok"}
    (finding,) = (f for f in find_signs(sound + sick, 4) if f.check == name)
    assert finding.level in ("warning", "error")


def test_a_sign_that_does_not_show_says_what_it_measures_and_one_that_does_what_is_wrong() -> None:
    (sound,) = (f for f in find_signs([SOUND | {"entropy": 0.092}], 4) if f.check == "no entropy left")
    assert sound.line == "entropy 0.092 (collapse below 0.01)"
    (sick,) = (f for f in find_signs([SOUND | {"entropy": 0.005}], 4) if f.check == "no entropy left")
    assert sick.line.startswith("no entropy left: entropy 0.005 (collapse below 0.01): the policy answers")


def test_the_verdict_names_what_is_wrong_and_what_to_look_at() -> None:
    ok, note, warning, error = (
        Finding(level=level, check=f"a {level}", text="") for level in ("ok", "note", "warning", "error")
    )
    assert verdict([ok, error, note, warning, error]).text == "wrong: a error; look at a warning"
    assert verdict([ok, warning, note]).text == "nothing is broken, but look at a warning"
    assert verdict([ok, note]).level == "ok"
    assert verdict([note]).level == "note"


def test_without_steps_it_is_said_that_there_is_nothing_to_read() -> None:
    assert [(f.level, f.check) for f in find_signs([], 4)] == [("note", "signs")]
    assert "staleness near its bound" not in {f.check for f in find_signs([SOUND], 0)}, (
        "on policy: there is no bound to be near"
    )


def sampled_by(trainer: Trainer, group: list[Rollout], *, temperature: float, engine: str) -> list[Rollout]:
    """The group as if an engine with the trainer's weights had sampled it, with what is wrong with that engine."""
    sampling = Sampling(temperature=temperature)
    group = [
        msgspec.structs.replace(e, turns=tuple(msgspec.structs.replace(t, sampling=sampling) for t in e.turns))
        for e in group
    ]
    scored: dict[tuple[int, int, int], float] = {}
    for one in build_rank_batch(group, TRAIN, trainer.traits).passes:
        reported = torch.ones(len(one.temperatures)) if engine == "raw" else torch.from_numpy(one.temperatures)
        with torch.no_grad():
            logprobs = trainer.model(PlacedLayout.of(one.layout, torch.device("cpu")), reported).logprobs
        keys = zip(one.layout.episodes.tolist(), one.layout.turns.tolist(), one.layout.offsets.tolist(), strict=True)
        scored |= dict(zip(keys, logprobs.tolist(), strict=True))
    off = {"sound": 0.0, "raw": 0.0, "cut": 0.4}[engine]

    def turn(e: int, t: int) -> Any:
        old = group[e].turns[t]
        size = len(old.sampled_ids) // 4
        values = [min(scored[e, t, i] + off, 0.0) for i in range(size)]
        span = (VersionSpan(version=trainer.version, start=0, end=size),)
        return msgspec.structs.replace(old, logprobs=pack_floats(values), versions=span)

    return [
        msgspec.structs.replace(one, turns=tuple(turn(e, t) for t in range(len(one.turns))))
        for e, one in enumerate(group)
    ]


def run_with(engine: str, model: Path, folder: Path, *, temperature: float = 1.0) -> SwarmJob:
    """A run of three steps whose second checkpoint the doctor can start from."""
    policy = Policy(model=str(model), train=TRAIN)
    job = SwarmJob(run="r", folder=str(folder), policies={"main": policy})
    identity = RunIdentity.of(job, "main")
    trainer, log = Trainer(str(model), TRAIN), BatchLog(job.run_folder.batch_log("main"), identity)
    for version in (1, 2, 3):
        group = sampled_by(trainer, make_group(f"g{version}", (0.0, 1.0)), temperature=temperature, engine=engine)
        index = BatchIndex(record=version, version=version, trained=tuple(e.episode_id for e in group), at=time.time())
        record = BatchRecord(index=index, episodes=tuple(group), settings=TRAIN)
        log.append(record)
        trainer.step(record)
        if version == 1:
            save_load.save_checkpoint(job.run_folder.checkpoints("main"), trainer, identity, model=str(model), keep=2)
    log.close()
    return job


def levels(findings: list[Finding]) -> dict[str, str]:
    return {finding.check: finding.level for finding in findings}


def test_a_sound_run_is_found_sound_and_left_as_it_was(tiny_qwen: Path, tmp_path: Path) -> None:
    job = run_with("sound", tiny_qwen, tmp_path, temperature=0.7)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    found = list(examine(job, "main", job.run_folder, batches=2))
    assert {f.check: f.text for f in found if f.level not in ("ok", "note")} == {}
    assert "batches 2 to 3 of 3, from the weights of version 1" in found[0].text
    assert levels(found)["mismatch: arithmetic alone (same weights)"] == "ok"
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("engine", "cause"), [("raw", "cause: temperature"), ("cut", "cause: truncated support")])
def test_the_cause_of_a_mismatch_is_named(engine: str, cause: str, tiny_qwen: Path, tmp_path: Path) -> None:
    job = run_with(engine, tiny_qwen, tmp_path, temperature=0.1 if engine == "raw" else 1.0)
    found = levels(list(examine(job, "main", job.run_folder, batches=1)))
    assert found["mismatch: arithmetic alone (same weights)"] in ("warning", "error")
    assert found[cause] == "error"
    assert len([check for check in found if check.startswith("cause")]) == 1


def test_what_comes_before_any_formula_is_checked(tiny_qwen: Path) -> None:
    group = make_group("a", (0.0, 1.0), turns=2)
    first = group[0].turns[0]
    broken = msgspec.structs.replace(
        first,
        sampling=Sampling(top_p=0.9),
        versions=(),
        branch="drift",
        logprobs=bytes(len(first.logprobs)),
    )
    group[0] = msgspec.structs.replace(group[0], turns=(broken, group[0].turns[1]))
    record = BatchRecord(index=BatchIndex(record=1, version=1), episodes=tuple(group), settings=TRAIN)
    policy = Policy(model=str(tiny_qwen), engine=EngineSettings(arguments=("--logprobs_mode", "raw_logprobs")))
    found = levels(list(checks(policy, [record], Trainer(str(tiny_qwen), TRAIN).traits, vocab=100)))
    assert found["engine reports what it samples"] == "error"
    assert found["whole distribution sampled"] == "error"
    assert found["every token names its weights"] == "warning"
    assert found["same tokens in engine and learner"] == "error"
    assert found["each token trained once"] == "ok"
    assert found["conversations go on token by token"] == "warning"


def test_sampled_tokens_that_were_kept_are_no_reason_to_warn_and_lost_ones_are() -> None:
    first, second = make_group("a", (0.0, 1.0), turns=2)[0].turns
    levels_with = lambda **changed: doctor_checks._drift([first, msgspec.structs.replace(second, **changed)]).level  # noqa: E731
    assert levels_with(repaired=True) == "ok", "the proxy continued with them"
    assert levels_with(branch="history_edited") == "ok", "an agent wanted that"
    assert levels_with(branch="drift") == levels_with(branch="template_rewrote_history") == "warning"


def test_of_engines_that_others_started_nothing_is_promised() -> None:
    arguments = levels([_engine_arguments(Policy(model="m", engine=EngineSettings(urls=("http://gpu:8000",))))])
    assert arguments == {"engine reports what it samples": "note"}
    assert levels([_engine_arguments(Policy(model="m"))]) == {"engine reports what it samples": "ok"}


def test_a_token_that_folding_weighs_otherwise_or_loses_is_found(
    tiny_qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = BatchRecord(index=BatchIndex(record=1, version=1), episodes=tuple(make_group("a")), settings=TRAIN)
    traits = Trainer(str(tiny_qwen), TRAIN).traits
    assert levels(list(_weights([record], traits))) == {
        "each token trained once": "ok",
        "weights are set before folding": "ok",
    }

    def heavier(*args: Any, **kwargs: Any) -> Any:
        work = build_rank_batch(*args, **kwargs)
        work.passes[0].advantages[0] += 1
        return work

    monkeypatch.setattr(doctor_checks, "build_rank_batch", heavier)
    assert levels(list(_weights([record], traits)))["weights are set before folding"] == "error"

    def fewer(*args: Any, **kwargs: Any) -> Any:
        work = build_rank_batch(*args, **kwargs)
        return msgspec.structs.replace(work, passes=work.passes[1:])

    monkeypatch.setattr(doctor_checks, "build_rank_batch", fewer)
    assert levels(list(_weights([record], traits))) == {"each token trained once": "error"}


def test_a_head_that_computes_something_else_is_found(tiny_qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(str(tiny_qwen), TRAIN)
    record = BatchRecord(index=BatchIndex(record=1, version=1), episodes=tuple(make_group("a")), settings=TRAIN)
    assert head_agrees(trainer, record).level == "ok"

    def at_one(hidden, head, targets, _, **how):
        return score_hidden(hidden, head, targets, torch.ones(len(targets)), **how)

    monkeypatch.setattr(layout_model, "score_hidden", at_one)
    assert head_agrees(trainer, record).level == "error"


@pytest.mark.parametrize("turns", [1, 4])
def test_a_head_that_slips_where_a_chunk_meets_the_next_is_found(
    turns: int, tiny_qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However few tokens there are, and however many would fit one chunk."""
    trainer = Trainer(str(tiny_qwen), TRAIN)
    group = make_group("a", turns=turns, length=5)
    record = BatchRecord(index=BatchIndex(record=1, version=1), episodes=tuple(group), settings=TRAIN)
    product, chunks = logprob_head._multiply, list[int]()

    def slips(hidden: torch.Tensor, *args: Any) -> torch.Tensor:
        logits = product(hidden, *args)
        if chunks:
            logits[0] = logits[0].roll(1)
        chunks.append(len(hidden))
        return logits

    monkeypatch.setattr(logprob_head, "_multiply", slips)
    assert head_agrees(trainer, record).level == "error"
    assert len(chunks) >= 3
    monkeypatch.setattr(logprob_head, "_multiply", product)
    assert f", {chunks[0]} at a time" in head_agrees(trainer, record).text
    assert trainer.accelerator.unwrap_model(trainer.model).head_chunk is None, "which is for the check alone"


def test_batches_that_a_gpu_had_no_room_for_are_examined_in_the_passes_that_are_set_now(
    tiny_qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    episodes = tuple(episode for name in "abc" for episode in make_group(name, turns=3))
    longest = max(len(turn) for episode in episodes for turn in resolve(episode.turns))
    before = msgspec.structs.replace(TRAIN, micro_batch_tokens=100 * longest, layout="tree")
    record = BatchRecord(index=BatchIndex(record=1, version=1), episodes=episodes, settings=before)
    trainer = Trainer(str(tiny_qwen), msgspec.structs.replace(before, micro_batch_tokens=longest, layout="rows"))
    computed, forward = list[int](), LayoutModel.forward

    def seen(model: LayoutModel, placed: PlacedLayout, *rest: Any, **named: Any) -> Any:
        computed.append(placed.input_ids.shape[1])
        return forward(model, placed, *rest, **named)

    monkeypatch.setattr(LayoutModel, "forward", seen)
    compare(trainer, record)
    assert layouts_agree(trainer, record).level == "ok"
    assert max(computed) <= longest


def test_weights_that_are_not_finite_are_found_and_agree_with_nothing(tiny_qwen: Path) -> None:
    trainer = Trainer(str(tiny_qwen), TRAIN)
    record = BatchRecord(index=BatchIndex(record=1, version=1), episodes=tuple(make_group("a")), settings=TRAIN)
    with torch.no_grad():
        trainer.lm.get_input_embeddings().weight.fill_(math.nan)
    assert head_agrees(trainer, record).level == layouts_agree(trainer, record).level == "error"
    assert levels(list(explain([compare(trainer, record)]))) == {"mismatch: arithmetic alone (same weights)": "error"}


def test_signs_are_said_first_also_where_nothing_can_be_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    job = SwarmJob(run="r", folder=str(tmp_path), policies={"main": Policy(model="m", train=TRAIN)})
    job.run_folder.path.mkdir()
    (job.run_folder.path / "resolved.toml").write_text(job.to_toml())
    steps = [SOUND | {"version": version, "entropy": 0.001} for version in (1, 2)]
    events = [Event(run="r", source="learner.main", name="step", at=0.0, fields=fields) for fields in steps]
    job.run_folder.events.write_bytes(b"".join(msgspec.json.encode(event) + b"\n" for event in events))
    made = CliRunner().invoke(main, ["doctor", str(job.run_folder.path), "--device", "cpu"])
    assert made.exit_code == 1
    told = "no entropy left: entropy 0.001 (collapse below 0.01)"
    sign, replay = made.output.index(told), made.output.index("replay: stored batches could not be")
    assert sign < replay
    assert f"{job.run_folder.path}/main/batches: no batch was trained yet" in made.output
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "", "nothing takes a GPU from those that train"
    copy = shutil.copytree(job.run_folder.path, tmp_path / "copy")
    unreadable = shutil.copytree(copy, tmp_path / "unreadable")
    (unreadable / "events.jsonl").unlink()
    (unreadable / "events.jsonl").mkdir()
    made = CliRunner().invoke(main, ["doctor", str(unreadable)])
    assert (made.exit_code, "events.jsonl: cannot be read (Is a directory)" in made.output) == (1, True), made.output
    job.run_folder.events.unlink()
    made = CliRunner().invoke(main, ["doctor", str(copy)])
    assert told in made.output, "a copy is read where it lies"
    assert f"{copy}/main/batches: no batch was trained yet" in made.output


def test_the_command_says_what_it_found_and_its_status_whether_something_is_wrong(
    tiny_qwen: Path, tmp_path: Path
) -> None:
    for engine, status in (("sound", 0), ("cut", 1)):
        job = run_with(engine, tiny_qwen, tmp_path / engine)
        (job.run_folder.path / "resolved.toml").write_text(job.to_toml())
        (segment,) = job.run_folder.batch_log("main").glob("*.log")
        with segment.open("ab") as log:
            log.write(b"SQRC")  # a learner is at it
        made = CliRunner().invoke(main, ["doctor", str(job.run_folder.path), "--batches", "1"])
        assert made.exit_code == status, made.output
        first = made.output.partition("\n")[0]
        assert first.startswith(("ok      verdict: sound", "error   verdict: wrong: ")[status])
        assert ("cause: truncated support" in first) == bool(status)
        assert f"note    while reading: batch log torn tail: segment {segment}" in made.output
        assert "[info" not in made.output, "nor is a line of its log"
        assert "log-softmax in chunks and in FP32" in made.output
        assert ("cause: truncated support" in made.output) == bool(status)


def differing(gap: NDArray[np.float64], **changed: Any) -> Compared:
    """Tokens whose log-probabilities in the learner are `gap` above the engine's."""
    n = len(gap)
    none = np.zeros(n, np.bool_)
    whole = Compared(
        logprobs=np.full(n, -1.0) + gap,
        at_one=np.full(n, -1.0) + gap,
        behavior_logprobs=np.full(n, -1.0),
        lag=np.zeros(n, np.int64),
        pushed=none,
        repaired=none,
        held=none,
    )
    return msgspec.structs.replace(whole, **changed)


@pytest.mark.parametrize(("size", "level"), [(0.05, "ok"), (0.3, "ok"), (0.6, "error"), (3.0, "error")])
def test_an_fp8_engine_is_certified_up_to_the_gap_that_ratios_correct(size: float, level: str) -> None:
    noise = np.random.default_rng(0).normal(0, size, 4000)
    found = certify_fp8([differing(noise)], ratio_cap=20.0)
    assert found.level == level
    assert ("certified on 4000 tokens" in found.text) == (level == "ok")
    assert ("engine.quantization = 'none'" in found.text) == (level == "error")


def test_an_fp8_engine_is_judged_by_tokens_of_the_same_weights_and_by_finite_ones() -> None:
    far = differing(np.full(100, 3.0))
    older = msgspec.structs.replace(far, lag=np.ones(100, np.int64))
    assert certify_fp8([older], ratio_cap=20.0).level == "note"
    assert certify_fp8([older, differing(np.zeros(100))], ratio_cap=20.0).level == "ok"
    assert certify_fp8([differing(np.full(100, np.nan))], ratio_cap=20.0).level == "error"


def test_turns_that_were_held_to_a_grammar_are_told_apart_and_are_no_alarm() -> None:
    """Their behavior_logprobs is normalised over what the grammar allowed: that is no fault of the engine."""
    n = 200
    gap = np.where(np.arange(n) < 100, -3.0, 0.0)
    mixed = Compared(
        logprobs=np.full(n, -1.0) + gap,
        at_one=np.full(n, -1.0) + gap,
        behavior_logprobs=np.full(n, -1.0),
        lag=np.zeros(n, np.int64),
        pushed=np.zeros(n, np.bool_),
        repaired=np.zeros(n, np.bool_),
        held=gap < 0,
    )
    found = list(explain([mixed]))
    assert {finding.level for finding in found} == {"ok"}
    assert [finding.check for finding in found] == [
        "mismatch: arithmetic alone (same weights)",
        "mismatch: held to a grammar",
    ]
    assert {f.level for f in explain([msgspec.structs.replace(mixed, held=np.zeros(n, np.bool_))])} == {"error"}
