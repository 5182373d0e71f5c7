"""Reads what Python forgets at run time: the strings below the fields of a class, which say what each field is."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap

FENCE = "`" * 3


@functools.cache
def field_docs(owner: type) -> dict[str, str]:
    """Return field -> its description, of a class and the classes that it extends."""
    found: dict[str, str] = {}
    for kind in reversed(owner.__mro__):
        if kind.__module__.partition(".")[0] == "swarmq":
            found |= _own_field_docs(kind)
    return found


def _own_field_docs(kind: type) -> dict[str, str]:
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    pairs = zip(definition.body, definition.body[1:], strict=False)
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in pairs
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def directive(name: str, argument: str, content: str = "", **options: str) -> str:
    """Return a MyST directive, with a fence that is longer than any in its content."""
    longest = max(
        (len(line) - len(line.lstrip("`")) for line in content.splitlines() if line.startswith(FENCE)), default=2
    )
    fence = "`" * (longest + 1)
    head = [f"{fence}{{{name}}} {argument}".rstrip(), *(f":{key}: {value}".rstrip() for key, value in options.items())]
    return "\n".join([*head, "", content.strip(), fence, ""])


def cell(text: str) -> str:
    """Return text for a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")


IN_CODE = re.compile(r"(`+)(?:.(?!\1))*.\1", re.DOTALL)
PAGE = re.compile(r"\bdocs/[\w/-]+\.md\b")


def prose(docstring: str | None) -> str:
    """Return a docstring as Markdown: pages that it names become links, and `<name>` stays visible."""
    text = inspect.cleandoc(docstring or "")
    parts, at = [], 0
    for code in IN_CODE.finditer(text):
        parts += [_outside_code(text[at : code.start()]), code[0]]
        at = code.end()
    return "".join([*parts, _outside_code(text[at:])])


def _outside_code(text: str) -> str:
    lines = []
    for line in text.split("\n"):
        is_block = line.startswith("    ")
        lines.append(line if is_block else PAGE.sub(r"[\g<0>](/\g<0>)", re.sub(r"<(?=[\w/])", r"\\<", line)))
    return "\n".join(lines)
