"""Run by test_ranks on every rank: the gradient of a batch whose passes are dealt out to the ranks; rank 0 saves it."""

import sys
from collections.abc import Sequence

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, LlamaConfig

from swarmq.learner.tree import LayoutModel, Placed
from swarmq.timeline import Layout, PrefixTree, standalone

BUDGET = 30


def main() -> None:
    accelerator = Accelerator(cpu=True)
    layouts = PrefixTree(batch()).layouts(BUDGET)
    assert len(layouts) == 3
    mine = layouts[accelerator.process_index :: accelerator.num_processes]
    idle = -(-len(layouts) // accelerator.num_processes) - len(mine)
    model = accelerator.prepare(LayoutModel(lm()))
    for layout in mine:
        (accelerator.num_processes * objective(model, layout)).backward()
    for _ in range(idle):
        (0.0 * objective(model, layouts[0])).backward()
    if accelerator.is_main_process:
        torch.save(gradient(model), sys.argv[1])
    accelerator.wait_for_everyone()
    accelerator.end_training()


def lm() -> torch.nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.2,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def batch() -> list:
    prompt = list(range(10))
    return [[standalone([*prompt, e], [20 + e, 21, 22 + t] * 2, [-1.0] * 6) for t in range(4)] for e in range(3)]


def objective(model: torch.nn.Module, layout: Layout) -> torch.Tensor:
    weights = torch.sin(torch.from_numpy(7.0 * layout.episodes + 3.0 * layout.turns + layout.offsets))
    return (model(Placed.of(layout, torch.device("cpu"))).logprobs * weights).sum()


def gradient(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def alone(layouts: Sequence[Layout]) -> torch.Tensor:
    """The same on one rank."""
    model = LayoutModel(lm())
    for layout in layouts:
        objective(model, layout).backward()
    return gradient(model)


if __name__ == "__main__":
    main()
