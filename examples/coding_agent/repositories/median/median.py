def median(values: list[float]) -> float:
    """Return the middle of the sorted values, or the mean of the two in the middle."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
