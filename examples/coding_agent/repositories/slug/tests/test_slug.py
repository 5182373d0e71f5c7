from slug import slug


def test_words() -> None:
    assert slug("Deep Blue") == "deep-blue"


def test_spaces() -> None:
    assert slug("  Deep   Blue ") == "deep-blue"
