"""Many apps behind one API. What an endpoint is called differs from task to task, so an agent must read an app's documentation.

Each task has a seed from which `build` makes the apps and their records. The reward depends only on the records at the end.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

HELD_OUT_SEED, TRAIN_SEED, WARMUP_SEED = 0, 1_000_000_000, 2_000_000_000
"""First seeds of the splits. Demonstrations use seeds from WARMUP_SEED on."""
HELD_OUT = 96
TRAINED = {"toy": 1500, "full": 20_000}

Action = Literal["put", "get", "list", "remove"]
VERBS: dict[Action, tuple[str, ...]] = {
    "put": ("set", "put", "save", "write", "store", "apply", "send", "keep"),
    "get": ("get", "read", "fetch", "show", "look_up"),
    "list": ("list", "index", "names", "browse"),
    "remove": ("remove", "delete", "drop", "erase", "discard"),
}
PARAMETERS: dict[Action, tuple[str, ...]] = {
    "put": ("key", "value"),
    "get": ("key",),
    "list": (),
    "remove": ("key",),
}
DEVICES = ("alarm", "blind", "fan", "heater", "lamp", "oven", "radio", "timer")
"""Apps of the toy size; each has one value."""
SERVICES = ("calendar", "contacts", "expenses", "notes", "orders", "playlist", "reminders", "tickets")
"""Apps of the full size, besides the vault."""
SUBJECTS = (
    "anna",
    "boiler",
    "car",
    "dentist",
    "garden",
    "insurance",
    "lisbon",
    "office",
    "school",
    "taxes",
    "tom",
    "wedding",
)
STATES = ("cancelled", "done", "open", "paid", "planned", "waiting")
VAULT = "vault"
GOALS = {"toy": ("set",), "full": ("copy", "move", "tidy")}

_TEXT = {"type": "string"}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "docs",
            "description": "Return the documentation of an app.",
            "parameters": {"type": "object", "properties": {"app": _TEXT}, "required": ["app"]},
        },
    },
    {
        "type": "function",
        "function": {
            "name": "call",
            "description": "Call an endpoint of an app with the parameters that its documentation names.",
            "parameters": {
                "type": "object",
                "properties": {"app": _TEXT, "endpoint": _TEXT, "key": _TEXT, "value": _TEXT, "code": _TEXT},
                "required": ["app", "endpoint"],
            },
        },
    },
]


class App(msgspec.Struct, kw_only=True):
    """An app with its records by key."""

    name: str
    records: dict[str, str]
    endpoints: dict[str, Action]
    code: str = ""
    """Code that each call needs; empty: none."""
    only_key: str = ""
    """Key of the one record of a device, whose calls take no key; empty: calls take one."""

    def parameters(self, action: Action) -> tuple[str, ...]:
        named = tuple(name for name in PARAMETERS[action] if not (name == "key" and self.only_key))
        return (*named, "code") if self.code else named

    def documentation(self) -> str:
        lines = [f"{name}({', '.join(self.parameters(action))})" for name, action in self.endpoints.items()]
        text = f"{self.name}: {', '.join(lines)}"
        return f"{text}. The code is in the app {VAULT}, under the key {self.name}." if self.code else text


class World(msgspec.Struct, kw_only=True):
    """The apps of one task, what is asked, and the records that are right at the end."""

    apps: dict[str, App]
    question: str
    wanted: dict[str, dict[str, str]]
    """Records by app."""
    subject: tuple[str, str]
    """App and value of the question; demonstrations use them."""

    def run(self, tool: str, arguments: Any) -> str:
        """Run a tool call and return its result; mistakes come back as text that the model can read."""
        if not isinstance(arguments, dict) or not all(isinstance(value, str) for value in arguments.values()):
            return "400: the arguments are texts by name"
        app = self.apps.get(arguments.get("app", ""))
        if app is None:
            return f"404: no such app; there are {', '.join(self.apps)}"
        if tool == "docs":
            return app.documentation()
        if tool != "call":
            return f"404: no tool {tool}"
        return _call(app, arguments)

    def records(self) -> dict[str, dict[str, str]]:
        return {name: app.records for name, app in self.apps.items()}


def _call(app: App, arguments: dict[str, str]) -> str:
    action = app.endpoints.get(arguments.get("endpoint", ""))
    if action is None:
        return f"404: {app.name} has no such endpoint"
    if missing := [name for name in app.parameters(action) if name not in arguments]:
        return f"400: {', '.join(missing)} missing"
    if app.code and arguments["code"] != app.code:
        return "403: wrong code"
    key = app.only_key or arguments.get("key", "")
    if action == "list":
        return ", ".join(sorted(app.records)) or "empty"
    if action == "put":
        app.records[key] = arguments["value"]
        return "ok"
    if key not in app.records:
        return f"404: no record {key}"
    return app.records[key] if action == "get" else f"removed {app.records.pop(key)}"


def train() -> Iterator[dict[str, Any]]:
    """Yield the training tasks of the toy size: one value to set in one of eight apps."""
    return _tasks("train", "toy", TRAIN_SEED, TRAINED["toy"])


def held_out() -> Iterator[dict[str, Any]]:
    """Yield the held-out tasks of the toy size."""
    return _tasks("held-out", "toy", HELD_OUT_SEED, HELD_OUT)


def train_full() -> Iterator[dict[str, Any]]:
    """Yield training tasks over several apps, some of which need a code from another one."""
    return _tasks("train", "full", TRAIN_SEED, TRAINED["full"])


def held_out_full() -> Iterator[dict[str, Any]]:
    return _tasks("held-out", "full", HELD_OUT_SEED, HELD_OUT)


def build(task: dict[str, Any]) -> World:
    """Return the world of a task; the same task gives the same world."""
    dice = random.Random(task["seed"])
    return _build_toy(dice) if task["size"] == "toy" else _build_full(task["goal"], dice)


def score(world: World) -> float:
    """Return 1 if all records of all apps are as they must be, 0 otherwise."""
    return 1.0 if world.records() == world.wanted else 0.0


def _tasks(split: str, size: str, first: int, count: int) -> Iterator[dict[str, Any]]:
    for number in range(count):
        goal = GOALS[size][number % len(GOALS[size])]
        yield {"id": f"{split}-{size}-{number}", "size": size, "goal": goal, "seed": first + number}


def _copy_records(apps: dict[str, App]) -> dict[str, dict[str, str]]:
    return {name: dict(app.records) for name, app in apps.items()}


def _build_toy(dice: random.Random) -> World:
    apps = {
        name: App(name=name, records={"level": "0"}, endpoints={dice.choice(VERBS["put"]): "put"}, only_key="level")
        for name in DEVICES
    }
    name, value = dice.choice(DEVICES), str(dice.randint(1, 99))
    wanted = _copy_records(apps) | {name: {"level": value}}
    return World(apps=apps, question=f"Turn the {name} to {value}.", wanted=wanted, subject=(name, value))


def _build_full(goal: str, dice: random.Random) -> World:
    apps = {}
    for name in SERVICES:
        endpoints = {dice.choice(verbs): action for action, verbs in VERBS.items()}
        records = {key: dice.choice(STATES) for key in dice.sample(SUBJECTS, dice.randint(3, 8))}
        code = str(dice.randrange(1000, 10_000)) if dice.random() < 0.4 else ""
        apps[name] = App(name=name, records=records, endpoints=endpoints, code=code)
    codes = {name: app.code for name, app in apps.items() if app.code}
    apps[VAULT] = App(name=VAULT, records=codes, endpoints={dice.choice(VERBS["get"]): "get"})
    source, target = dice.sample(SERVICES, 2)
    key = dice.choice(sorted(apps[source].records))
    state = apps[source].records[key]
    if goal != "tidy":
        apps[target].records.pop(key, None)
    wanted = _copy_records(apps)
    if goal == "tidy":
        question = f"Remove all records of {source} that are {state}. Change nothing else."
        wanted[source] = {name: value for name, value in wanted[source].items() if value != state}
    else:
        wanted[target][key] = state
        question = f"{goal.title()} the record {key} of {source} to {target}, under the same key. Change nothing else."
        if goal == "move":
            del wanted[source][key]
    return World(apps=apps, question=question, wanted=wanted, subject=(source, state))
