"""Every loss and advantage, and one of each from docs/how-to/own-methods.md: the checks of `swarmq check-method`, and whether it learns.

    python -m benchmarks.methods                       # two tasks, two seeds each, on a CPU; about ten minutes
    python -m benchmarks.methods --steps 20 --seeds 0  # shorter

Two tasks for a model of two layers that begins with random weights: in `bandit` an answer is one token, in `turns` three turns of one
token each are rewarded together at the end. A token is right if it is the one of four classes that the prompt asks for, so
guessing gives 0.25. Losses are tried with the advantage `rloo`, advantages with the loss `reinforce`. `sft` gets right answers as
demonstrations, and `distill` the model that `reinforce` has trained as its teacher, also over its likeliest tokens (`top_k`).
`demonstrations` trains right answers beside the batches of `reinforce`.
"""

from __future__ import annotations

import copy
import random
import statistics
import tempfile
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from transformers import AutoModelForCausalLM

from benchmarks import report
from support.episodes import make_qwen
from support.own_methods import ADVANTAGE, LOSS, write_own_methods
from swarmq.config import ADVANTAGES, LOSSES, Critic, Loss, Sft, Train, is_own_method
from swarmq.learner.demonstrations import draw_demonstrations
from swarmq.learner.methods import registry
from swarmq.learner.methods.check import check_method
from swarmq.learner.methods.credit import has_signal
from swarmq.learner.store.records import BatchIndex, BatchRecord
from swarmq.learner.train.trainer import Trainer
from swarmq.messages import Rollout, Slot, Turn, VersionSpan, pack_floats, pack_ids

TURNS = {"bandit": 1, "turns": 3}
GROUPS, GROUP_SIZE, CLASSES, PROMPTS = 8, 8, 4, 4
EVALUATED = 512
TRAIN = Train(
    gradient_checkpointing=False,
    learning_rate=1e-2,
    warmup_steps=3,
    token_log=False,
    trackers=(),
    loss=Loss(name="reinforce"),
    critic=Critic(learning_rate=3e-3),
)


class Measured(NamedTuple):
    before: float
    after: float
    interval: float
    """Half of the 95 % interval of `after`, over the evaluated episodes."""


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--only", nargs="+", default=[], help="names of methods")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as given:
        folder = Path(given)
        write_own_methods(folder)
        registry.read_own(msgspec.structs.replace(TRAIN, loss=Loss(name=LOSS), advantage=ADVANTAGE), str(folder))
        every = list_settings(folder)
        settings = {label: train for label, train in every.items() if label.split()[1] in (arguments.only or label)}
        checked, worst = run_checks(settings)
        results = {
            name: measure(name, train, folder, arguments.steps, arguments.seeds) for name, train in settings.items()
        }
    columns = [f"{task}, seed {seed}" for task in TURNS for seed in arguments.seeds]
    print(report.table(("method", *columns), [[name, *map(_show, found)] for name, found in results.items()]))
    learned = sum(all(each.after - each.interval > each.before + 0.1 for each in found) for found in results.values())
    figures = {"methods": len(results), "methods_checked": checked, "grad_rel_max": worst, "learned": learned}
    detail = {name: dict(zip(columns, map(_show, found), strict=True)) for name, found in results.items()}
    print(report.save("methods", figures, detail=detail, out=arguments.out))


def list_settings(folder: Path) -> dict[str, Train]:
    """Return the settings of every method, the teacher's before those of its student."""
    found = {}
    teacher = str(folder / "teacher-TASK")
    for name in sorted([*LOSSES, LOSS], key=lambda each: each != "reinforce"):
        taught = teacher if name == "distill" else None
        found[f"loss {name}"] = msgspec.structs.replace(TRAIN, loss=Loss(name=name), teacher=taught)
    for beta in (0.0, 1.0):
        loss = Loss(name="distill", top_k=8, distill_beta=beta)
        found[f"loss distill top_k beta={beta:g}"] = msgspec.structs.replace(TRAIN, loss=loss, teacher=teacher)
    found["loss reinforce demonstrations"] = msgspec.structs.replace(TRAIN, sft=Sft(demonstrations="made here"))
    for name in [*ADVANTAGES, ADVANTAGE]:
        if name != TRAIN.advantage:
            found[f"advantage {name}"] = msgspec.structs.replace(TRAIN, advantage=name)
    return found


def run_checks(settings: dict[str, Train]) -> tuple[int, float]:
    """Return how many methods pass all checks, and the largest relative difference between gradients in float32 and float64."""
    passed, worst = 0, 0.0
    for label, train in settings.items():
        kind = label.split()[0]
        name = train.loss.name if kind == "loss" else train.advantage
        made = list(check_method(kind, registry.find_method(kind, name), train))
        passed += not any(check.flaw for check in made)
        worst = max([worst, *(check.figure or 0.0 for check in made if "float64" in check.name)])
    return passed, worst


def measure(label: str, train: Train, folder: Path, steps: int, seeds: list[int]) -> list[Measured]:
    found = []
    for task in TURNS:
        for seed in seeds:
            model = make_qwen(folder / f"model-{seed}", seed=seed)
            teacher = train.teacher and train.teacher.replace("TASK", task)
            own = msgspec.structs.replace(train, teacher=teacher, seed=seed)
            found.append(
                learn(task, Trainer(str(model), own), own, steps, seed, folder if label == "loss reinforce" else None)
            )
            print(f"{label}, {task}, seed {seed}: {_show(found[-1])}", flush=True)
    return found


