"""Every family that transformers and vLLM both load: learner, oracle and engine compute the same log-probabilities.

For each family a tiny random model, in FP32, and a process of its own:

    engine     a real vLLM on the CPU samples turns that fork, continue each other and are longer than any sliding window
    oracle     transformers' eager attention in float64, every turn alone, all logits at once
    learner    what trains: packed rows, trees, the head in chunks, layers recomputed

Compared are the learner's log-probabilities with the oracle's and with those that the engine reported, and its gradient with the oracle's.
"""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
import os
import random
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.report import kept, parser, save, table
from swarmq.learner.memory.outline import get_auto_class
from swarmq.learner.model.batched_attention import AttentionForm
from swarmq.learner.model.layout_attention import Visibility
from swarmq.learner.model.layout_model import LayoutModel, PlacedLayout
from swarmq.learner.model.loading import load_lm
from swarmq.timeline import Layout, PrefixTree, make_resolved_turn, plan_rows

T = TypeVar("T")

VOCAB = 512
TEMPERATURE = 0.8
TOKENS = 20
"""Of an answer."""
LIMIT_S = 600
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
MIXED = {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
DEEPSEEK = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "n_shared_experts": 1,
    "num_key_value_heads": 4,
}
MAMBA = {"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2}

Fields = Mapping[str, Any]
FAMILIES: dict[str, tuple[str, Fields]] = {
    "qwen3": ("qwen3", {}),
    "qwen2": ("qwen2", {}),
    "llama": ("llama", {}),
    "gemma2": ("gemma2", {**MIXED, "query_pre_attn_scalar": 32}),
    "gemma2, logits of 100": ("gemma2", {**MIXED, "query_pre_attn_scalar": 32}),
    "vaultgemma": ("vaultgemma", {**MIXED, "query_pre_attn_scalar": 32}),
    "vaultgemma, logits of 100": ("vaultgemma", {**MIXED, "query_pre_attn_scalar": 32}),
    "gemma3": ("gemma3_text", {**MIXED, "query_pre_attn_scalar": 32}),
    "gemma": ("gemma", {}),
    "mistral": ("mistral", {"sliding_window": 32}),
    "mixtral": ("mixtral", LOCAL_EXPERTS),
    "qwen3_moe": ("qwen3_moe", {**EXPERTS, "norm_topk_prob": True}),
    "olmoe": ("olmoe", {**EXPERTS, "intermediate_size": 96}),
    "granitemoe": ("granitemoe", {**LOCAL_EXPERTS, "logits_scaling": 3.0}),
    "phi3": ("phi3", {"sliding_window": 32}),
    "olmo2": ("olmo2", {}),
    "cohere": ("cohere", {"logit_scale": 0.3}),
    "falcon": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False, "head_dim": None}),
    "stablelm": ("stablelm", {}),
    "gpt_oss": ("gpt_oss", {**MIXED, **LOCAL_EXPERTS, "intermediate_size": 96, "max_position_embeddings": 4096}),
    "glm4_moe": ("glm4_moe", {**DEEPSEEK, "num_key_value_heads": 2}),
    "deepseek_v3": ("deepseek_v3", DEEPSEEK),
    "granite": ("granite", {"logits_scaling": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5}),
    "phimoe": ("phimoe", {**LOCAL_EXPERTS, "sliding_window": 512}),
    "qwen2_moe": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 96}),
    "olmo3": ("olmo3", MIXED),
    "cohere2": ("cohere2", {**MIXED, "logit_scale": 0.3}),
    "exaone4": ("exaone4", {**MIXED, "sliding_window_pattern": 2}),
    "glm4": ("glm4", {}),
    "smollm3": ("smollm3", {}),
    "starcoder2": ("starcoder2", {"sliding_window": 32}),
    "apertus": ("apertus", {}),
    "arcee": ("arcee", {}),
    "bloom": ("bloom", {"n_layer": 3, "n_head": 4}),
    "deepseek_v2": ("deepseek_v2", DEEPSEEK),
    "dots1": ("dots1", {**DEEPSEEK, "num_key_value_heads": 2}),
    "ernie4_5": ("ernie4_5", {}),
    "ernie4_5_moe": ("ernie4_5_moe", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 96}),
    "glm": ("glm", {}),
    "gpt2": ("gpt2", {"n_embd": 128, "n_layer": 3, "n_head": 4, "n_positions": 512}),
    "gpt_neox": ("gpt_neox", {}),
    "gptj": ("gptj", {"n_embd": 128, "n_layer": 3, "n_head": 4, "n_positions": 512, "rotary_dim": 16}),
    "granitemoeshared": ("granitemoeshared", {**LOCAL_EXPERTS, "shared_intermediate_size": 96}),
    "helium": ("helium", {}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {}),
    "jamba": ("jamba", {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1, "mamba_d_state": 16}),
    "lfm2": (
        "lfm2",
        {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3, "block_auto_adjust_ff_dim": False},
    ),
    "mamba": ("mamba", {"state_size": 16}),
    "mamba2": ("mamba2", {"state_size": 16, "num_heads": 8, "head_dim": 32, "n_groups": 1}),
    "mpt": ("mpt", {"d_model": 128, "n_heads": 4, "n_layers": 3, "max_seq_len": 512, "expansion_ratio": 2}),
    "nemotron": ("nemotron", {}),
    "olmo": ("olmo", {}),
    "opt": ("opt", {"ffn_dim": 192, "word_embed_proj_dim": 128}),
    "persimmon": ("persimmon", {}),
    "phi": ("phi", {"num_key_value_heads": 4}),
    "qwen3_next": (
        "qwen3_next",
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_experts": 0,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "mlp_only_layers": [0, 1, 2],
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
        },
    ),
    "seed_oss": ("seed_oss", {}),
}
"""Those that are trained most come first. Name -> what transformers calls the family, and what its configuration has besides SHAPE."""

