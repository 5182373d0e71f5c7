"""Routing replay of a mixture of experts: mismatch, reward and bytes, with and without.

    python -m benchmarks.moe_routing                               # two seeds on a CPU; about ten minutes
    python -m benchmarks.moe_routing --seeds 0 --parts mismatch    # a part; results of the others stay

A tiny Qwen3-MoE with random weights: 32 experts, of which close logits choose four. The engine computes in BF16, the learner in FP32,
so their routers choose other experts for some tokens.

    mismatch   a real vLLM samples, and the learner scores the same tokens under the same weights: k3, the mean of r - 1 - ln r for
               the ratio r of learner to engine probability, with the engine's experts and with the learner's own
    training   whole runs that differ in `train.routing_replay` alone; an answer is right if it begins with a lower-case letter
    bytes      of the experts of one token in a turn, as recorded and as zlib would compress them
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks import report
from support.tiny_model import tiny_tokenizer
from support.toy_task import Toy, toy_settings
from swarmq import SwarmClient
from swarmq.config import EngineSettings, Policy, SwarmJob, Train
from swarmq.engine.client.protocol import RenderedPrompt
from swarmq.engine.client.vllm import VllmEngine
from swarmq.engine.server.launch import EngineProcess
from swarmq.learner.model.layout_model import LayoutModel, PlacedLayout
from swarmq.learner.model.loading import load_lm
from swarmq.messages import Turn, pack_floats, pack_ids
from swarmq.observe.curves import read_events
from swarmq.runtime.processes import reserve_port
from swarmq.timeline import plan_rows, resolve
from swarmq.whole_run.session import open_session

PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS = 64, 48, 64
ROUNDS = 6
TEMPERATURE = 1.0
PARTS = ("mismatch", "with", "without")


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="results of the others stay")
    arguments = parser.parse_args()
    earlier = report.kept("moe_routing", out=arguments.out)[1].get("runs", {})
    runs: dict[str, dict[str, Any]] = {**earlier}
    with tempfile.TemporaryDirectory(prefix="swarmq-moe-") as scratch:
        for seed in arguments.seeds:
            folder = Path(scratch) / str(seed)
            model = make_model(folder / "model", seed)
            for part in arguments.parts:
                if part == "mismatch":
                    measured = asyncio.run(measure_mismatch(folder, model, seed))
                else:
                    measured = asyncio.run(train(folder, model, seed, replay=part == "with"))
                runs = runs | {str(seed): runs.get(str(seed), {}) | measured}
                report.save("moe_routing", summarize(runs), detail={"runs": runs}, out=arguments.out)
                print(f"seed {seed}, {part}: {measured}", flush=True)


def make_model(folder: Path, seed: int) -> Path:
    tokenizer = tiny_tokenizer()
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        max_position_embeddings=2048,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
        dtype="float32",
    )
    torch.manual_seed(seed)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


async def measure_mismatch(folder: Path, model: Path, seed: int) -> dict[str, float]:
    """Return k3 with and without replay, the share of routings that the learner would choose otherwise, and bytes per token."""
    policy = Policy(
        model=str(model),
        engine=EngineSettings(dtype="bfloat16", max_model_len=512),
        train=Train(routing_replay=True),
    )
    process = EngineProcess(policy, port=reserve_port(), log_path=folder / "engine.log")
    async with process, VllmEngine.open(process.url, deadline_s=300.0, secret=process.secret) as engine:
        dice = random.Random(seed)
        prompts = [[dice.randrange(500) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]
        turns = await asyncio.gather(*(sample(engine, number, prompt) for number, prompt in enumerate(prompts)))
    learner = LayoutModel(load_lm(str(model), gradient_checkpointing=False), replays_routing=True)
    routed = [turn.routed_experts for turn in turns]
    tokens = sum(turn.num_routed for turn in turns)
    return {
        "k3_with": compute_k3(learner, turns, replay=True),
        "k3_without": compute_k3(learner, turns, replay=False),
        "rerouted_share": measure_rerouted(learner, turns),
        "bytes_per_token": sum(map(len, routed)) / tokens,
        "zlib_bytes_per_token": sum(len(zlib.compress(rows, 6)) for rows in routed) / tokens,
    }


async def sample(engine: VllmEngine, number: int, prompt: Sequence[int]) -> Turn:
    sampling = {"max_tokens": ANSWER_TOKENS, "temperature": TEMPERATURE, "logprobs": 0, "ignore_eos": True}
    rendered = RenderedPrompt(token_ids=list(prompt), sampling=sampling)
    [delta] = [delta async for deltas in engine.generate(rendered, stream=False) for delta in deltas]
    assert delta.routed_experts
    return Turn(
        run="r",
        episode_id=str(number),
        policy="main",
        call_id=str(number),
        request_id=str(number),
        prompt_ids=pack_ids(prompt),
        sampled_ids=pack_ids(delta.token_ids),
        logprobs=pack_floats(delta.logprobs),
        routed_experts=delta.routed_experts.ids,
    )


def score(learner: LayoutModel, turns: Sequence[Turn], *, replay: bool) -> torch.Tensor:
    """Return the log of the ratio of learner to engine probability, of every sampled token."""
    ratios = []
    for turn in turns:
        [layout] = plan_rows([resolve([turn], routing=replay)], budget=1024)
        with torch.no_grad():
            logprobs = learner(PlacedLayout.of(layout, torch.device("cpu")), TEMPERATURE).logprobs
        ratios.append(logprobs.double() - torch.from_numpy(layout.logprobs))
    return torch.cat(ratios)


def compute_k3(learner: LayoutModel, turns: Sequence[Turn], *, replay: bool) -> float:
    log_ratio = score(learner, turns, replay=replay)
    return float((log_ratio.exp() - 1 - log_ratio).mean())


def measure_rerouted(learner: LayoutModel, turns: Sequence[Turn]) -> float:
    """Return the share of tokens and layers for which the learner's router chooses other experts than the engine's."""
    chosen: list[torch.Tensor] = []
    routers = [layer.mlp.gate for layer in learner.model.model.layers]
    hooks = [router.register_forward_hook(lambda _module, _inputs, out: chosen.append(out[2])) for router in routers]
    score(learner, turns, replay=False)
    for hook in hooks:
        hook.remove()
    differs = []
    for number, turn in enumerate(turns):
        own = torch.stack(chosen[number * len(routers) : (number + 1) * len(routers)], 1)[:-1].sort(-1).values.numpy()
        engine = np.sort(np.frombuffer(turn.routed_experts, np.uint8).reshape(own.shape), -1)
        differs.append((own != engine).any(-1))
    return float(np.concatenate(differs).mean())


async def train(folder: Path, model: Path, seed: int, *, replay: bool) -> dict[str, Any]:
    """Return the mean reward of every round, and the run's mean k3, which includes that of older weights."""
    name = "with" if replay else "without"
    settings = toy_settings(model, run=f"{name}-{seed}") | {"folder": str(folder / "runs")}
    policy = settings["policies"]["main"]
    policy["engine"]["dtype"] = "bfloat16"
    policy["train"] |= {"routing_replay": replay, "seed": seed, "checkpoint_every": 1000}
    job, toy = SwarmJob.build(settings), Toy()

    def play() -> None:
        with SwarmClient(job.run_folder.path) as client:
            for _ in range(ROUNDS):
                toy.play(client)

    async with open_session(job, name="moe_routing", report=lambda text: print(text, flush=True)):
        await asyncio.to_thread(play)
    steps = [event.fields for event in read_events(job.run_folder.events) if event.name == "step"]
    k3 = statistics.mean(fields["kl_k3"] for fields in steps)
    return {f"rewards_{name}": toy.rewards, f"run_k3_{name}": k3, f"steps_{name}": len(steps)}


def summarize(runs: Mapping[str, dict[str, Any]]) -> dict[str, float]:
    """Return the medians over the seeds; of rewards, those of the first and the last round."""
    figures: dict[str, float] = {"seeds": len(runs)}
    for key in dict.fromkeys(key for one in runs.values() for key in one):
        values = [one[key] for one in runs.values() if key in one]
        if key.startswith("rewards_"):
            name = key.removeprefix("rewards_")
            figures[f"reward_before_{name}"] = statistics.median(rewards[0] for rewards in values)
            figures[f"reward_after_{name}"] = statistics.median(rewards[-1] for rewards in values)
        else:
            figures[key] = statistics.median(values)
    return figures


if __name__ == "__main__":
    main()
