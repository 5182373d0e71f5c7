"""Which models train: a tiny random copy of each architecture goes through the whole product, on a real vLLM on the CPU.

    python -m benchmarks.models --rest              # those without a result
    python -m benchmarks.models --only "Qwen3; Llama"

Each model has a process and an engine of its own, and the result of a model is saved when it is done. In FP32:

    loaded     vLLM starts with the model, as `swarmq up` starts it
    served     the proxy answers chats, with log-probabilities; compared with transformers' (float64, every call alone)
    trained    the learner computes rows and, where it can, prefix trees; its gradient is compared with transformers'. Its trainer takes
               a step with the recorded turns, and the new weights are pushed to the engine
    pushed     the proxy answers with the new weights, and log-probabilities are compared again
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import math
import multiprocessing
import os
import re
import runpy
import signal
import sys
import tempfile
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec
import torch
from aiohttp import ClientSession, TCPConnector
from transformers import AutoConfig

from benchmarks import oracle
from benchmarks.report import commit, kept, parser, save, table
from benchmarks.vlm.architecture import QWEN3_VL
from support.engine import SECRET, TORCHVISION
from support.proxy import ROOT, Agent, served
from support.tiny_vision_model import tiny_vision_model
from swarmq.broker import topology
from swarmq.config import SwarmJob, Train
from swarmq.engine.client.vllm import VllmEngine
from swarmq.engine.server.launch import EngineProcess, get_installed_vllm
from swarmq.engine.server.model_check import check_model
from swarmq.engine.server.startup_error import find_root_cause
from swarmq.learner.store.records import BatchIndex, BatchRecord
from swarmq.learner.train.trainer import Trainer
from swarmq.messages import Rollout, Slot, Turn, unpack_floats, unpack_ids
from swarmq.proxy.http.app import create_app
from swarmq.runtime.processes import die_with_parent, reserve_port
from swarmq.testing.memory_broker import MemoryBroker
from swarmq.timeline import resolve
from swarmq.toy_model.tokenizer import build_tokenizer
from swarmq.weights.push.pusher import WeightPusher

TOLERANCES = {"float32": 1e-3, "bfloat16": 0.2}
"""Largest difference of a log-probability, in nats, with which an engine of this precision counts as equal to transformers."""
GRADIENT_TOLERANCE = 1e-4
"""Largest relative difference of the gradient with which the learner counts as equal to transformers."""
NEARER = 5
"""How many times nearer an engine must be to the weights after a step than to those before it, on average, so that a push without effect is
noticed."""
RUN, POLICY = "models", "main"
CONTEXT = 512
TEXTS = (
    "What is the sum of 17 and 25? It is 42, and that is that: the answer is in the second line of the file.",
    "Read the task, think, call a tool and answer in a few words. Then say whether the quick brown fox jumped.",
)
"""What the tokenizer learns, and what agents say."""
TRAIN = Train(advantage="ema", warmup_steps=0, learning_rate=1e-3)
"""An advantage that an episode has without others to compare it with."""

MLA = {"qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "kv_lora_rank": 512, "head_dim": None}
"""The only sizes for which vLLM's CPU build computes multi-head latent attention; its kernel needs BF16."""

SIGMOID = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
"""Router of DeepSeek V3, as its published configuration names it to vLLM; transformers knows it by the type of the model."""

ALL = {"num_experts_per_tok": 4}
"""All experts, for engines in BF16: rounding changes a choice between close ones."""

LFM2 = {
    "block_dim": 128,
    "block_ff_dim": 192,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "conv_dim": 128,
    "conv_dim_out": 128,
    "conv_use_xavier_init": True,
}
"""Fields of published configurations, which vLLM reads beside those of transformers."""


