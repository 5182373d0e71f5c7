"""Simulated schedules of the collector that one core runs through in a second: `python -m benchmarks.simulation`.

A small schedule is a group or two with their clients, learners and a broker: pieces permuted, sent twice and late, answers
lost, clients that vanish and come back, the collector killed between any two of its effects; then everything is counted.
Long ones have hundreds of steps, and some run on the real store. The unit tests run the same (tests/unit/collector).
Counted per second of processor time, which a busy machine still stretches: the fastest of several portions stands for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from benchmarks.report import Spread, parser, save, table

PORTIONS = 12


def measured(play: Callable[[int], int], num: int) -> tuple[Spread, float]:
    """Schedules a CPU second, of portions of `num`; and crashes in a schedule. `play` takes the first seed."""
    rates, crashes = [], 0
    for portion in range(PORTIONS):
        began = time.process_time()
        crashes += play(portion * num)
        rates.append(num / (time.process_time() - began))
    return Spread.of(rates), crashes / (PORTIONS * num)


def main() -> None:
    given = parser(__doc__).parse_args()
    from swarmq.collector.store import Store  # noqa: PLC0415
    from unit.collector.simulator import worlds  # noqa: PLC0415 - only there once the path is
    from unit.collector.test_simulation import SCENES, SMALL, SMALL_STEPS  # noqa: PLC0415

    rows, figures = [], {}
    for name, scene in SMALL.items():
        spread, crashes = measured(lambda seed, s=scene: worlds(seed, 100, s, num_steps=SMALL_STEPS), 100)  # type: ignore[misc]
        rows.append((f"small, {name}", spread.high, spread.median, crashes))
        figures[f"schedules_per_cpu_s_{name.replace(' ', '_')}"] = spread.high
    for label, store in (("long", None), ("long, on the real store", Store)):
        spread, crashes = measured(lambda seed, t=store: worlds(seed, 5, SCENES["one kind"], store=t), 5)  # type: ignore[misc]
        rows.append((label, spread.high, spread.median, crashes))
        figures[f"long_schedules_per_cpu_s{'_on_disk' if store else ''}"] = spread.high
    print(table(("schedule", "a CPU second", "median portion", "crashes in one"), rows))
    save("simulation", figures, detail={"rows": rows}, out=given.out)


if __name__ == "__main__":
    main()
