"""Every command with its arguments and options, from click."""

from __future__ import annotations

from collections.abc import Iterator

import click
from docs.generator.reference.source import directive, prose

from swarmq import cli


def page() -> str:
    return "\n".join(_command(cli.main, click.Context(cli.main, info_name="swarmq")))


def _command(command: click.Command, context: click.Context) -> Iterator[str]:
    name = context.command_path
    yield f"## {name}\n"
    usage = " ".join([name, *(piece for piece in command.collect_usage_pieces(context))])
    yield directive("code-block", "text", usage)
    yield _help(command.help or "")
    if any(isinstance(one, click.Option) for one in command.params):
        yield directive("program", name).replace("\n\n", "\n")
    for one in command.params:
        if isinstance(one, click.Option) and not one.hidden and (record := one.get_help_record(context)):
            yield directive("option", _names(one), prose(record[1]))
    if isinstance(command, click.Group):
        for sub in command.list_commands(context):
            found = command.get_command(context, sub)
            if found and not found.hidden:
                yield from _command(found, click.Context(found, info_name=sub, parent=context))


def _help(text: str) -> str:
    """Return a command's help; what follows a line `\\b` keeps its lines."""
    paragraphs = []
    for paragraph in prose(text).split("\n\n"):
        if paragraph.startswith("\b\n"):
            paragraphs.append(directive("code-block", "sh", paragraph.removeprefix("\b\n").replace("\\<", "<")))
        else:
            paragraphs.append(paragraph)
    return "\n\n".join(paragraphs) + "\n"


def _names(option: click.Option) -> str:
    names = [*option.opts, *option.secondary_opts]
    if option.is_flag or option.count:
        return ", ".join(names)
    value = option.make_metavar(click.Context(click.Command("x"))).replace("[", "").replace("]", "")
    return ", ".join(f"{name} <{value}>" if name == names[0] else name for name in names)
