"""The swarm: many clients, several kinds, several models, changed while it runs.

    python -m benchmarks.swarm --part collector mix edit scale hold policies

Each part can be run alone, and needs no more than it uses; the figures of parts that were not run are kept from the last time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import report
from swarmq.messages import encode

PARTS = ("collector", "mix", "edit", "scale", "hold", "policies")
EPISODES = 1600
PICTURE = Path(__file__).parents[2] / "docs" / "images" / "swarm-edit.png"

Found = tuple[dict[str, float], dict[str, Any]]


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the two-policy runs")
    parser.add_argument("--steps", type=int, default=30, help="of the two-policy runs")
    parser.add_argument("--episodes", type=int, default=8000, help="for each number of workers")
    options = parser.parse_args()
    figures, detail = report.kept("swarm", out=options.out)
    runs: dict[str, Callable[[], Iterable[Found]]] = {
        "collector": lambda: [one_collector()],
        "mix": lambda: [mix()],
        "scale": lambda: [scale(options.episodes)],
        "hold": lambda: [hold(options.episodes)],
        "edit": lambda: [edit()],
        "policies": lambda: policies(options.seeds, options.steps),
    }
    for part in options.part:
        print(f"--- {part}", flush=True)
        for some, more in runs[part]():
            figures |= some
            detail[part] = more
            report.save("swarm", figures, detail=detail, out=options.out, finished=False)
    print(report.table(("figure", "value"), list(figures.items())))
    report.save("swarm", figures, detail=detail, out=options.out)


def one_collector() -> Found:
    """Episodes of ten turns, by one core (benchmarks/collector.py)."""
    from benchmarks import collector  # noqa: PLC0415 - a part needs no more than it uses

    bodies = [encode(piece) for piece in collector.traffic(EPISODES, 10, 128)]
    passes = [collector.collect(bodies) for _ in range(collector.REPEATS)]
    spread = report.Spread.of(EPISODES / each.cpu_s for each in passes)
    return {"collector_episodes_per_s": spread.median}, {"samples": spread.samples, "turns": 10, "episodes": EPISODES}


def mix() -> Found:
    from benchmarks.swarm import mix  # noqa: PLC0415 - a part needs no more than it uses

    found = mix.run()
    figures = {
        "mix_batches": len(found.rows),
        "mix_error_max_groups": found.error_max,
        "mix_change_steps": found.changed_from - found.asked_at,
        "mix_lent_batches": found.lent_batches,
        "mix_back_batches": found.back_batches,
    }
    return figures, msgspec.to_builtins(found)


def scale(episodes: int) -> Found:
    from benchmarks.swarm import scale  # noqa: PLC0415 - a part needs no more than it uses

    found = scale.run(episodes)
    one, many = found[0], found[-1]
    rows = [(f.workers, f.episodes_per_s, f.open_max, *(f.cpu_ms[part] for part in sorted(f.cpu_ms))) for f in found]
    print(report.table(("workers", "episodes/s", "at once", *(f"{part} ms" for part in sorted(one.cpu_ms))), rows))
    figures = {
        "episodes_per_s_16_workers": many.episodes_per_s,
        "scale_efficiency_16": many.episodes_per_s / one.episodes_per_s,
        "overhead_cpu_ms_16_workers": sum(many.cpu_ms.values()),
    }
    return figures, {"note": scale.__doc__, "workers": msgspec.to_builtins(found)}


def hold(episodes: int) -> Found:
    from benchmarks.swarm import scale  # noqa: PLC0415 - a part needs no more than it uses

    found = scale.hold(episodes)
    figures = {
        "held_episodes": found.open_max,
        "held_episodes_per_s": found.episodes_per_s,
        "held_cpu_ms": sum(found.cpu_ms.values()),
        "held_dropped": found.dropped,
    }
    return figures, msgspec.to_builtins(found)


def edit() -> Found:
    from benchmarks.swarm import edit  # noqa: PLC0415 - a part needs no more than it uses

    found = edit.run(PICTURE)
    return {"edit_steps_lost": found.steps_lost, "edit_episodes_twice": found.episodes_twice}, msgspec.to_builtins(
        found
    )


def policies(seeds: list[int], steps: int) -> Iterator[Found]:
    """What is known after each seed."""
    from benchmarks.swarm import policies  # noqa: PLC0415 - a part needs no more than it uses

    found: list[policies.Result] = []
    for seed in seeds:
        found.append(policies.run(seed, steps=steps))
        rows = [
            (f.seed, policy, f.before[policy], f.after[policy], f.steps[policy], f.trained[policy], f.twice)
            for f in found
            for policy in f.before
        ]
        print(report.table(("seed", "policy", "before", "after", "steps", "trained", "twice"), rows), flush=True)
        figures = {
            "two_policy_seeds": len(found),
            "two_policy_reward_before_max": max(max(f.before.values()) for f in found),
            "two_policy_reward_after_min": min(min(f.after.values()) for f in found),
            "two_policy_rise_min": min(f.after[p] - f.before[p] for f in found for p in f.before),
            "two_policy_trained_twice": sum(f.twice for f in found),
        }
        yield figures, {"runs": msgspec.to_builtins(found)}
