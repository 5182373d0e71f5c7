"""What was measured of a workload, the figures made of it, and where the ratio of tokens goes on its way to them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from benchmarks import report

WAYS = ("oracle", "rows", "tree")


class Flops(NamedTuple):
    """Of a forward pass and twice that for the backward pass; recomputation not counted. What shares beginnings
    computes fewer tokens, and those see more each; the head computes the sampled tokens whatever the way."""

    tokens: float
    attention: float
    head: float


class Measured(NamedTuple):
    workload: str
    tokens: dict[str, int]
    flops: dict[str, Flops]
    seconds: dict[str, report.Spread]
    trained: int
    plan_s: dict[str, float]
    pass_tokens: dict[str, int]
    """At most, in the passes of each way."""
    chosen: str
    goal: float | None

    def speedup(self, way: str) -> float:
        return self.seconds["oracle"].median / self.seconds[way].median

    def token_ratio(self, way: str) -> float:
        return self.tokens["oracle"] / self.tokens[way]

    def flop_ratio(self, way: str) -> float:
        return sum(self.flops["oracle"]) / sum(self.flops[way])

    def attention_ratio(self, way: str) -> float:
        """Without the head."""
        return sum(self.flops["oracle"][:2]) / sum(self.flops[way][:2])


def summary(results: Iterable[Measured]) -> dict[str, float]:
    """The figures to be held: linear chats as rows, forks as the tree, the rest as the cost model would have it."""
    figures: dict[str, float] = {}
    for result in results:
        name = result.workload.replace("forks_3", "forks")
        way = "rows" if name.startswith("linear") else "tree" if name.startswith("forks") else result.chosen
        figures[f"speedup_{name}"] = result.speedup(way)
        if name == "forks":
            figures["speedup_forks_rows"] = result.speedup("rows")
        if way == "tree":
            suffix = "" if name == "forks" else f"_{name}"
            figures[f"tree_over_token_ratio{suffix}"] = result.speedup("tree") / result.token_ratio("tree")
            figures[f"tree_over_flop_ratio{suffix}"] = result.speedup("tree") / result.flop_ratio("tree")
    return figures


def described(result: Measured) -> dict[str, Any]:
    return {
        "workload": result.workload,
        "commit": report.commit(),
        "goal": result.goal,
        "trained_tokens": result.trained,
        "chosen_by_cost_model": result.chosen,
        "ways": {
            way: {
                "tokens": result.tokens[way],
                "seconds_median": result.seconds[way].median,
                "seconds_low": result.seconds[way].low,
                "seconds_high": result.seconds[way].high,
                "repeats": len(result.seconds[way].samples),
                "plan_s": result.plan_s[way],
                "pass_tokens_at_most": result.pass_tokens[way],
                "token_ratio": result.token_ratio(way),
                "attention_ratio": result.attention_ratio(way),
                "flop_ratio": result.flop_ratio(way),
                "speedup": result.speedup(way),
                "flops": result.flops[way]._asdict(),
                "teraflops_per_s": sum(result.flops[way]) / result.seconds[way].median / 1e12,
            }
            for way in WAYS
        },
    }


def rest(result: Measured) -> str:
    """Where the ratio of tokens goes on its way to the speed-up."""
    best = max(("rows", "tree"), key=result.speedup)
    return (
        f"{result.workload}: {result.token_ratio(best):.2f} times fewer tokens; {result.attention_ratio(best):.2f} times "
        f"less work with attention, {result.flop_ratio(best):.2f} with the head too; {result.speedup(best):.2f} measured"
    )


HEADS = ["workload", "tokens", "rows", "tree", "oracle s", "rows s", "tree s", "rows x", "tree x", "of tokens", "goal"]


def line(result: Measured) -> list[object]:
    best = max(("rows", "tree"), key=result.speedup)
    return [
        result.workload,
        *(result.tokens[way] for way in WAYS),
        *(result.seconds[way].median for way in WAYS),
        *(f"{result.speedup(way):.2f} ({result.token_ratio(way):.2f})" for way in WAYS[1:]),
        result.speedup(best) / result.token_ratio(best),
        result.goal or "",
    ]