TREES = "rows, trees"
Key = tuple[int, int]
"""Turn, and which of its sampled tokens."""


def main() -> None:
    """Measure all families, or some, and save."""
    options = parser(__doc__)
    options.add_argument("--only", default="", help="families, with semicolons; the results of the others are kept")
    options.add_argument("--rest", action="store_true", help="families without a result")
    asked = options.parse_args()
    os.environ.update(ENGINE)
    import vllm  # noqa: F401, PLC0415 - for all processes, which find the variables above

    _, detail = kept("oracle", out=asked.out)
    rows: dict[str, Any] = {name: row for name, row in detail.get("families", {}).items() if name in FAMILIES}
    names = [name.strip() for name in asked.only.split(";")] if asked.only else list(FAMILIES)
    for name in [name for name in names if not asked.rest or name not in rows]:
        rows[name] = measure(name)
        print(name, rows[name], file=sys.stderr, flush=True)
        write(rows, asked.out, finished=False)
    print(table(("family", "found"), [(name, str(row)) for name, row in rows.items()]))
    write(rows, asked.out, finished=True)


def write(rows: Mapping[str, Fields], out: Path | None, *, finished: bool) -> None:
    """Into the results file."""
    save("oracle", figures_of(rows), detail={"families": dict(sorted(rows.items()))}, out=out, finished=finished)


def figures_of(rows: Mapping[str, Fields]) -> dict[str, float]:
    """The worst of all families, each counted once."""
    served, trained = (
        {name: row for name, row in rows.items() if figure in row} for figure in ("engine_max", "logprob_max")
    )
    capped = rows.get("gemma2, logits of 100", {})

    def count(some: Mapping[str, Fields]) -> int:
        return len({FAMILIES[name][0] for name in some})

    def worst(some: Mapping[str, Fields], figure: str) -> float:
        return max((float(row[figure]) for row in some.values()), default=0.0)

    return {
        "families": count(rows),
        "families_trained": count(trained),
        "families_served": count(served),
        "logprob_max_abs": worst(trained, "logprob_max"),
        "grad_rel_max": worst(trained, "grad_rel"),
        "engine_max_abs": worst(served, "engine_max"),
        "engine_mean_abs_max": worst(served, "engine_mean"),
        "gemma2_largest_logit": capped.get("largest_logit", 0.0),
        "gemma2_engine_max_abs": capped.get("engine_max", 0.0),
    }


class NotDoneError(Exception):
    """A process of one family failed; the message says how."""


def in_a_process(do: Callable[..., T], *arguments: object) -> T:
    """The result of a function, where nothing is left of other families: vLLM changes transformers' classes. Libraries are imported once
    for all. Raises NotDoneError."""
    here, there = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=_tell, args=(there, do, *arguments))
    process.start()
    there.close()
    try:
        if not here.poll(LIMIT_S):
            raise NotDoneError(f"nothing within {LIMIT_S} s")
        result, error = here.recv()
    except EOFError:
        process.join()
        raise NotDoneError(f"its process ended with status {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
    if error:
        raise NotDoneError(error)
    made: T = result
    return made


def _tell(there: Connection, do: Callable[..., object], *arguments: object) -> None:
    try:
        there.send((do(*arguments), ""))
    except Exception as error:
        words = (str(error).strip().splitlines() or [""])[0][:200]
        there.send((None, f"{type(error).__name__}: {words}"))


CONTEXT = multiprocessing.get_context("fork")
"""This process imports libraries once and computes nothing, so it has no threads that a fork would lose."""
ENGINE = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}
"""As swarmq.engine.server.launch has it."""


