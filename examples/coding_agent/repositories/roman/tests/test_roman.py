from roman import roman


def test_plain() -> None:
    assert roman("XVI") == 16


def test_subtracted() -> None:
    assert roman("MCMXCIV") == 1994