class Model(NamedTuple):
    """A row of the table."""

    name: str
    """As users call the models of this architecture."""
    family: str
    """As transformers calls it."""
    fields: Mapping[str, Any] = {}
    """What the configuration has besides `oracle.SHAPE` and what `oracle.FAMILIES` says of the family."""
    dtype: str = "float32"
    """Of the engine."""
    chats: bool = True
    """Whether it is asked in chats, else by texts alone: vLLM renders the chats of gpt-oss with a vocabulary that a tiny model has not."""
    make: Callable[[], Path] | None = None
    """Makes the folder, for a model that takes images."""
    refused: str = ""
    """Architecture in config.json of a model that swarmq refuses to train: vLLM is not tried."""


MODELS = (
    Model("Qwen2, Qwen2.5", "qwen2"),
    Model("Qwen2.5-VL", "qwen2_5_vl", make=tiny_vision_model),
    Model("Qwen3-VL", "qwen3_vl", make=partial(tiny_vision_model, QWEN3_VL)),
    Model("Qwen3.5", "qwen3_5", refused="Qwen3_5ForConditionalGeneration"),
    Model("Qwen1.5-MoE, Qwen2-MoE", "qwen2_moe"),
    Model("Qwen3", "qwen3"),
    Model("Qwen3-MoE", "qwen3_moe"),
    Model(
        "Qwen3-Next",
        "qwen3_next",
        {**oracle.EXPERTS, **ALL, "mlp_only_layers": [], "linear_key_head_dim": 128, "linear_value_head_dim": 128},
        dtype="bfloat16",
    ),
    Model("Llama 2, 3", "llama"),
    Model("Llama 4", "llama4", refused="Llama4ForConditionalGeneration"),
    Model("Mistral", "mistral"),
    Model("Mistral Small 3", "mistral3", refused="Mistral3ForConditionalGeneration"),
    Model("Ministral 3", "ministral3"),
    Model("Mixtral", "mixtral"),
    Model("Gemma 1", "gemma"),
    Model("Gemma 2", "gemma2"),
    Model("Gemma 3, text", "gemma3_text"),
    Model("Gemma 3, images", "gemma3", refused="Gemma3ForConditionalGeneration"),
    Model("Phi-1, Phi-2", "phi"),
    Model("Phi-3, Phi-4", "phi3"),
    Model("Phi-4-mini", "phi3", {"partial_rotary_factor": 0.75, "tie_word_embeddings": True}),
    Model("Phi-3.5-MoE", "phimoe"),
    Model("GLM-4", "glm4"),
    Model("GLM-4.5, 4.6", "glm4_moe"),
    Model("GLM-4.7-Flash", "glm4_moe_lite", {**oracle.DEEPSEEK, **MLA, **SIGMOID, **ALL}, dtype="bfloat16"),
    Model("GPT-OSS", "gpt_oss", chats=False),
    Model("OLMo 2", "olmo2"),
    Model("OLMo 3", "olmo3"),
    Model("OLMoE", "olmoe"),
    Model("DeepSeek V2", "deepseek_v2", MLA, dtype="bfloat16"),
    Model("DeepSeek V3, R1", "deepseek_v3", {**MLA, **SIGMOID, **ALL}, dtype="bfloat16"),
    Model("Granite 3, 4 dense", "granite"),
    Model("Granite 3 MoE", "granitemoe"),
    Model("Command R7B, Command A", "cohere2"),
    Model("SmolLM3", "smollm3"),
    Model("Seed-OSS", "seed_oss"),
    Model("EXAONE 4", "exaone4"),
    Model("ERNIE 4.5", "ernie4_5"),
    Model("Hunyuan, dense", "hunyuan_v1_dense"),
    Model("StarCoder2", "starcoder2"),
    Model("LFM2", "lfm2", LFM2),
    Model("Falcon-H1", "falcon_h1", {"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_state": 16}),
    Model(
        "MiniMax-M2",
        "minimax_m2",
        {
            **oracle.LOCAL_EXPERTS,
            "intermediate_size": 96,
            "rotary_dim": 16,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
        },
    ),
)


