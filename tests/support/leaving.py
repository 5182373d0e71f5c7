"""Run on two ranks: both leave, the first while a collective that it began in a backward pass is still under way."""

from __future__ import annotations

import os
import time

import torch

from swarmq.config import Train
from swarmq.learner.distributed.accelerator import make_accelerator
from swarmq.learner.distributed.rendezvous import leave_group


def main() -> None:
    model = make_accelerator(Train()).prepare(torch.nn.Linear(2, 2))
    assert isinstance(model, torch.nn.parallel.DistributedDataParallel)
    if os.environ["RANK"] == "1":
        time.sleep(1.0)
    number = torch.ones(1, requires_grad=True)
    number.register_hook(reduce)
    number.backward()


def reduce(gradient: torch.Tensor) -> None:
    torch.distributed.all_reduce(gradient.clone(), async_op=True)


if __name__ == "__main__":
    main()
    leave_group()
