"""`swarmq check-method`: checks a method of the user's own on random episodes."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from swarmq.cli.common import main, require_extras
from swarmq.config import SwarmJob, is_own_method
from swarmq.errors import ConfigError


@main.command("check-method")
@click.argument("name", metavar="MODULE:FUNCTION")
@click.option(
    "--kind",
    help="Kind of the method, if its first parameter does not tell it: loss, advantage, grouping, schedule, optimizer, filter or reward.",
)
@click.option(
    "--set",
    "sets",
    multiple=True,
    metavar="KEY=VALUE",
    help="Training setting to check it with, e.g. --set loss.options.alpha=0.5.",
)
def check_method(name: str, kind: str | None, sets: tuple[str, ...]) -> None:
    """Check a method of your own on random episodes.

    A method is a loss, an advantage, a grouping, a schedule, an optimizer, a filter or a reward transform. Looks for its module in the working
    directory and among the installed packages, and prints what is wrong: wrong shapes, values that are not finite, state, a result that depends on packing, ranks or
    order, and a gradient that differs from that in float64 or from finite differences.

    \b
    swarmq check-method my_methods:my_loss
    swarmq check-method my_methods:my_loss --set loss.options.alpha=0.5
    swarmq check-method cispo --kind loss          a built-in method
    """
    require_extras("learner")
    from swarmq.learner.methods import check, registry

    if kind not in {None, *registry.PACKAGES}:
        raise ConfigError(f"--kind {kind}: choose one of {', '.join(registry.PACKAGES)}")
    if is_own_method(name):
        registry.adopt([registry.read_code(kind or "", name, str(Path.cwd()))])
    elif kind is None:
        raise ConfigError(f"{name}: write module:function, or name the kind of a built-in method with --kind")
    function = registry.find_method(kind or "", name)
    kind = kind or check.find_kind(name, function)
    overrides = [
        f"policies.main.train.{registry.SETTINGS[kind]}={name}",
        *(f"policies.main.train.{one}" for one in sets),
    ]
    tree = {"run": "check", "policies": {"main": {"model": "none"}}}
    train = SwarmJob.build(tree, sets=overrides).policies["main"].train
    failed = 0
    for one in check.check_method(kind, function, train):
        failed += bool(one.flaw)
        figure = "" if one.figure is None else f"  {one.figure:.1e}"
        click.echo(f"{'FAILED' if one.flaw else 'ok':8}{one.name}{f': {one.flaw}' if one.flaw else figure}")
    click.echo(f"{name} ({kind}): {f'{failed} checks failed' if failed else 'all checks passed'}")
    sys.exit(1 if failed else 0)
