"""Write tests/unit/learner/methods/trl_ppo_golden.json: advantages, returns and value loss that TRL's PPO computes for three episodes.

    python scripts/trl_ppo_golden.py

trl 0.11.4 is the last version whose PPO has them as functions (`PPOTrainer.compute_advantages`, `PPOTrainer.loss`), and it needs an
old transformers. The script therefore makes a virtual environment for itself, with the versions below, and removes it at the end.

An episode is one answer there, so each row holds all sampled tokens of an episode, and a reward by call is a reward in mid-row.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import venv
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

PINS = (
    "trl==0.11.4",
    "transformers==4.45.2",
    "accelerate==1.0.1",
    "datasets==3.0.2",
    "pyarrow==17.0.0",
    "tyro==0.8.14",
    "numpy==1.26.4",
    "torch==2.13.0",
)
"""What trl 0.11.4 requires, in the newest versions of October 2024; pyarrow, of the same time, goes with this numpy. torch is ours."""
TARGET = Path(__file__).resolve().parent.parent / "tests" / "unit" / "learner" / "methods" / "trl_ppo_golden.json"
INSIDE = "--inside"
"""Argument with which the script runs itself in the environment."""

DISCOUNT, GAE_LAMBDA, VALUE_CLIP = 0.9, 0.8, 0.2
REWARDS = ((0.0, 0.0, 0.5, 0.0, 0.0, 1.0), (0.0, 0.0, 0.0, -1.0), (0.0, 0.0, 0.0, 0.0, 2.0))
"""Rewards of the sampled tokens of each episode."""
VALUES = [-1.126, -1.152, 0.567, 0.794, 0.599, -1.555, -0.341, 1.853, 0.468, -0.158, 1.389, 1.586, 0.946, -0.844, 0.932]
"""Values of all sampled tokens before the step, episode by episode."""
MOVED = [-1.274, -1.077, 0.498, 0.676, 0.762, -1.674, -0.279, 1.718, 0.296, -0.325, 1.935, 1.421, 0.548, -0.787, 0.911]
"""Values of the same tokens by the critic that is trained."""


def compute() -> dict[str, Any]:
    """Return TRL's numbers with their inputs. Needs trl 0.11.4."""
    import torch  # noqa: PLC0415 - the calling Python may have no torch

    from trl import PPOTrainer  # noqa: PLC0415

    lengths = [len(row) for row in REWARDS]
    ends = [sum(lengths[:n]) for n in range(len(lengths) + 1)]

    def pad(flat: list[float]) -> torch.Tensor:
        rows = [torch.tensor(flat[begin:end]) for begin, end in pairwise(ends)]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    mask = pad([1.0] * ends[-1])
    config = SimpleNamespace(
        gamma=DISCOUNT,
        lam=GAE_LAMBDA,
        whiten_rewards=False,
        cliprange=0.2,
        cliprange_value=VALUE_CLIP,
        vf_coef=1.0,
        ratio_threshold=10.0,
    )
    trainer = SimpleNamespace(config=config)
    rewards = pad([reward for row in REWARDS for reward in row])
    values, advantages, returns = PPOTrainer.compute_advantages(trainer, pad(VALUES), rewards, mask)
    logprobs, logits = torch.zeros_like(mask), torch.zeros(*mask.shape, 2)
    _, loss, _ = PPOTrainer.loss(trainer, logprobs, values, logits, pad(MOVED), logprobs, mask, advantages, returns)
    kept = mask.bool()
    return {
        "discount": DISCOUNT,
        "gae_lambda": GAE_LAMBDA,
        "value_clip": VALUE_CLIP,
        "values": VALUES,
        "moved": MOVED,
        "advantages": [round(number, 8) for number in advantages[kept].tolist()],
        "returns": [round(number, 8) for number in returns[kept].tolist()],
        "value_loss": round(loss.item(), 8),
    }


def main() -> None:
    if INSIDE in sys.argv:
        TARGET.write_text(json.dumps({"versions": list(PINS)} | compute(), indent=1) + "\n")
        print(TARGET)
        return
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin" / "python"
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PINS], check=True)
        subprocess.run([python, __file__, INSIDE], check=True)


if __name__ == "__main__":
    main()
