"""How long training stands still for a checkpoint, and how long the rest takes that is done beside it.

A model of random weights takes one step, so that the optimizer has its state, and is saved several times: `write` is what
the next step waits for, `finish` (checksums, fsync, the new name) runs while it trains. FP32 weights and both moments:
12 bytes a parameter.

    python -m benchmarks.checkpoints --model 85m --repeats 5
    python -m benchmarks.checkpoints --device cuda --model 1.7b --repeats 5 --scratch /tmp      # a GPU
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch

from benchmarks import report
from benchmarks.learner import episodes, make_model
from benchmarks.timelines import SHAPES
from swarmq.config import Train
from swarmq.learner import checkpoint
from swarmq.learner.records import BatchRecord, Identity, Index
from swarmq.learner.trainer import Trainer


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--model", default="85m", choices=SHAPES)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--scratch", help="where model and checkpoints are written, 30 bytes a parameter")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        model, folder = f"{scratch}/model", Path(scratch, "checkpoints")
        make_model(arguments.model, model, torch.device(arguments.device))
        trainer, identity = (
            stepped(model, SHAPES[arguments.model]["vocab_size"]),
            Identity(run="r", policy="p", model="m"),
        )
        written, finished = [], []
        for number in range(arguments.repeats + 1):
            trainer.version = number + 1
            began = time.perf_counter()
            draft = checkpoint.write(folder, trainer, identity, model=model)
            between = time.perf_counter()
            checkpoint.finish(draft, keep=1)
            written.append(between - began)
            finished.append(time.perf_counter() - between)
            print(f"write {written[-1]:.2f} s, finish {finished[-1]:.2f} s", flush=True)
    write, finish = report.Spread.of(written[1:]), report.Spread.of(finished[1:])
    size = 12 * trainer.num_parameters
    figures = {
        "parameters": trainer.num_parameters,
        "write_s": write.median,
        "finish_s": finish.median,
        "waited_share": write.median / (write.median + finish.median),
        "write_gb_per_s": size / write.median / 1e9,
    }
    rows = [[arguments.model, write.median, finish.median, figures["waited_share"]]]
    print(report.table(("model", "training waits, s", "beside it, s", "share"), rows))
    name = f"checkpoints_{report.place(arguments.device)}"
    print(report.save(name, figures, detail={"write": write._asdict(), "finish": finish._asdict()}, out=arguments.out))


def stepped(model: str, vocab: int) -> Trainer:
    train = Train(token_log=False, micro_batch_tokens=1024)
    trainer = Trainer(model, train)
    batch = BatchRecord(index=Index(record=1, version=1), episodes=episodes(128, 4, vocab), settings=train)
    trainer.step(batch)
    return trainer


if __name__ == "__main__":
    main()