def main() -> None:
    """Measure all models, or some, and save."""
    options = parser(__doc__)
    options.add_argument("--only", default="", help="names, with semicolons; the results of the others are kept")
    options.add_argument("--rest", action="store_true", help="models without a result")
    asked = options.parse_args()
    os.environ |= oracle.ENGINE  # before vLLM is imported
    from vllm.entrypoints.launchers.api_server import entry  # noqa: F401, PLC0415 - for all engines

    _, detail = kept("models", out=asked.out)
    names = [model.name for model in MODELS]
    rows: dict[str, Any] = {name: row for name, row in detail.get("models", {}).items() if name in names}
    wanted = [name.strip() for name in asked.only.split(";")] if asked.only else names
    if unknown := set(wanted) - set(names):
        options.error(f"no model is called {', '.join(sorted(unknown))}; there are {'; '.join(names)}")
    for name in [name for name in wanted if not asked.rest or name not in rows]:
        rows[name] = measure(name)
        print(name, rows[name], file=sys.stderr, flush=True)
        write(rows, asked.out, finished=False)
    print(
        table(
            ("model", "trained", "why not"),
            [(name, row["trained"], row.get("reason", "")) for name, row in rows.items()],
        )
    )
    write(rows, asked.out, finished=True)


def write(rows: Mapping[str, Mapping[str, Any]], out: Path | None, *, finished: bool) -> None:
    """Into the results file, in the order of MODELS."""
    ordered = {model.name: rows[model.name] for model in MODELS if model.name in rows}
    save("models", figures_of(ordered), detail={"models": ordered}, out=out, finished=finished)


