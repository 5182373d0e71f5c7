"""A teacher behind an engine teaches what the same model teaches in the learner's memory, or says why it cannot."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from support.episodes import make_group
from support.tiny_model import tiny_model
from swarmq.config import Loss, Policy, SwarmJob, Train
from swarmq.errors import LearnerError
from swarmq.learner.demonstrations import parse_demonstration
from swarmq.learner.doctor.examine import layouts_agree
from swarmq.learner.feed.ipc import StopSignal
from swarmq.learner.store.records import BatchIndex, BatchReady, BatchRecord, ToIO, Warn, encode_record
from swarmq.learner.teachers import served_teacher
from swarmq.learner.teachers.availability import find_teacher_trouble
from swarmq.learner.train.loop import Learner, LearnerIntervals
from swarmq.learner.train.trainer import Trainer
from swarmq.messages import Rollout, Sampling

TRAIN = Train(
    gradient_checkpointing=False,
    learning_rate=1e-4,
    warmup_steps=0,
    loss=Loss(name="distill"),
    teacher="the one in memory",
    steps_per_batch=2,
)
BATCH = tuple(episode for name in "abc" for episode in make_group(name, (0.0, 1.0), turns=2))


class Vllm(ThreadingHTTPServer):
    """Answers as vLLM does when asked for the log-probabilities of a prompt."""

    def __init__(self, model: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.lock = threading.Lock()
        self.answers = dict[str, Any]()
        """Path -> what is answered there in place of the truth."""
        self.away = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def prompt_logprobs(self, ids: list[int], top_k: int) -> list[Any]:
        """The token of the prompt first, then the likeliest ones."""
        with self.lock, torch.no_grad():
            scored = self.model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        named = [
            dict.fromkeys([token, *row.topk(top_k).indices.tolist()])
            for row, token in zip(scored, ids[1:], strict=False)
        ]
        return [None, *({str(t): {"logprob": float(scored[at, t])} for t in each} for at, each in enumerate(named))]


class Handler(BaseHTTPRequestHandler):
    server: Vllm

    def do_GET(self) -> None:
        if self.server.away:
            self.send_error(503)
        else:
            self._answer(self.server.answers.get(self.path, {"data": [{"id": "teacher"}]}))

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert asked["model"] == "teacher"
        answers = self.server.answers
        self._answer(answers[self.path] if self.path in answers else {"choices": [self._choice(asked)]})

    def _choice(self, asked: dict[str, Any]) -> dict[str, Any]:
        return {"prompt_logprobs": self.server.prompt_logprobs(asked["prompt"], asked["prompt_logprobs"])}

    def _answer(self, body: Any) -> None:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def teacher(other_qwen: Path) -> Iterator[Vllm]:
    server = Vllm(other_qwen)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def stepped(
    model: Path, teacher: str, batch: tuple[Rollout, ...] = BATCH, *, loss: Loss = TRAIN.loss, **changed: Any
) -> dict[str, Any]:
    """The figures of a step."""
    train = msgspec.structs.replace(TRAIN, teacher=teacher, loss=loss, **changed)
    index = BatchIndex(record=1, version=1, trained=tuple(e.episode_id for e in batch))
    return Trainer(str(model), train).step(BatchRecord(index=index, episodes=batch, settings=train))


def test_a_served_teacher_teaches_what_a_loaded_one_does(tiny_qwen: Path, other_qwen: Path, teacher: Vllm) -> None:
    loaded, served = stepped(tiny_qwen, str(other_qwen)), stepped(tiny_qwen, teacher.url)
    itself = stepped(tiny_qwen, str(tiny_qwen))
    for figure in ("loss", "grad_norm"):
        assert served[figure] == pytest.approx(loaded[figure], rel=1e-3)
        assert served[figure] != pytest.approx(itself[figure], rel=0.1), "this figure shows nothing"


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_the_likeliest_tokens_of_a_served_teacher_teach_what_those_of_a_loaded_one_do(
    tiny_qwen: Path, other_qwen: Path, teacher: Vllm, beta: float
) -> None:
    loss = Loss(name="distill", top_k=4, distill_beta=beta)
    loaded, served, itself = (
        stepped(tiny_qwen, str(source), loss=loss) for source in (other_qwen, teacher.url, tiny_qwen)
    )
    for figure in ("loss", "grad_norm"):
        assert served[figure] == pytest.approx(loaded[figure], rel=1e-3)
    assert itself["loss"] == pytest.approx(0, abs=1e-6)
    assert served["loss"] > 5e-4


def test_likely_tokens_that_the_policy_lacks_are_left_out(tiny_qwen: Path, other_qwen: Path, tmp_path: Path) -> None:
    """Larger models of a family may have more rows than tokens."""
    larger = AutoModelForCausalLM.from_pretrained(other_qwen)
    larger.resize_token_embeddings(160)
    torch.manual_seed(0)
    with torch.no_grad():
        larger.get_input_embeddings().weight[128:].normal_(std=0.04)
    larger.save_pretrained(tmp_path)
    server = Vllm(tmp_path)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    loss = Loss(name="distill", top_k=4)
    loaded, served = (stepped(tiny_qwen, str(source), loss=loss) for source in (tmp_path, server.url))
    server.shutdown()
    server.server_close()
    assert served["loss"] == pytest.approx(loaded["loss"], rel=1e-3)
    assert served["loss"] > 1e-4


def test_a_teacher_that_is_said_to_have_another_tokenizer_teaches_the_same_if_it_is_the_same_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokens of text that both write in the same way are spans of one token each."""
    policy, taught = str(tiny_model()), tiny_model(seed=1)
    tokenizer = AutoTokenizer.from_pretrained(policy)
    chat = [{"role": "user", "content": "6 * 7?"}, {"role": "assistant", "content": "It is 42, or 北京."}]
    batch = (parse_demonstration(json.dumps({"messages": chat}), tokenizer, where="here"),)
    monkeypatch.setattr(served_teacher, "check_served_judge", lambda *_, **__: None)
    server = Vllm(taught)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    plain, aligned = (
        stepped(Path(policy), server.url, batch, teacher_tokenizer=tokenizer) for tokenizer in (None, str(taught))
    )
    server.shutdown()
    server.server_close()
    for figure in ("loss", "grad_norm"):
        assert aligned[figure] == pytest.approx(plain[figure], rel=1e-4)
        assert abs(plain[figure]) > 1e-3