def learn(task: str, trainer: Trainer, train: Train, steps: int, seed: int, folder: Path | None) -> Measured:
    """Train a model and return its reward before and after. `folder`: where the model is kept as a teacher."""
    rng, baselines = random.Random(seed), dict[str, float]()
    generator = torch.Generator().manual_seed(seed)
    before, _ = evaluate(task, trainer, generator)
    for step in range(1, steps + 1):
        asked = [rng.randrange(PROMPTS) for _ in range(GROUPS)]
        is_sft = train.loss.name == "sft"
        groups = attempt(task, trainer, asked, generator, version=step - 1, right=is_sft)
        used = [group for group in groups if has_signal(group, train)]
        episodes = tuple(episode for group in used for episode in group)
        index = BatchIndex(record=step, version=step)
        if not episodes:
            break  # all rewards are equal: it has learned the task
        record = BatchRecord(index=index, episodes=episodes, settings=train, baselines=baselines)
        if any(map(is_own_method, train.methods)):
            record = msgspec.structs.replace(record, methods=registry.describe_methods(train))
        if train.sft:
            shown = attempt(task, trainer, asked, generator, version=step - 1, right=True)
            right = [episode for group in shown for episode in group]
            drawn = draw_demonstrations(right, train, step=step, num_episodes=len(episodes))
            record = msgspec.structs.replace(record, demonstrations=drawn)
        trainer.step(record)
        if train.advantage == "ema":
            from swarmq.learner.methods.credit import update_baselines  # noqa: PLC0415

            baselines = update_baselines(baselines, used, train)
    after, interval = evaluate(task, trainer, generator)
    if folder is not None and not (folder / f"teacher-{task}").exists():
        (folder / f"teacher-{task}").mkdir()
        trainer.save_weights(folder / f"teacher-{task}")
    return Measured(before, after, interval)


def evaluate(task: str, trainer: Trainer, generator: torch.Generator) -> tuple[float, float]:
    """Return the mean reward of fresh episodes, and half of its 95 % interval."""
    asked = [number % PROMPTS for number in range(EVALUATED // GROUP_SIZE)]
    rewards = [e.reward for group in attempt(task, trainer, asked, generator) for e in group]
    return statistics.fmean(rewards), 1.96 * statistics.stdev(rewards) / len(rewards) ** 0.5


def attempt(
    task: str, trainer: Trainer, asked: list[int], generator: torch.Generator, *, version: int = 0, right: bool = False
) -> list[list[Rollout]]:
    """Return a group of attempts at each prompt. `right`: take a right token instead of sampling one."""
    # a copy, because the trainer's configuration must go on naming its own attention
    config = copy.deepcopy(trainer.lm.config)
    sampler = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    sampler.load_state_dict(trainer.lm.state_dict())
    prompts = [prompt for prompt in asked for _ in range(GROUP_SIZE)]
    contexts, turns, hits = [[prompt] for prompt in prompts], [[] for _ in prompts], [0] * len(prompts)
    for turn in range(TURNS[task]):
        with torch.no_grad():
            logprobs = sampler(torch.tensor(contexts)).logits[:, -1].float().log_softmax(-1)
        tokens = torch.multinomial(logprobs.exp(), 1, generator=generator)[:, 0].tolist()
        for at, context in enumerate(contexts):
            wanted = (prompts[at] + turn) % CLASSES
            token = CLASSES * (tokens[at] // CLASSES) + wanted if right else tokens[at]
            hits[at] += token % CLASSES == wanted
            turns[at].append(_make_turn(f"{version}-{at}", turn, context, token, float(logprobs[at, token]), version))
            context += [token, 100 + (prompts[at] + turn) % PROMPTS]
    groups = []
    for number, prompt in enumerate(asked):
        members = range(number * GROUP_SIZE, (number + 1) * GROUP_SIZE)
        groups.append(
            [
                Rollout(
                    run="r",
                    policy="main",
                    episode_id=f"{version}-{at}",
                    slot=Slot(task_id=str(prompt), repeat=at),
                    kind="default",
                    group_id=f"{version}-{number}",
                    group_members=GROUP_SIZE,
                    group_size=GROUP_SIZE,
                    reward=hits[at] / TURNS[task],
                    turns=tuple(turns[at]),
                )
                for at in members
            ]
        )
    return groups


def _make_turn(episode: str, number: int, context: list[int], token: int, logprob: float, version: int) -> Turn:
    """`context`: everything before the token, of which all but the newest observation was there in the turn before."""
    return Turn(
        run="r",
        episode_id=episode,
        policy="main",
        call_id=f"{episode}-{number}",
        request_id=f"{episode}-{number}",
        parent=f"{episode}-{number - 1}" if number else None,
        shared=len(context) - 1 if number else 0,
        prompt_ids=pack_ids(context[-1:]),
        sampled_ids=pack_ids([token]),
        logprobs=pack_floats([logprob]),
        versions=(VersionSpan(version=version, start=0, end=1),),
    )


def _show(found: Measured) -> str:
    return f"{found.before:.2f} → {found.after:.2f} ± {found.interval:.2f}"


if __name__ == "__main__":
    main()
