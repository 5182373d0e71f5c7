"""Same seed, same batches: two processes, one after the other, come to the same loss and gradient to the last bit.

    python -m benchmarks.repeats                # on a GPU where there is one; FP32

Each makes the same small model, trains the same batches of random tokens and tells loss and gradient norm of every step
as the bits of a double. Other processes on the machine change nothing but the time.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.learner import episodes, make_model
from benchmarks.timelines.run import SHAPES
from swarmq.config import Train
from swarmq.learner.store.records import BatchIndex, BatchRecord
from swarmq.learner.train.trainer import Trainer

MODEL, STEPS, ROW, EPISODES, SEED = "tiny", 8, 256, 16, 7
TOLD = ("loss", "grad_norm")


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--into", type=Path, help="where one process writes what it came to")
    arguments = parser.parse_args()
    if arguments.into:
        arguments.into.write_text(json.dumps(train()))
        return
    place = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        runs = [run(Path(folder) / f"{number}.json") for number in range(2)]
    pairs = list(zip(*runs, strict=True))
    equal = sum(one == other for one, other in pairs)
    rows = [
        [number, *(float(_value(one[name])) for name in TOLD), one == other]
        for number, (one, other) in enumerate(pairs, 1)
    ]
    print(report.table(("step", *TOLD, "equal"), rows))
    print(
        report.save(
            f"repeats_{report.place(place)}",
            {"steps": STEPS, "steps_equal": equal},
            detail={"runs": runs},
            out=arguments.out,
        )
    )


def run(into: Path) -> list[dict[str, str]]:
    subprocess.run([sys.executable, "-m", "benchmarks.repeats", "--into", into], check=True)
    made: list[dict[str, str]] = json.loads(into.read_text())
    return made


def train() -> list[dict[str, str]]:
    """The bits of what every step says."""
    settings = Train(
        mixed_precision="no",
        seed=SEED,
        deterministic=True,
        learning_rate=1e-3,
        warmup_steps=0,
        token_log=False,
        trackers=(),
    )
    with tempfile.TemporaryDirectory() as folder:
        make_model(MODEL, folder, torch.device("cpu"))
        trainer = Trainer(folder, settings)
        batch = episodes(ROW, EPISODES, SHAPES[MODEL]["vocab_size"])
        steps = (
            trainer.step(BatchRecord(index=BatchIndex(record=n, version=n), episodes=batch, settings=settings))
            for n in range(1, STEPS + 1)
        )
        return [{name: _bits(fields[name]) for name in TOLD} for fields in steps]


def _bits(value: Any) -> str:
    return struct.pack(">d", float(value)).hex()


def _value(bits: str) -> float:
    (value,) = struct.unpack(">d", bytes.fromhex(bits))
    return float(value)


if __name__ == "__main__":
    main()
