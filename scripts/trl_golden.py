"""Write tests/unit/learner/methods/trl_golden.json: what TRL's trainers compute for the losses and advantages that it has as well.

The file is there so that the quick tests need no TRL, whose import takes seconds; a long one computes it anew with the TRL
that is installed (`make install` brings the version that pyproject.toml names). To write it for another version:

    .venv/bin/python scripts/trl_golden.py

TRL's own clients of vLLM, which knows other versions than ours, stay out of it.

`_compute_loss` is called as it is; only the model's forward pass is replaced by given log-probabilities. Advantages are
those of a step of its GRPO and RLOO trainers whose reward function gives the rewards. The supervised loss is the one its
SFT trainer takes from transformers. Distillation is `_compute_iw_opd_loss` of its experimental trainer for sampled tokens, on policy
and without the weights by which it prefers early tokens (gamma 0); off policy its advantage is the teacher's log-probability less
the engine's, with no ratio, and ours less the learner's, with one. Distillation over the teacher's likeliest tokens is
`_add_tail_bucket` and `_jsd_divergence` of its trainer for served teachers. The spans of two tokenizers are those of its GOLD trainer. Left out is what has TRL's name and another formula: scaling by the batch divides by
the deviation of the raw rewards there, by that of the centred ones here (2501.03262).
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.loss.loss_utils import ForCausalLMLoss

sys.modules["vllm"] = None  # type: ignore[assignment]
from trl.experimental.gold.gold_trainer import ULDLoss  # noqa: E402
from trl.experimental.iw_opd import IWOPDTrainer  # noqa: E402
from trl.experimental.server_distillation import server_distillation_trainer as served  # noqa: E402
from trl.experimental.utils import encode_with_byte_offsets  # noqa: E402

import trl  # noqa: E402
from trl import GRPOTrainer, RLOOTrainer  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from support.families import tokenizer_of  # noqa: E402
from support.tiny_model import tiny_tokenizer  # noqa: E402

TEXT = "Zwölf Boxkämpfer, 北京 🙂 x**2\n  return 42."
TARGET = Path(__file__).resolve().parent.parent / "tests" / "unit" / "learner" / "methods" / "trl_golden.json"
CONSTANT_LENGTH = 16
REWARDS = [0.0, 1.0, 0.25, 0.5, 2.0, -1.0, 0.0, 0.0]
GROUP = 4
CASES: dict[str, dict[str, Any]] = {
    "ppo_clip, token": {"loss_type": "dapo", "epsilon_high": 0.28, "delta": 3.0},
    "ppo_clip, episode": {"loss_type": "grpo", "epsilon_high": 0.28, "delta": 3.0},
    "ppo_clip, constant": {"loss_type": "dr_grpo", "epsilon_high": 0.28, "delta": 3.0},
    # on policy: TRL lets a gradient flow through the ratio that weighs the divergence, we do not
    "ppo_clip, token, kl": {"loss_type": "dapo", "epsilon_high": 0.28, "delta": 3.0, "beta": 0.1},
    # the value alone: here the ratio that weighs the divergence carries no gradient
    "ppo_clip, token, kl, corrected": {
        "loss_type": "dapo",
        "epsilon_high": 0.28,
        "delta": 3.0,
        "beta": 0.1,
        "use_bias_correction_kl": True,
    },
    # the engine's probabilities apart from those before the batch's first step, truncated (TRL's correction for vLLM)
    "ppo_clip, token, proximal": {"loss_type": "dapo", "epsilon_high": 0.28, "delta": 3.0, "truncated_at": 1.2},
    # the value alone, on policy: the model's forward pass is replaced, so TRL's entropy has no gradient here
    "ppo_clip, token, entropy": {"loss_type": "dapo", "epsilon_high": 0.28, "delta": 3.0, "entropy_coef": 0.05},
    "cispo, token": {"loss_type": "cispo", "epsilon_high": 5.0},
    "gspo, episode": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon_low": 3e-4,
        "epsilon_high": 4e-4,
    },
}


def main(target: Path = TARGET) -> None:
    generator = torch.Generator().manual_seed(0)
    shape, lengths = (4, 7), [7, 3, 5, 1]
    mask = (torch.arange(7)[None] < torch.tensor(lengths)[:, None]).double()
    mu = -3 * torch.rand(shape, generator=generator, dtype=torch.float64)
    theta, reference = (mu + 0.6 * torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    entropies = 2 * torch.rand(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    advantages = torch.tensor([1.5, -0.5, -1.2, 0.2], dtype=torch.float64)
    made = {}
    for name, settings in CASES.items():
        learned = theta.clone().requires_grad_()
        on_policy = name.endswith(("kl", "entropy"))
        loss = trl_loss(learned, theta if on_policy else mu, reference, advantages, mask, entropies, **settings)
        loss.backward()
        made[name] = {"loss": loss.item(), "gradient": learned.grad[mask > 0].tolist()}
    learned = theta.clamp(max=-1e-3).requires_grad_()
    loss = supervised(learned[mask > 0])
    loss.backward()
    made["sft, token"] = {"loss": loss.item(), "gradient": learned.grad[mask > 0].tolist()}
    learned = theta.clamp(max=-1e-3).requires_grad_()
    loss = distilled(learned, reference, mask)
    loss.backward()
    made["distill, token"] = {"loss": loss.item(), "gradient": learned.grad[mask > 0].tolist()}
    candidates, of_teacher = (3 * torch.randn(16, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    candidates, of_teacher = (each.log_softmax(-1)[:, :5] for each in (candidates, of_teacher))
    of_teacher[:4, 3:] = -torch.inf
    for beta in (0.0, 0.5, 1.0):
        learned = candidates.clone().requires_grad_()
        loss = over_candidates(learned, of_teacher, beta)
        loss.backward()
        made[f"distill, token, {beta}"] = {"loss": loss.item(), "gradient": learned.grad.flatten().tolist()}
    groups = {name: aligned(name) for name in ("llama3", "mistral")}
    scored = {name: trl_advantages(name) for name in ("grpo", "centered", "rloo")}
    given = {
        "lengths": lengths,
        "theta": theta[mask > 0].tolist(),
        "mu": mu[mask > 0].tolist(),
        "reference": reference[mask > 0].tolist(),
        "entropies": entropies[mask > 0].tolist(),
        "advantages": advantages.tolist(),
        "constant_length": CONSTANT_LENGTH,
        "candidates": candidates.tolist(),
        "teacher_candidates": [[value if value > -torch.inf else None for value in row] for row in of_teacher.tolist()],
    }
    given |= {"rewards": REWARDS}
    golden = {"trl": trl.__version__, "given": given, "computed": made, "advantages": scored, "aligned": groups}
    target.write_text(json.dumps(golden, indent=1) + "\n")


def trl_loss(
    theta: torch.Tensor,
    mu: torch.Tensor,
    reference: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    entropies: torch.Tensor,
    **own: Any,
) -> torch.Tensor:
    """TRL's loss of completions whose log-probabilities are given."""
    accelerator = SimpleNamespace(
        num_processes=1, gather=lambda x: x, gather_for_metrics=lambda x: x, reduce=lambda x, reduction: x,  # noqa: ARG005 - called by name
        sync_gradients=True,
    )  # fmt: skip
    settings = {"epsilon_low": 0.2, "importance_sampling_level": "token", "beta": 0.0} | own
    truncated_at = settings.pop("truncated_at", None)
    trainer = SimpleNamespace(
        **{key: value for key, value in settings.items() if key != "delta"},
        args=SimpleNamespace(
            delta=settings.get("delta"),
            use_bias_correction_kl=settings.get("use_bias_correction_kl", False),
            steps_per_generation=1,
        ),
        accelerator=accelerator,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=CONSTANT_LENGTH,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=truncated_at is not None,
        vllm_importance_sampling_correction=True,
        _entropy_bonus_enabled="entropy_coef" in settings,
        use_adaptive_entropy=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *_, **__: (theta, entropies, None),
    )
    ids = torch.zeros(theta.shape, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": torch.ones_like(ids[:, :1]),
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": advantages,
        "old_per_token_logps": mu if truncated_at is None else reference,
        "ref_per_token_logps": reference,
        "num_items_in_batch": mask.sum(),
    }
    if truncated_at is not None:  # `reference` stands for the weights before the first step
        inputs["importance_sampling_ratio"] = torch.exp(reference - mu).clamp(max=truncated_at)
    return GRPOTrainer._compute_loss(trainer, None, inputs)  # noqa: SLF001