def test_the_doctor_replays_a_batch_with_a_served_teacher(tiny_qwen: Path, teacher: Vllm) -> None:
    train = msgspec.structs.replace(TRAIN, teacher=teacher.url)
    record = BatchRecord(index=BatchIndex(record=1, version=1), episodes=BATCH, settings=train)
    assert layouts_agree(Trainer(str(tiny_qwen), train), record).level == "ok"


@pytest.mark.parametrize(
    ("path", "answer", "says"),
    [
        ("/v1/completions", {"choices": [{}]}, r"prompt_logprobs for all tokens \(0 of \d+\): .* prompt_logprobs"),
        ("/v1/completions", {"choices": [{"prompt_logprobs": [None, {"3": {"logprob": -1.0}}]}]}, r"\(0 of \d+\)"),
        ("/v1/completions", {"choices": [{"prompt_logprobs": [None, {"3": {"logprob": None}}]}]}, "Expected `float`"),
        ("/v1/completions", {"choices": []}, "completions does not answer as vLLM does: .* length >= 1"),
        ("/v1/completions", {}, "missing required field `choices`"),
        ("/v1/models", {"data": []}, "models does not answer as vLLM does: .* length >= 1"),
        ("/v1/models", b"<html>", "JSON is malformed"),
    ],
)
def test_an_engine_that_does_not_say_how_likely_prompts_are_is_no_teacher(
    path: str, answer: Any, says: str, tiny_qwen: Path, teacher: Vllm
) -> None:
    teacher.answers[path] = answer
    with pytest.raises(LearnerError, match=rf"train\.teacher: {teacher.url.removesuffix('/v1')}.*{says}"):
        stepped(tiny_qwen, teacher.url)


