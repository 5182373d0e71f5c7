VALUES = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100, "D": 500, "M": 1000}


def roman(text: str) -> int:
    """Return the value of a Roman numeral."""
    return sum(VALUES[letter] for letter in text)