def measure(name: str) -> dict[str, Any]:
    """Of one family. What cannot be measured has a `reason`."""
    with tempfile.TemporaryDirectory() as place:
        folder, refused = Path(place), ""
        try:
            in_a_process(make, name, folder)
        except NotDoneError as error:
            return {"reason": f"transformers does not make it: {error}"}
        try:
            turns, engine = in_a_process(sample, folder)
        except NotDoneError as error:
            turns, engine, refused = make_prompts(), "", f"vLLM does not serve it: {error}"
        try:
            found = in_a_process(compare, folder, turns)
        except NotDoneError as error:
            return {"reason": refused or f"the learner does not compute it: {error}"}
    if refused:
        return {name: value for name, value in found.items() if not name.startswith("engine")} | {"reason": refused}
    return found | {"engine": engine}


def make(name: str, folder: Path) -> None:
    """Save a random model."""
    lm = random_lm(*FAMILIES[name])
    lm.save_pretrained(folder)
    if "logits of" in name:
        wanted = float(name.rsplit(" ", 1)[1])
        while (largest := compare(folder, make_prompts())["largest_logit"]) < wanted:
            for layer in lm.model.layers:
                layer.self_attn.q_proj.weight.data *= 1.1 * wanted / largest
            lm.save_pretrained(folder)


def random_lm(kind: str, special: Fields) -> Any:
    """Return a tiny model of the family that transformers calls `kind`. `special`: what its configuration has besides SHAPE; None leaves
    a field of SHAPE out."""
    torch.manual_seed(0)
    fields = {name: value for name, value in {**SHAPE, **special}.items() if value is not None}
    lm = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields), dtype=torch.float32)
    for parameter in lm.parameters():
        if parameter.ndim == 1:  # norms that are all ones, and biases that are all zeros, would hide what is left out
            parameter.data += 0.1 * torch.randn_like(parameter)
    return lm


def make_prompts(vocab: int = VOCAB) -> list[Turn]:
    """Turns before an engine sampled anything: answers are made up."""
    rng = random.Random(0)
    ids = [[rng.randrange(2, vocab) for _ in range(length)] for length in (5, 40, 90, 12)]
    return [Turn(prompt, [rng.randrange(2, vocab) for _ in range(TOKENS)], [0.0] * TOKENS) for prompt in ids]


@dataclasses.dataclass
class Turn:
    prompt: list[int]
    sampled: list[int]
    logprobs: list[float]
    """That the engine reported."""


def sample(folder: Path) -> tuple[list[Turn], str]:
    """Turns of a real engine, and which class computed them: prompts, what continues their answers, and what forks off them."""
    from vllm import LLM, SamplingParams  # noqa: PLC0415 - the process that starts the others does without

    engine = LLM(
        str(folder),
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        distributed_executor_backend="uni",
        max_model_len=256,
        max_num_seqs=16,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        seed=0,
    )
    how = SamplingParams(temperature=TEMPERATURE, max_tokens=TOKENS, logprobs=0, ignore_eos=True, detokenize=False, n=2)

    def answered(prompts: Sequence[list[int]]) -> list[Turn]:
        outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], how, use_tqdm=False)
        return [
            Turn(
                list(output.prompt_token_ids),
                list(choice.token_ids),
                [entry[token].logprob for entry, token in zip(choice.logprobs, choice.token_ids, strict=True)],
            )
            for output in outputs
            for choice in output.outputs
        ]

    first = answered([turn.prompt for turn in make_prompts()])
    again = [[*turn.prompt, *turn.sampled, 7, 8, 9] for turn in first[::2]]
    forked = [[*turn.prompt, *turn.sampled[:9], 11] for turn in first[1::2]]
    names = engine.apply_model(lambda model: type(model).__name__)
    return [*first, *answered([*again, *forked])], names[0]


