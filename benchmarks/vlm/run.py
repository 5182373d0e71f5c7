"""Learning from images on a CPU: `python -m benchmarks.vlm.run`.

For each seed a Qwen2.5-VL of half a million parameters, which answers every image with a random colour, learns to name the
colour of a square through the whole pipeline (vLLM on the CPU, proxy, RabbitMQ, collector, learner; `swarmq train`). Held-out
squares are asked before and after. Then the turns of the last batch are computed by transformers in float64, one by one, and by
the learner as packed rows and as a tree, and the gradients are compared. Seeds may be run one after the other: the others' rows
are kept.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import report
from benchmarks.vlm import oracle
from benchmarks.vlm.agent import make_tasks
from benchmarks.vlm.model import make_model
from swarmq.config import RunFolder
from swarmq.learner.model.layout_model import LayoutModel
from swarmq.learner.model.loading import load_lm
from swarmq.learner.store.batch_log import read_records
from swarmq.observe.curves import read_events
from swarmq.whole_run.report import TrainingRecord

ROOT = Path(__file__).parents[2]
TORCHVISION = (Path(sys.prefix) / "torchvision", ROOT / "tests/support/torchvision_cpu")
"""Where `make install` puts torchvision, which vLLM's processor needs, beside a CPU torch."""
TRAIN_TASKS, HELD_OUT = 128, 32
BUDGET = 4096
"""Tokens of a pass."""
STEPS = {0: 12, 1: 20}
"""Seed -> optimizer steps, until hardly a group has unequal rewards: more steps would each wait minutes for such groups."""
JOB: dict[str, Any] = {
    "policies": {
        "main": {
            "engine": {
                "dtype": "float32",
                "max_model_len": 128,
                "arguments": [
                    *("--max-num-seqs", "64", "--limit-mm-per-prompt", '{"image": 1, "video": 0}'),
                    *("--mm-encoder-attn-backend", "TORCH_SDPA"),
                ],
            },
            "sampling": {"temperature": 1.0, "max_tokens": 4},
            "train": {
                "learning_rate": 1e-3,
                "warmup_steps": 2,
                "loss": {"entropy_bonus": 0.02},  # or it may settle on one colour before it has learned to see
                "gradient_checkpointing": False,
                "mixed_precision": "no",
                "checkpoint_every": 100,
                "trackers": [],
            },
        }
    },
    "groups": {"group_size": 8, "groups_per_batch": 16, "max_staleness": 0},
}


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--steps", type=int, help="optimizer steps of each run; as many as its seed needs by default")
    options = parser.parse_args()
    earlier = report.kept("vlm_cpu", out=options.out)[1].get("runs", [])
    runs = [run for run in earlier if run["seed"] not in options.seeds]
    runs += [run_seed(seed, options.steps or STEPS[seed]) for seed in options.seeds]
    heads = ("seed", "before", "after", "seconds", "gradient, rows", "gradient, tree")
    keys = ("reward_before", "reward_after", "seconds", "grad_rel_rows", "grad_rel_tree")
    print(report.table(heads, [(run["seed"], *(run[key] for key in keys)) for run in runs]))
    figures = {
        "seeds": len(runs),
        "reward_before": max(run["reward_before"] for run in runs),
        "reward_after": min(run["reward_after"] for run in runs),
        "grad_rel": max(run[f"grad_rel_{way}"] for run in runs for way in ("rows", "tree")),
        "logprob_max_abs": max(run["logprob_max_abs"] for run in runs),
        "engine_gap": max(run["engine_gap"] for run in runs),
    }
    print(report.table(("figure", "value"), list(figures.items())))
    report.save("vlm_cpu", figures, detail={"runs": runs}, out=options.out)


def run_seed(seed: int, steps: int) -> dict[str, Any]:
    """Train once, and compare the last batch with transformers."""
    with tempfile.TemporaryDirectory(prefix="swarmq-vlm-") as name:
        folder = Path(name)
        model = make_model(folder / "model", seed=seed)
        for file, count, first in (("tasks", TRAIN_TASKS, 2 * seed), ("held-out", HELD_OUT, 2 * seed + 1)):
            lines = [json.dumps(task) for task in make_tasks(count, first)]
            (folder / f"{file}.jsonl").write_text("\n".join(lines))
        sets = {
            "folder": folder,
            "policies.main.model": model,
            "policies.main.train.max_steps": steps,
            "policies.main.train.seed": seed,
        }
        (folder / "job.toml").write_bytes(msgspec.toml.encode({"run": f"vlm-{seed}", **JOB}))
        paths = os.pathsep.join([*map(str, TORCHVISION), str(ROOT), os.environ.get("PYTHONPATH", "")])
        began = time.monotonic()
        command = [
            *(sys.executable, "-m", "swarmq", "train", "--plain", str(folder / "job.toml")),
            *("--agent", "benchmarks.vlm.agent:attempt", "--concurrency", "64"),
            *("--tasks", str(folder / "tasks.jsonl"), "--held-out", str(folder / "held-out.jsonl")),
            *(word for key, value in sets.items() for word in ("--set", f"{key}={value}")),
        ]
        subprocess.run(command, check=True, cwd=folder, env={**os.environ, "PYTHONPATH": paths})
        seconds = time.monotonic() - began
        return {"seed": seed, "steps": steps, "seconds": round(seconds), **evaluate(RunFolder(folder / f"vlm-{seed}"))}


def evaluate(run: RunFolder) -> dict[str, Any]:
    """What a run came to."""
    held_out = TrainingRecord.load(run.training).held_out
    rewards = {version: next(iter(kinds.values())).mean_reward for version, kinds in held_out.items()}
    stepped = [event.fields for event in read_events(run.events) if event.name == "step"]
    checkpoint = max(run.checkpoints("main").iterdir())
    *_, record = (record for record in read_records(run.batch_log("main")) if record.episodes)
    turns = [
        msgspec.structs.replace(turn, call_id=f"{number}", parent=None)
        for number, turn in enumerate(turn for episode in record.episodes for turn in episode.turns)
    ]
    expected = oracle.compute_alone(checkpoint, turns)
    model = LayoutModel(load_lm(str(checkpoint), gradient_checkpointing=False))
    found = {way: oracle.compute(model, oracle.lay(turns, way, BUDGET)) for way in ("rows", "tree")}
    distances = {way: oracle.compare(each, expected) for way, each in found.items()}
    return {
        "reward_before": rewards[min(rewards)],
        "reward_after": rewards[max(rewards)],
        "grad_rel_rows": distances["rows"].gradient,
        "grad_rel_tree": distances["tree"].gradient,
        "logprob_max_abs": max(each.logprob for each in distances.values()),
        "engine_gap": statistics.fmean(fields.get("same_weights_gap", 0.0) for fields in stepped),
        "step_rewards": [fields.get("reward") for fields in stepped],
        "tree_tokens": sum(layout.num_tokens for layout in oracle.lay(turns, "tree", BUDGET)),
        "row_tokens": sum(layout.num_tokens for layout in oracle.lay(turns, "rows", BUDGET)),
    }


if __name__ == "__main__":
    main()
