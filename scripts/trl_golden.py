"""Write tests/unit/learner/trl_golden.json: what TRL's GRPO trainer computes for the losses that it has as well.

TRL is no dependency of ours, because it brings more packages than the whole learner. In an environment that has it:

    python -m venv /tmp/trl && /tmp/trl/bin/pip install trl==1.16.0
    /tmp/trl/bin/python scripts/trl_golden.py

Its `_compute_loss` is called as it is; only the model's forward pass is replaced by given log-probabilities.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import trl
from trl import GRPOTrainer

TARGET = Path(__file__).resolve().parent.parent / "tests" / "unit" / "learner" / "trl_golden.json"
CONSTANT_LENGTH = 16
CASES: dict[str, dict[str, Any]] = {
    "ppo_clip, token": {"loss_type": "dapo", "epsilon_high": 0.28, "delta": 3.0},
    "ppo_clip, episode": {"loss_type": "grpo", "epsilon_high": 0.28, "delta": 3.0},
    "ppo_clip, constant": {"loss_type": "dr_grpo", "epsilon_high": 0.28, "delta": 3.0},
    # on policy: TRL lets a gradient flow through the ratio that weighs the divergence, we do not
    "ppo_clip, token, kl": {"loss_type": "dapo", "epsilon_high": 0.28, "delta": 3.0, "beta": 0.1},
    "cispo, token": {"loss_type": "cispo", "epsilon_high": 5.0},
    "gspo, episode": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon_low": 3e-4,
        "epsilon_high": 4e-4,
    },
}


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    shape, lengths = (4, 7), [7, 3, 5, 1]
    mask = (torch.arange(7)[None] < torch.tensor(lengths)[:, None]).double()
    mu = -3 * torch.rand(shape, generator=generator, dtype=torch.float64)
    theta, reference = (mu + 0.6 * torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    advantages = torch.tensor([1.5, -0.5, -1.2, 0.2], dtype=torch.float64)
    made = {}
    for name, settings in CASES.items():
        learned = theta.clone().requires_grad_()
        loss = trl_loss(learned, theta if "kl" in name else mu, reference, advantages, mask, **settings)
        loss.backward()
        made[name] = {"loss": loss.item(), "gradient": learned.grad[mask > 0].tolist()}
    given = {
        "lengths": lengths,
        "theta": theta[mask > 0].tolist(),
        "mu": mu[mask > 0].tolist(),
        "reference": reference[mask > 0].tolist(),
        "advantages": advantages.tolist(),
        "constant_length": CONSTANT_LENGTH,
    }
    TARGET.write_text(json.dumps({"trl": trl.__version__, "given": given, "computed": made}, indent=1) + "\n")


def trl_loss(
    theta: torch.Tensor,
    mu: torch.Tensor,
    reference: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    **own: Any,
) -> torch.Tensor:
    """TRL's loss of completions whose log-probabilities are given."""
    accelerator = SimpleNamespace(
        num_processes=1, gather=lambda x: x, gather_for_metrics=lambda x: x, reduce=lambda x, reduction: x,  # noqa: ARG005 - called by name
        sync_gradients=True,
    )  # fmt: skip
    settings = {"epsilon_low": 0.2, "importance_sampling_level": "token", "beta": 0.0} | own
    trainer = SimpleNamespace(
        **{key: value for key, value in settings.items() if key != "delta"},
        args=SimpleNamespace(delta=settings.get("delta"), use_bias_correction_kl=False, steps_per_generation=1),
        accelerator=accelerator,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=CONSTANT_LENGTH,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *_, **__: (theta, torch.zeros_like(theta), None),
    )
    ids = torch.zeros(theta.shape, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": torch.ones_like(ids[:, :1]),
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": advantages,
        "old_per_token_logps": mu,
        "ref_per_token_logps": reference,
        "num_items_in_batch": mask.sum(),
    }
    return GRPOTrainer._compute_loss(trainer, None, inputs)  # noqa: SLF001


if __name__ == "__main__":
    main()
