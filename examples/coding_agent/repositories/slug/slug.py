def slug(title: str) -> str:
    """Return the words of a title in lower case, joined by single dashes."""
    return title.lower().replace(" ", "-")
