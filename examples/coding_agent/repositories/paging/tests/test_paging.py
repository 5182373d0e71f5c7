from paging import page


def test_first() -> None:
    assert page([1, 2, 3, 4, 5], 1, 2) == [1, 2]


def test_last() -> None:
    assert page([1, 2, 3, 4, 5], 3, 2) == [5]
