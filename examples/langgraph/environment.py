"""A desk for customers: look up an order, and decide what to do by the rule for its status.

Each task has a seed from which `build` makes the desk. At toy size the rules are the same in all tasks, and nobody says them: the
reward teaches them. At full size they differ from task to task, and the agent must read them.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

import msgspec

HELD_OUT_SEED, TRAIN_SEED, WARMUP_SEED = 0, 1_000_000_000, 2_000_000_000
"""First seeds of the splits. Demonstrations use seeds from WARMUP_SEED on."""
HELD_OUT = 96
TRAINED = {"toy": 1500, "full": 20_000}
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)

ACTIONS = ("close", "refund", "resend", "wait")
TOY_RULES = {"broken": "refund", "late": "wait", "lost": "resend", "returned": "close"}
STATUSES = tuple(TOY_RULES)
CUSTOMERS = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana")
ORDERS = {"toy": 4, "full": 12}


class Order(msgspec.Struct, frozen=True, kw_only=True):
    number: str
    status: str
    customer: str
    price: int

    def text(self, size: str) -> str:
        if size == "toy":
            return f"order {self.number}: {self.status}"
        return f"order {self.number}: {self.status}, price {self.price}, customer {self.customer}"


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """What to do with orders of one status."""

    gold: str
    """Action for gold members."""
    cheap: str
    """Action for others, below the limit."""
    dear: str
    """Action for others, from the limit on."""
    limit: int

    def text(self, status: str) -> str:
        if self.gold == self.cheap == self.dear:
            return f"{status}: {self.gold}"
        return f"{status}: {self.gold} for gold members; for others {self.cheap} below {self.limit}, else {self.dear}"


class Desk(msgspec.Struct, frozen=True, kw_only=True):
    """What the tools know, and what is asked."""

    size: str
    orders: dict[str, Order]
    gold: frozenset[str]
    """Names of gold members."""
    rules: dict[str, Rule]
    asked: str
    """Number of the order that the customer asks about."""

    @property
    def question(self) -> str:
        return f"What about order {self.asked}?"

    @property
    def right(self) -> str:
        """Action that the rules prescribe."""
        order = self.orders[self.asked]
        rule = self.rules[order.status]
        if order.customer in self.gold:
            return rule.gold
        return rule.cheap if order.price < rule.limit else rule.dear

    def lookup(self, number: str) -> str:
        return self.orders[number].text(self.size) if number in self.orders else f"no order {number}"

    def customer(self, name: str) -> str:
        if name not in CUSTOMERS:
            return f"no customer {name}"
        return f"{name}: {'gold' if name in self.gold else 'no'} member"

    def policy(self, status: str) -> str:
        return self.rules[status].text(status) if status in self.rules else f"the statuses are {', '.join(STATUSES)}"


def train() -> Iterator[dict[str, Any]]:
    """Yield the training tasks of the toy size."""
    return _tasks("train", "toy", TRAIN_SEED, TRAINED["toy"])


def held_out() -> Iterator[dict[str, Any]]:
    """Yield the held-out tasks of the toy size."""
    return _tasks("held-out", "toy", HELD_OUT_SEED, HELD_OUT)


def train_full() -> Iterator[dict[str, Any]]:
    """Yield training tasks whose rules depend on price and customer, and are another desk's each time."""
    return _tasks("train", "full", TRAIN_SEED, TRAINED["full"])


def held_out_full() -> Iterator[dict[str, Any]]:
    return _tasks("held-out", "full", HELD_OUT_SEED, HELD_OUT)


def build(task: dict[str, Any]) -> Desk:
    """Return the desk of a task; the same task gives the same desk."""
    dice = random.Random(task["seed"])
    numbers = [str(number) for number in dice.sample(range(100, 1000), ORDERS[task["size"]])]
    orders = {
        number: Order(
            number=number,
            status=dice.choice(STATUSES),
            customer=dice.choice(CUSTOMERS),
            price=dice.randint(5, 200),
        )
        for number in numbers
    }
    if task["size"] == "toy":
        rules = {status: Rule(gold=do, cheap=do, dear=do, limit=0) for status, do in TOY_RULES.items()}
    else:
        rules = {status: _draw_rule(dice) for status in STATUSES}
    gold = frozenset(dice.sample(CUSTOMERS, 3))
    return Desk(size=task["size"], orders=orders, gold=gold, rules=rules, asked=numbers[0])


def answer_of(reply: str) -> str:
    """Return the action of the last <answer>; empty if there is none."""
    answers = ANSWER.findall(reply)
    return answers[-1].strip().lower() if answers else ""


def score(desk: Desk, reply: str) -> float:
    """Return 1 if the answer is the action that the rules prescribe."""
    return 1.0 if answer_of(reply) == desk.right else 0.0


def _draw_rule(dice: random.Random) -> Rule:
    gold, cheap, dear = dice.sample(ACTIONS, 3)
    return Rule(gold=gold, cheap=cheap, dear=dear, limit=dice.randint(20, 180))


def _tasks(split: str, size: str, first: int, count: int) -> Iterator[dict[str, Any]]:
    for number in range(count):
        yield {"id": f"{split}-{size}-{number}", "size": size, "seed": first + number}
