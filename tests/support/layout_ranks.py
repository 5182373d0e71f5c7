"""Run on every rank: gradients of random groups whose passes are dealt out to the ranks; rank 0 saves them."""

import sys
from collections.abc import Sequence

import torch
from accelerate import Accelerator

from support.forks import make_group, make_model
from swarmq.learner.distributed.rendezvous import leave_group
from swarmq.learner.model.layout_model import LayoutModel, PlacedLayout
from swarmq.timeline import Layout, PrefixTree

BUDGET = 40
CASES = [("llama", 3), ("qwen3", 4), ("mistral", 5), ("gemma2", 6)]
"""Architecture and seed of the group."""


def main() -> None:
    accelerator = Accelerator(cpu=True)
    made = {}
    for name, seed in CASES:
        layouts = PrefixTree(make_group(seed)).layouts(BUDGET)
        assert len(layouts) > accelerator.num_processes
        mine = layouts[accelerator.process_index :: accelerator.num_processes]
        idle = -(-len(layouts) // accelerator.num_processes) - len(mine)
        model = accelerator.prepare(LayoutModel(lm(name)))
        for layout in mine:
            (accelerator.num_processes * objective(model, layout)).backward()
        for _ in range(idle):
            (0.0 * objective(model, layouts[0])).backward()
        made[name] = gradient(model)
    if accelerator.is_main_process:
        torch.save(made, sys.argv[1])
    accelerator.wait_for_everyone()


def lm(name: str) -> torch.nn.Module:
    model = make_model(name)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def objective(model: torch.nn.Module, layout: Layout) -> torch.Tensor:
    weights = torch.sin(torch.from_numpy(7.0 * layout.episodes + 3.0 * layout.turns + layout.offsets))
    return (model(PlacedLayout.of(layout, torch.device("cpu"))).logprobs * weights).sum()


def gradient(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def alone(name: str, layouts: Sequence[Layout]) -> torch.Tensor:
    """The same on one rank."""
    model = LayoutModel(lm(name))
    for layout in layouts:
        objective(model, layout).backward()
    return gradient(model)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
    leave_group()
