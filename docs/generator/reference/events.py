"""Every event with its fields, from `swarmq.event_fields`."""

from __future__ import annotations

from collections.abc import Iterator

from docs.generator.reference.source import cell

from swarmq.event_fields import EVENTS, FIELDS

SOURCES = {
    "collector": "`collector`",
    "learner": "`learner.POLICY`",
    "proxy": "`proxy.NUMBER`",
    "dashboard": "`dashboard`",
    "host": "`host.NAME`",
    "study": "`study`",
    "any": "any process",
}


def page() -> str:
    return "\n".join(line for key in EVENTS for line in _event(*key))


def _event(name: str, sender: str) -> Iterator[str]:
    yield f"## {name} ({'any process' if sender == 'any' else sender})\n"
    yield f"{EVENTS[name, sender]} Source: {SOURCES[sender]}.\n"
    yield "| field | meaning |\n|---|---|"
    for field, meaning in FIELDS[name, sender].items():
        yield f"| `{field}` | {cell(meaning)} |"
    yield ""
