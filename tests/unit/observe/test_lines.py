"""Lines for a person: text that is too long for the terminal goes on below itself, and words stay whole."""

from swarmq.observe.lines import wrap_beside


def test_text_goes_on_below_itself() -> None:
    assert wrap_beside("error   ", "loss: it is far too high", width=24) == (
        "error   loss: it is far\n"
        "        too high"
    )  # fmt: skip


def test_a_word_that_finds_no_room_stays_whole_to_be_copied() -> None:
    url = "http://127.0.0.1:15672/a-long-path"
    assert wrap_beside("ok ", f"see {url}", width=20) == f"ok see\n   {url}"


def test_lines_of_a_text_stay_lines() -> None:
    assert wrap_beside("ok ", "the log:\n\nlast words", width=80) == "ok the log:\n\n   last words"


def test_a_line_that_no_terminal_shows_is_not_broken() -> None:
    assert wrap_beside("ok ", "word " * 40, width=None) == "ok " + "word " * 40