def test_a_teacher_that_is_not_there_is_named(tiny_qwen: Path) -> None:
    with pytest.raises(
        LearnerError, match=r"http://127\.0\.0\.1:9 does not answer \(Cannot connect .* nothing is lost"
    ):
        stepped(tiny_qwen, "http://127.0.0.1:9/v1")


class Waiting:
    """In the place of the batch feeder: has a batch, and does as `react` says when people are told that it waits."""

    def __init__(self, batch: BatchRecord, react: Callable[[], None]) -> None:
        self._batches = [BatchReady(record=encode_record(batch), replayed=False)]
        self._react = react
        self.told: list[str] = []

    def next(self, **_: Any) -> BatchReady | None:
        return self._batches.pop() if self._batches else None

    def send(self, message: ToIO) -> None:
        if isinstance(message, Warn):
            self.told.append(message.text)
            if len(self.told) == 3:
                self._react()

    def finish(self) -> None: ...


@pytest.mark.parametrize("comes", [True, False], ids=["until it answers", "until it is stopped"])
def test_a_batch_waits_for_a_teacher_that_is_away_and_people_are_told_again_and_again(
    tmp_path: Path, tiny_qwen: Path, teacher: Vllm, comes: bool
) -> None:
    teacher.away, stop = True, StopSignal()
    train = msgspec.structs.replace(TRAIN, teacher=teacher.url, trackers=(), max_steps=1)
    job = SwarmJob(run="r", folder=str(tmp_path), policies={"main": Policy(model=str(tiny_qwen), train=train)})
    record = BatchRecord(index=BatchIndex(record=1, version=1), episodes=BATCH, settings=train)
    link = Waiting(record, (lambda: setattr(teacher, "away", False)) if comes else stop.ask)
    learner = Learner(job, "main", pusher=None, stop=stop, intervals=LearnerIntervals(ensure_s=0.01, warn_s=0.0))
    learner.run(link)
    assert learner.trainer.version == comes
    assert link.told == [
        f"learner main: its teacher at {teacher.url} answers 503: start it; batches wait for it",
        *[f"learner main: a batch waits for its teacher at {teacher.url} answers 503: start it; nothing is lost"] * 2,
    ]


def test_a_batch_of_a_teacher_that_has_moved_is_trained_with_it_where_it_is_now(tiny_qwen: Path, teacher: Vllm) -> None:
    before, now = (msgspec.structs.replace(TRAIN, teacher=url) for url in ("http://127.0.0.1:9/v1", teacher.url))
    record = BatchRecord(index=BatchIndex(record=1, version=1), episodes=BATCH, settings=before)
    assert Trainer(str(tiny_qwen), now).step(record)["loss"] == stepped(tiny_qwen, teacher.url)["loss"]


def test_who_does_not_answer_is_told_from_who_refuses(teacher: Vllm) -> None:
    assert find_teacher_trouble(teacher.url) == find_teacher_trouble(f"{teacher.url}/none") == ""
    assert find_teacher_trouble("http://127.0.0.1:9").startswith("does not answer (")


def test_a_served_teacher_does_not_judge_other_temperatures(tiny_qwen: Path, teacher: Vllm) -> None:
    warm = Sampling(temperature=0.7)
    batch = tuple(
        msgspec.structs.replace(e, turns=tuple(msgspec.structs.replace(t, sampling=warm) for t in e.turns))
        for e in BATCH
    )
    with pytest.raises(LearnerError, match="only score tokens sampled at temperature 1;"):
        stepped(tiny_qwen, teacher.url, batch)