def supervised(theta: torch.Tensor) -> torch.Tensor:
    """Of tokens of a vocabulary of two: the demonstrated one with log-probability `theta`, and the other."""
    logits = of_two(theta)[None]
    labels = torch.zeros(logits.shape[:2], dtype=torch.int64)
    return ForCausalLMLoss(logits, labels, vocab_size=2, shift_labels=labels)


def distilled(theta: torch.Tensor, teacher: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Of tokens of a vocabulary of two, sampled with log-probability `theta`."""
    trainer = SimpleNamespace(
        temperature=1.0,
        iw_opd_gamma=0.0,
        iw_opd_epsilon=1e-8,
        model=SimpleNamespace(training=True),
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    tokens = torch.zeros(theta.shape, dtype=torch.int64)
    return IWOPDTrainer._compute_iw_opd_loss(  # noqa: SLF001
        trainer,
        student_logits=of_two(theta),
        completion_tokens=tokens,
        labels=tokens.masked_fill(mask == 0, -100),
        teacher_actual_logprobs=teacher,
        rollout_logprobs=theta.detach(),
        num_items_in_batch=mask.sum(),
    )


def over_candidates(theta: torch.Tensor, teacher: torch.Tensor, beta: float) -> torch.Tensor:
    """Of tokens for which the teacher names candidates [S, K], -inf where it names fewer than K."""
    there = teacher > -torch.inf
    student, support = served._add_tail_bucket(theta.masked_fill(~there, -torch.inf), there)  # noqa: SLF001
    wanted, _ = served._add_tail_bucket(teacher, there)  # noqa: SLF001
    return served._jsd_divergence(student, wanted, beta, support).sum(-1).mean()  # noqa: SLF001


def aligned(family: str) -> list[list[list[int]]]:
    """Groups of the tokens of `TEXT` by the tiny tokenizer, and of those by a family's."""
    sides = (tiny_tokenizer().backend_tokenizer, tokenizer_of(family))
    offsets = (encode_with_byte_offsets(side, [TEXT])[0][1] for side in sides)
    return list(ULDLoss._align_by_byte_offsets(*offsets))  # noqa: SLF001


def of_two(theta: torch.Tensor) -> torch.Tensor:
    """Logits of the first of two tokens, which has log-probability `theta`, and of the other."""
    return torch.stack([theta, torch.log1p(-theta.exp())], dim=-1)


def trl_advantages(name: str) -> list[float]:
    """Of one step on a model of a few thousand parameters, whose answers get `REWARDS`."""
    seen: list[float] = []
    rloo = name == "rloo"

    class Watched(RLOOTrainer if rloo else GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            made = super()._generate_and_score_completions(inputs)
            seen.extend(made["advantages"].tolist())
            return made

    words = {"<pad>": 0, "<eos>": 1, "a": 2, "b": 3}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="b")), pad_token="<pad>", eos_token="<eos>"
    )
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=4, num_key_value_heads=1, head_dim=8, **shape))
    with tempfile.TemporaryDirectory() as folder:
        config = (trl.RLOOConfig if rloo else trl.GRPOConfig)(
            output_dir=folder, max_steps=1, per_device_train_batch_size=len(REWARDS), num_generations=GROUP,
            max_completion_length=2, report_to="none", save_strategy="no", use_cpu=True, bf16=False, beta=0.0,
            **({} if rloo else {"scale_rewards": "group" if name == "grpo" else "none"}),
        )  # fmt: skip
        Watched(
            model=model,
            args=config,
            reward_funcs=lambda completions, **_: REWARDS[: len(completions)],
            train_dataset=datasets.Dataset.from_dict({"prompt": ["a", "b"]}),
            processing_class=tokenizer,
        ).train()
    return seen


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