def compare(folder: Path, turns: Sequence[Turn]) -> dict[str, Any]:
    """The learner with the oracle, and both with the engine."""
    torch.set_num_threads(1)
    truth, slope = oracle(folder, turns)
    group = [[make_resolved_turn(turn.prompt, turn.sampled, turn.logprobs) for turn in turns]]
    ways: dict[str, Callable[[], Sequence[Layout]]] = {"rows": lambda: plan_rows(group, 300)}
    model = LayoutModel(load_lm(str(folder), gradient_checkpointing=True))
    if not model.rows_only:
        ways["trees"] = lambda: PrefixTree(group).layouts(300)
    found: dict[str, Any] = {"layouts": TREES if not model.rows_only else f"rows: {model.rows_only}"}
    errors, slopes, engine, largest = [], [], [], 0.0
    for way, layouts in ways.items():
        for chunk in (None, 7) if model.head_apart else (None,):
            model.head_chunk = chunk
            logprobs, gradient, logit = learned(model, layouts())
            errors.append(max(abs(logprobs[key] - truth[key]) for key in truth))
            slopes.append(float(_norm(gradient, slope) / _norm(slope)))
            largest = max(largest, logit)
            if way == "rows" and chunk is None:
                engine = [abs(turns[t].logprobs[offset] - value) for (t, offset), value in logprobs.items()]
    return found | {
        "tokens": len(truth),
        "logprob_max": max(errors),
        "grad_rel": max(slopes),
        "engine_max": max(engine),
        "engine_mean": sum(engine) / len(engine),
        "largest_logit": largest,
    }


Gradient = dict[str, Tensor]


def oracle(folder: Path, turns: Sequence[Turn]) -> tuple[dict[Key, float], Gradient]:
    """Log-probabilities and gradient in float64, by transformers' eager attention, every turn alone."""
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    auto = get_auto_class(AutoConfig.from_pretrained(folder))
    lm = auto.from_pretrained(folder, dtype=torch.float32, **eager).eval().double()
    truth: dict[Key, float] = {}
    for t, turn in enumerate(turns):
        ids = torch.tensor([*turn.prompt, *turn.sampled])
        logits = lm(input_ids=ids[None], use_cache=False).logits[0, len(turn.prompt) - 1 : -1].double() / TEMPERATURE
        chosen = logits.log_softmax(-1).gather(1, ids[len(turn.prompt) :, None])[:, 0]
        weights = torch.tensor([_weight((t, offset)) for offset in range(len(chosen))], dtype=torch.float64)
        (chosen * weights).sum().backward()
        truth.update({(t, offset): value for offset, value in enumerate(chosen.tolist())})
    return truth, {name: p.grad for name, p in lm.named_parameters() if p.grad is not None}


def learned(model: LayoutModel, layouts: Sequence[Layout]) -> tuple[dict[Key, float], Gradient, float]:
    """The same as the learner computes it, in FP32; and the largest logit of attention, 0 where its layers keep that to themselves."""
    device, largest = torch.device("cpu"), 0.0

    class Measured(Visibility):
        def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
            nonlocal largest
            keys = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
            seen = (query.detach() @ keys.detach().transpose(2, 3) * form.scale).abs().tril()
            largest = max(largest, float(seen.max()))
            return super().attend(module, query, key, value, form)

    model.zero_grad()
    logprobs: dict[Key, float] = {}
    for layout in layouts:
        placed = PlacedLayout.of(layout, device)
        placed = dataclasses.replace(placed, visibility=Measured(layout, device, compiled=False))
        chosen = model(placed, TEMPERATURE).logprobs
        keys = list(zip(layout.turns.tolist(), layout.offsets.tolist(), strict=True))
        (chosen * torch.tensor([_weight(key) for key in keys])).sum().backward()
        logprobs.update(zip(keys, chosen.tolist(), strict=True))
    gradient = {name: p.grad.clone() for name, p in model.model.named_parameters() if p.grad is not None}
    return logprobs, gradient, largest


def _weight(key: Key) -> float:
    """Some fixed weight for every sampled token, as an advantage would be."""
    return math.sin(1 + 3 * key[0] + key[1])


def _norm(one: Gradient, other: Gradient | None = None) -> float:
    """Of a gradient, or of the difference of two."""
    if other is None:
        return float(sum(float(value.double().square().sum()) for value in one.values()) ** 0.5)
    return float(
        sum(
            float((one[name].double() - value.double()).square().sum()) if name in one else float(value.square().sum())
            for name, value in other.items()
        )
        ** 0.5
    )


if __name__ == "__main__":
    main()
