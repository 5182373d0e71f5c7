def page(items: list[int], number: int, size: int) -> list[int]:
    """Return the items of a page; the first page has the number 1."""
    return items[number * size : (number + 1) * size]
