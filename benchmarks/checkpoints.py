"""How long training stands still for a checkpoint, and how long the rest takes that is done beside it.

A model of random weights takes one step, so that the optimizer has its state, and is saved several times, in turns: with
everything written while training waits, and with a copy in host memory that is written, checked and made durable beside the
steps that follow. FP32 weights and both moments: 12 bytes a parameter. The first time, when the copy's memory is got, counts apart.

    python -m benchmarks.checkpoints --model 85m --repeats 5
    python -m benchmarks.checkpoints --device cuda --model 1.7b --repeats 5 --scratch /tmp      # a GPU
"""

from __future__ import annotations

import tempfile
import time
from functools import partial
from pathlib import Path

import torch

from benchmarks import report
from benchmarks.learner import episodes, make_model
from benchmarks.timelines.run import SHAPES
from swarmq.config import Train
from swarmq.learner.checkpoint import save_load
from swarmq.learner.checkpoint.model_files import HostCopies
from swarmq.learner.store.records import BatchIndex, BatchRecord, RunIdentity
from swarmq.learner.train.trainer import Trainer


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
            RunIdentity(run="r", policy="p", model="m"),
        )
        took: dict[str, list[float]] = {"at_once": [], "copied": [], "beside": []}
        copies = HostCopies()
        for number in range(arguments.repeats + 1):
            trainer.version = 2 * number + 1
            draw = partial(save_load.draft_checkpoint, folder, trainer, identity, model=model)
            took["at_once"].append(report.seconds(lambda draw=draw: [write() for write in draw().writing]))
            save_load.remove_drafts(folder)  # no draft is left there as a rule, and removing one takes its time
            trainer.version += 1
            began = time.perf_counter()
            draft = draw(copies=copies)
            took["copied"].append(time.perf_counter() - began)
            took["beside"].append(report.seconds(partial(save_load.finish_checkpoint, draft, keep=1)))
            print(", ".join(f"{what} {seconds[-1]:.2f} s" for what, seconds in took.items()), flush=True)
    spreads = {what: report.Spread.of(seconds[1:]) for what, seconds in took.items()}
    at_once, copied, beside = (spread.median for spread in spreads.values())
    figures = {
        "parameters": trainer.num_parameters,
        "waited_s": copied,
        "waited_first_s": took["copied"][0],
        "waited_at_once_s": at_once,
        "waited_ratio": at_once / copied,
        "beside_s": beside,
    }
    rows = [[arguments.model, at_once, copied, at_once / copied, beside]]
    print(report.table(("model", "all written, s", "copied, s", "ratio", "beside it, s"), rows))
    name = f"checkpoints_{report.place(arguments.device)}"
    detail = {what: spread._asdict() for what, spread in spreads.items()}
    print(report.save(name, figures, detail=detail, out=arguments.out))


def stepped(model: str, vocab: int) -> Trainer:
    train = Train(token_log=False, micro_batch_tokens=1024)
    trainer = Trainer(model, train)
    batch = BatchRecord(index=BatchIndex(record=1, version=1), episodes=episodes(128, 4, vocab), settings=train)
    trainer.step(batch)
    return trainer


if __name__ == "__main__":
    main()
