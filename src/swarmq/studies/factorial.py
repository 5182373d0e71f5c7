"""Fractional factorial designs with two levels: few arms that still tell the factors' effects apart.

The first factors make a full design; each further one is the product of several of these, the largest products first (Box, Hunter, Hunter,
Statistics for Experimenters, 2005, chapter 6). Columns are balanced and orthogonal, so each effect is estimated from all arms.
"""

from __future__ import annotations

import itertools
import math


def fractional(num_factors: int, num_arms: int) -> list[tuple[int, ...]]:
    """Return `num_arms` rows of levels 0 and 1, one column for each factor; the first row is 0 everywhere.

    Raises ValueError if `num_arms` is no power of two that has room for the factors, and is not above all combinations.
    """
    base = int(math.log2(num_arms)) if num_arms > 0 else 0
    if 2**base != num_arms or not base <= num_factors < num_arms:
        few = 2 ** math.ceil(math.log2(num_factors + 1))
        raise ValueError(
            f"{num_factors} factors need a power of two from {few} to {2**num_factors} arms (got {num_arms})"
        )
    products = [
        chosen for size in range(base, 1, -1) for chosen in itertools.combinations(range(base), size)
    ][: num_factors - base]  # fmt: skip
    rows = itertools.product((0, 1), repeat=base)
    # a product of an even number of factors is 1 where all are low: its levels are swapped, so that the first row is low everywhere
    return [(*row, *(sum(row[i] for i in chosen) % 2 for chosen in products)) for row in rows]