def figures_of(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Counts, and the worst of those that were trained in FP32."""
    trained = [row for row in rows.values() if row["trained"]]
    exact = [row for row in trained if row.get("dtype") != "bfloat16"]
    worst = {
        "logprob_max_abs": ("engine_max", "pushed_max"),
        "grad_rel_max": ("grad_rel",),
        "k3_max": ("engine_k3", "pushed_k3"),
    }
    return {
        "models": len(rows),
        "trained": len(trained),
        "refused": len(rows) - len(trained),
        **{
            figure: max((row[field] for row in exact for field in fields), default=0.0)
            for figure, fields in worst.items()
        },
    }


def measure(name: str) -> dict[str, Any]:
    """Return the row of a model. What was not reached is missing, and `reason` says why."""
    model = next(model for model in MODELS if model.name == name)
    row = {
        "family": model.family,
        "dtype": model.dtype,
        "date": datetime.now(UTC).date().isoformat(),
        "vllm": get_installed_vllm(),
        "transformers": importlib.metadata.version("transformers"),
        "commit": commit(),
        **({} if model.refused else {"loaded": False, "served": False}),
        "trained": False,
    }
    try:
        return row | oracle.in_a_process(run, model.name)
    except oracle.NotDoneError as error:
        return row | {"by": "the process", "reason": str(error)}


class RefusedError(Exception):
    """A part refused or computed otherwise."""

    def __init__(self, by: str, reason: str) -> None:
        super().__init__(reason)
        self.by = by


def run(name: str) -> dict[str, Any]:
    """Take a model through the product, in a process of its own."""
    torch.set_num_threads(1)
    model, row = next(model for model in MODELS if model.name == name), dict[str, Any]()
    with tempfile.TemporaryDirectory() as place:
        try:
            asyncio.run(Measurement(model, Path(place), row).run())
        except RefusedError as error:
            traceback.print_exception(error)
            reason = (str(error).strip().splitlines() or ["nothing"])[-1].replace(f"{place}/", "")
            reason = re.sub(r"^EngineError: vLLM for model |; its log is engine.log$", "", reason)
            row |= {"by": error.by, "reason": reason}
    return row


class Measurement:
    """The way of one model, from its configuration to an engine with trained weights."""

    def __init__(self, model: Model, place: Path, row: dict[str, Any]) -> None:
        self._model, self._place, self._row = model, place, row
        self._folder, self._trained, self._vocab = place / "model", place / "trained", oracle.VOCAB

    async def run(self) -> None:
        """Fill the row. Raises RefusedError."""
        with blame("transformers"):
            self._make()
        refusal = self._find_refusal()
        if refusal and self._model.refused:
            raise refusal
        try:
            refused = await self._serve(trains=refusal is None)
        except RefusedError as error:
            refused = error
            if refusal is None:  # the learner alone
                self._compare_learner(oracle.make_prompts(vocab=self._vocab))
        if refused := refusal or refused:
            raise refused

    def _find_refusal(self) -> RefusedError | None:
        """Return what `swarmq up` says against training the model, before it starts anything."""
        try:
            check_model(str(self._folder), trained=True)
        except Exception as error:
            return RefusedError("swarmq", str(error).replace(f"{self._folder} ", ""))
        return None

    async def _serve(self, *, trains: bool) -> RefusedError | None:
        """Start the engine and take the model through it; return the refusal, because a raised one would end the proxy's tasks."""
        async with open_stage(self._model, self._folder, self._place, trains=trains) as stage:
            self._row["loaded"] = True
            try:
                await self._ask_and_train(stage, trains=trains)
            except RefusedError as error:
                return error
        return None

    async def _ask_and_train(self, stage: Stage, *, trains: bool) -> None:
        with blame("proxy"):
            turns = await stage.ask_episode("first", chats=self._model.chats)
        self._row["served"] = True
        if trains:
            self._compare_learner([as_oracle_turn(turn, whole) for turn, whole in turns])
        self._compare_engine("engine", turns, self._folder)
        if not trains:
            return
        with blame("learner"):
            trainer = self._step([turn for turn, _ in turns])
            self._trained.mkdir()
            trainer.save_weights(self._trained)
        with blame("push"):
            pusher = WeightPusher([stage.engine.url], self._place, secret=SECRET)
            await asyncio.to_thread(pusher.push, trainer.weights_to_push(), 1)
            after = await stage.ask_episode("second", chats=self._model.chats)
        self._compare_engine("pushed", after, self._trained)
        self._row["trained"] = True

    def _make(self) -> None:
        if self._model.make:
            self._folder.symlink_to(self._model.make())
            return
        if self._model.refused:
            config = AutoConfig.for_model(self._model.family, architectures=[self._model.refused])
            config.save_pretrained(self._folder)
            return
        tokenizer = build_tokenizer(TEXTS, vocabulary=512)
        ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        fields = {**dict(oracle.FAMILIES.get(self._model.family, ("", {}))[1]), **self._model.fields}
        self._vocab = len(tokenizer)
        lm = oracle.random_lm(self._model.family, {**fields, "vocab_size": self._vocab, **ends})
        lm.save_pretrained(self._folder)
        tokenizer.save_pretrained(self._folder)

    def _compare_engine(self, what: str, turns: Sequence[tuple[Turn, Any]], folder: Path) -> None:
        """Compare the log-probabilities that the proxy recorded with those of transformers."""
        asked = [as_oracle_turn(turn, whole) for turn, whole in turns]
        with blame("transformers"):
            truth, _ = oracle.oracle(folder, asked)
        gaps = [truth[t, at] - one.logprobs[at] for t, one in enumerate(asked) for at in range(len(one.sampled))]
        self._row[f"{what}_max"] = worst = max(map(abs, gaps))
        self._row[f"{what}_k3"] = sum(math.exp(gap) - 1 - gap for gap in gaps) / len(gaps)
        self._row[f"{what}_tokens"] = len(gaps)
        if not worst < TOLERANCES[self._model.dtype]:
            when = "" if what == "engine" else " after the push"
            raise RefusedError(
                "vLLM",
                f"computes other log-probabilities than transformers{when}, by up to {worst:.2g} nats in {self._model.dtype}",
            )
        if what == "pushed":
            before, _ = oracle.oracle(self._folder, asked)
            moved = [before[t, at] - one.logprobs[at] for t, one in enumerate(asked) for at in range(len(one.sampled))]
            if sum(map(abs, moved)) < NEARER * sum(map(abs, gaps)):
                raise RefusedError("push", "the engine samples from the former weights")

    def _compare_learner(self, turns: Sequence[oracle.Turn]) -> None:
        with blame("learner"):
            found = oracle.compare(self._folder, turns)
        self._row |= {field: found[field] for field in ("layouts", "logprob_max", "grad_rel")}
        if not found["grad_rel"] < GRADIENT_TOLERANCE:
            raise RefusedError("learner", f"its gradient differs from transformers' by {found['grad_rel']:.2g}")

    def _step(self, turns: Sequence[Turn]) -> Trainer:
        episode = Rollout(
            run=RUN,
            policy=POLICY,
            episode_id=turns[0].episode_id,
            slot=Slot(task_id="t", repeat=0),
            kind="default",
            group_id="t/0",
            group_members=1,
            group_size=1,
            reward=1.0,
            turns=tuple(turns),
        )
        index = BatchIndex(record=1, version=1)
        trainer = Trainer(str(self._folder), TRAIN, max_model_len=CONTEXT)
        fields = trainer.step(BatchRecord(index=index, episodes=(episode,), settings=TRAIN, baselines={"default": 0.0}))
        if "skipped" in fields:
            raise RefusedError("learner", f"took no step: {fields['skipped']}")
        return trainer


@contextmanager
def blame(part: str) -> Iterator[None]:
    """Turn every error inside the block into a refusal by `part`."""
    try:
        yield
    except RefusedError:
        raise
    except Exception as error:
        raise RefusedError(part, f"{type(error).__name__}: {error}") from error


def as_oracle_turn(turn: Turn, whole: Any) -> oracle.Turn:
    prompt = whole.token_ids[: whole.prompt_length].tolist()
    return oracle.Turn(prompt, unpack_ids(turn.sampled_ids).tolist(), unpack_floats(turn.logprobs).tolist())


class Stage(Agent):
    """An agent, and the proxy and engine behind it."""

    engine: VllmEngine
    broker: MemoryBroker
    process: EngineProcess

    async def ask_episode(self, episode: str, *, chats: bool) -> list[tuple[Turn, Any]]:
        """Return the turns of `_ask`. Raises RefusedError if the engine ends meanwhile."""
        asking, ended = asyncio.create_task(self._ask(episode, chats=chats)), asyncio.create_task(self.process.wait())
        await asyncio.wait({asking, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not asking.done():
            asking.cancel()
            raise RefusedError("vLLM", f"ends when it is asked: {find_root_cause(self.process.log_path, 0)}")
        ended.cancel()
        return await asking

    async def _ask(self, episode: str, *, chats: bool) -> list[tuple[Turn, Any]]:
        """Return the turns of an episode, with their whole token sequences: two answers to a question, and one to each of two
        conversations, or texts, that go on from the first."""
        key, question = self.key(episode), TEXTS[0]
        followers = ("Why?", TEXTS[1])
        if chats:
            asked = {"role": "user", "content": question}
            first = await self.call("chat/completions", key, messages=[asked], logprobs=True, n=2)
            said = {"role": "assistant", "content": first[0]["message"]["content"]}
            for text in followers:
                messages = [asked, said, {"role": "user", "content": text}]
                await self.call("chat/completions", key, messages=messages, logprobs=True)
        else:
            fields = {"logprobs": 1, "max_tokens": oracle.TOKENS}
            first = await self.call("completions", key, prompt=question, n=2, **fields)
            for text in followers:
                await self.call("completions", key, prompt=f"{question}{first[0]['text']} {text}", **fields)
        turns: list[Turn] = []
        async with self.broker.consume(topology.inbox(self.run), prefetch=10) as deliveries:
            while len(turns) < 4:
                delivery = await anext(deliveries)
                await delivery.ack()
                if isinstance(delivery.message, Turn):
                    turns.append(delivery.message)
        return list(zip(turns, resolve(turns), strict=True))

    async def call(self, route: str, key: str, **body: Any) -> Any:
        """Return the choices of an answer with log-probabilities."""
        status, _, raw = await self.post({"model": POLICY, **body}, f"/v1/{route}", key=key)
        if status != 200:
            raise RuntimeError(f"{status} {msgspec.json.decode(raw)['error']['message']}")
        choices = msgspec.json.decode(raw)["choices"]
        if not all(any(choice["logprobs"].values()) for choice in choices):
            raise RuntimeError("an answer without log-probabilities")
        return choices


class ForkedEngine(EngineProcess):
    """An engine with the product's arguments and environment, whose process is a copy of this one: vLLM's modules are not imported for every
    model."""

    async def _spawn(
        self, argv: Sequence[str], environment: Mapping[str, str], sink: IO[bytes]
    ) -> asyncio.subprocess.Process:
        from vllm.model_executor.models import registry  # noqa: PLC0415 - after the variables of `main`

        def serve() -> None:
            """Run vLLM's server in the place of the command."""
            die_with_parent(signal.SIGKILL)
            signal.set_wakeup_fd(-1)
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
            multiprocessing.process._parent_process = None  # noqa: SLF001 - vLLM would take itself for a child of the wrong process
            registry._run_in_subprocess = lambda find: find()  # noqa: SLF001 - another process would import vLLM again
            os.environ.clear()
            os.environ.update(environment)
            sys.argv = [module, *words]
            status = 1
            try:
                runpy.run_module(module, run_name="__main__", alter_sys=True)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)

        _, _, module, *words = argv
        quiet = asyncio.subprocess.DEVNULL
        return await asyncio.create_subprocess_exec(
            "/bin/false", stdin=quiet, stdout=sink, stderr=sink, preexec_fn=serve
        )


@asynccontextmanager
async def open_stage(model: Model, folder: Path, place: Path, *, trains: bool) -> AsyncIterator[Stage]:
    """Start engine and proxy. Raises RefusedError if the engine does not start."""
    policy = {
        "model": str(folder),
        "engine": {"max_model_len": CONTEXT, "dtype": model.dtype, "start_timeout_s": 600.0},
        "sampling": {"max_tokens": oracle.TOKENS, "temperature": oracle.TEMPERATURE},
    }
    groups = {"group_size": 1, "min_group": 1}
    job = SwarmJob.build({"run": RUN, "folder": str(place / "runs"), "policies": {POLICY: policy}, "groups": groups})
    broker = MemoryBroker()
    await broker.declare(RUN, policies=[POLICY], kinds=job.task_kinds)
    sees = model.make is not None
    path = os.pathsep.join([*map(str, TORCHVISION), os.environ.get("PYTHONPATH", "")])
    process = (EngineProcess if sees else ForkedEngine)(
        msgspec.structs.replace(job.policies[POLICY], trained=trains),
        port=reserve_port(),
        log_path=place / "engine.log",
        secret=SECRET,
        environment={"PYTHONPATH": path} if sees else None,  # before transformers is imported
    )
    with blame("vLLM"):
        await process.__aenter__()
    try:
        async with VllmEngine.open(process.url, deadline_s=60.0, secret=SECRET) as engine:
            app = create_app(job, root=ROOT, engines={POLICY: [engine]}, broker=broker)
            # vLLM closes connections that are idle for a few seconds: none is used again.
            async with served(app) as url, ClientSession(connector=TCPConnector(keepalive_timeout=0)) as http:
                stage = Stage(url, RUN, http)
                stage.engine, stage.broker, stage.process = engine, broker, process
                yield stage
    finally:
        await process.__aexit__(None, None, None)


if __name__ == "__main__":
    main()
