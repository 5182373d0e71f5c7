"""Every HTTP route of a proxy, of a host's daemon and of the dashboard, from the OpenAPI descriptions that Litestar makes of them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from docs.generator.reference.source import cell, field_docs, prose
from litestar import Litestar
from litestar.openapi import OpenAPIConfig

from swarmq.config import SwarmJob
from swarmq.dashboard.access import LinkAccess
from swarmq.dashboard.app import DashboardPages
from swarmq.dashboard.shelf import Shelf
from swarmq.host_daemon.access import HostAccess
from swarmq.host_daemon.app import create_app as create_host_app
from swarmq.host_daemon.check import JobCheck
from swarmq.host_daemon.ledger import HostFolder
from swarmq.host_daemon.processes import UpLauncher
from swarmq.host_daemon.service import HostService
from swarmq.proxy.http.app import create_app
from swarmq.testing import MemoryBroker
from swarmq.testing.scripted_engine import ScriptedEngine

KEYS = {"agentKey": "the api key of an episode", "operatorToken": "an operator token"}
"""Security schemes of the proxy's OpenAPI description, in words."""

Schema = Mapping[str, Any]


def proxy() -> str:
    """Return the agents' and the control routes, and the records of their bodies and answers."""
    job = SwarmJob.build({"run": "run", "policies": {"main": {"model": "model"}}})
    return _page(create_app(job, root=bytes(32), engines={"main": [ScriptedEngine()]}, broker=MemoryBroker()))


def host() -> str:
    """Return the routes of a host's daemon, and the records of their bodies and answers."""
    with tempfile.TemporaryDirectory() as folder:
        place = HostFolder(Path(folder))
        service = HostService(place, UpLauncher(place), JobCheck(place.path, []), most_running=1, most_queued=1)
        return _page(create_host_app(service, HostAccess(bytes(32))))


def _page(app: Litestar) -> str:
    described = app.openapi_schema.to_schema()
    parts = [line for path, methods in described["paths"].items() for line in _route(path, methods)]
    parts += [*_errors(described["paths"]), "## Records\n"]
    records = {kind.__name__: kind for kind in _records(msgspec.Struct)}
    for name, schema in described["components"]["schemas"].items():
        parts += _record(name, schema, records[name])
    return "\n".join(parts)


def dashboard() -> str:
    """Return the routes of the dashboard, as a table."""
    pages = DashboardPages(
        Shelf([]), LinkAccess("token", name="name", cookie="cookie"), studies=None, base="", is_secure=False
    )
    config = OpenAPIConfig(title="dashboard", version="", use_handler_docstrings=True)
    described = Litestar(pages.handlers(), openapi_config=config).openapi_schema.to_schema()
    lines = ["| route | what |", "|---|---|"]
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            lines.append(f"| `{method.upper()} {path}` | {cell(prose(operation.get('description', '')))} |")
    return "\n".join([*lines, ""])


def _route(path: str, methods: Schema) -> Iterator[str]:
    for method, operation in methods.items():
        yield f"## {method.upper()} {path}\n"
        yield prose(operation.get("description") or operation["summary"]).rstrip(".") + ".\n"
        keys = [
            f"{KEYS[name]}{f' with the role `{roles[0]}`' if roles else ''}"
            for scheme in operation.get("security", ())
            for name, roles in scheme.items()
        ]
        yield f"Needs {' or '.join(keys)}.\n" if keys else "Needs no key.\n"
        body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
        if body:
            yield f"Body: {_in_words(body)}" + (", with these fields:\n" if "properties" in body else "\n")
            yield from _fields(body) if "properties" in body else ()
        for one in operation.get("parameters", ()):
            default = one["schema"].get("default")
            usual = "" if default is None else f", `{default}` by default"
            yield f"Parameter `{one['name']}` ({one['in']}): {_in_words(one['schema'])}{usual}.\n"
        good = [_answer(status, answer) for status, answer in operation["responses"].items() if status < "300"]
        bad = sorted(status for status in operation["responses"] if status >= "300")
        errors = f"; errors: {', '.join(bad)} ([meaning](#errors))" if bad else ""
        yield f"Answer: {' or '.join(good)}{errors}.\n"


def _answer(status: str, answer: Schema) -> str:
    schema = next(iter(answer.get("content", {}).values()), {}).get("schema", {})
    return f"{status}, {_in_words(schema)}" if schema else status


def _errors(paths: Schema) -> Iterator[str]:
    """Yield the meaning of the error statuses, which routes with the same keys share."""
    yield "## Errors\n\n| status | routes | meaning |\n|---|---|---|"
    rows = {
        (status, next(iter(scheme)), answer["description"])
        for methods in paths.values()
        for operation in methods.values()
        for scheme in operation.get("security", ())
        for status, answer in operation["responses"].items()
        if status >= "300"
    }
    for status, scheme, meaning in sorted(rows, key=lambda row: (row[1], row[0])):
        yield f"| {status} | with {KEYS[scheme]} | {cell(meaning)} |"
    yield ""


def _record(name: str, schema: Schema, kind: type[msgspec.Struct]) -> Iterator[str]:
    yield f"### {name}\n"
    if kind.__doc__ and not kind.__doc__.startswith(f"{name}("):
        yield prose(kind.__doc__) + "\n"
    encoded = {field.encode_name: field.name for field in msgspec.structs.fields(kind)}
    described = field_docs(kind)
    yield from _fields(schema, {name: described.get(own, "") for name, own in encoded.items()})


def _fields(schema: Schema, described: Mapping[str, str] | None = None) -> Iterator[str]:
    needed = schema.get("required", ())
    yield "| field | value | default | meaning |\n|---|---|---|---|" if described else "| field | value |\n|---|---|"
    for name, one in schema["properties"].items():
        words = _in_words(one)
        if not described:
            yield f"| `{name}`{' (required)' if name in needed else ''} | {cell(words)} |"
            continue
        default = (
            "required" if name in needed else f"`{one['default']}`" if one.get("default") not in (None, "") else ""
        )
        yield f"| `{name}` | {cell(words)} | {default} | {cell(prose(described[name]))} |"
    yield ""


def _in_words(schema: Schema) -> str:
    """Return the type of a value in words, with a link if it is a record."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "enum" in schema:
        return "one of " + ", ".join(f"`{value}`" for value in schema["enum"])
    for choices in ("oneOf", "anyOf"):
        if choices in schema:
            return " or ".join(dict.fromkeys(_in_words(one) for one in schema[choices] if one != {"type": "null"}))
    kinds = schema.get("type", "any")
    kinds = [kinds] if isinstance(kinds, str) else [kind for kind in kinds if kind != "null"]
    if kinds == ["array"]:
        return f"list of {_in_words(schema.get('items', {}))}"
    return " or ".join(
        {"any": "anything", "integer": "whole number", "string": "text", "boolean": "true or false"}.get(kind, kind)
        for kind in kinds
    )


def _records(base: type) -> Iterator[type[msgspec.Struct]]:
    for kind in base.__subclasses__():
        if kind.__module__.startswith(("swarmq.proxy", "swarmq.remote")):
            yield kind
        yield from _records(kind)
