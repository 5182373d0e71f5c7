"""`swarmq init`: write a job, an agent and tasks to start from. The templates are in `swarmq/starter`, where tests run them."""

from __future__ import annotations

import re
import shlex
from importlib.resources import files
from pathlib import Path

import click

from swarmq.cli.common import main
from swarmq.config import make_folder
from swarmq.errors import ConfigError

STARTER = ("job.toml", "agent.py", "tasks.jsonl")


@main.command()
@click.argument("folder", type=click.Path(path_type=Path), default=".")
@click.option("--model", default="Qwen/Qwen3-1.7B", show_default=True, help="A Hugging Face name or folder to train.")
def init(folder: Path, model: str) -> None:
    """Write a commented job, an agent and tasks to start from.

    Files that are there already are never touched.

    \b
    swarmq init math
    """
    there = [name for name in STARTER if (folder / name).exists()]
    if there:
        raise ConfigError(f"{folder / there[0]}: already exists, so nothing was written; name another folder")
    make_folder(folder)
    run = re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-")[:40].rstrip("-") or "first"
    for name in STARTER:
        text = files("swarmq").joinpath("starter", name).read_text()
        if name == "job.toml":
            text = text.replace("NAME", run).replace("MODEL", model)
        (folder / name).write_text(text)
    cd = "" if folder.resolve() == Path.cwd() else f"cd {shlex.quote(str(folder))}\n"
    click.echo(
        f"{', '.join(str(folder / name) for name in STARTER)} written. Next, on a host with a GPU:\n\n"
        f"{cd}swarmq train job.toml\n\n"
        "or, with agents that are started and changed by themselves, in two terminals:\n\n"
        f"{cd}swarmq up job.toml\n\n"
        f"{cd}swarmq feed runs/{run} tasks.jsonl --epochs 50 --seed 0\n"
        f"SWARMQ_INVITE=runs/{run} swarmq worker agent:attempt --concurrency 32\n\n"
        f"`swarmq watch runs/{run}` shows the progress."
    )
