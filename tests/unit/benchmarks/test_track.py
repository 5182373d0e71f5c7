"""The tracked figures: a fall beyond the noise is found, and nothing else is."""

import msgspec
import pytest
from benchmarks.track.__main__ import gate, run_part
from benchmarks.track.figures import FIGURES, PARTS
from benchmarks.track.record import Line, append_line, compare, convert, measure_noise, read_lines, read_noise

BY_NAME = {figure.name: figure for figure in FIGURES}
NOISE = {"timelines_chat": 0.02, "wire_bytes": 0.0, "demo_reward": 0.01}


def line(**figures):
    return Line(commit="c", date="2026-01-02", hardware="h", versions={}, reference_s=0.2, figures=figures)


def verdict(name, *values):
    [found] = compare([line(**{name: value}) for value in values], NOISE)
    return found


@pytest.mark.parametrize(
    ("name", "values", "has_fallen"),
    [
        ("timelines_chat", (5.0, 4.71), False),
        ("timelines_chat", (5.0, 4.69), True),
        ("timelines_chat", (5.0, 9.0), False),
        ("wire_bytes", (26.0, 26.0), False),
        ("wire_bytes", (26.0, 26.2), False),
        ("wire_bytes", (26.0, 26.3), True),
        ("wire_bytes", (26.0, 20.0), False),
        ("demo_reward", (0.9, 0.88), False),
        ("demo_reward", (0.9, 0.86), True),
        ("faults_lost", (0.0, 0.0), False),
        ("faults_lost", (3.0, 1.0), True),
        ("faults_lost", (1.0,), True),
        ("timelines_chat", (5.0,), False),
        ("learner_speed", (5.0, 1.0), False),  # its noise is not known
    ],
)
def test_only_a_fall_beyond_the_noise_is_one(name, values, has_fallen):
    assert verdict(name, *values).has_fallen == has_fallen


def test_the_newest_line_is_compared_with_the_median_of_the_last_five():
    found = verdict("timelines_chat", 100.0, 4.0, 5.0, 5.0, 6.0, 50.0, 4.9)
    assert (found.before, round(found.change, 6)) == (5.0, -0.02)


def test_a_fall_that_was_accepted_is_none_and_the_next_line_is_compared_with_it():
    accepted = msgspec.structs.replace(line(wire_bytes=40.0), accepted={"wire_bytes": "turns name their model"})
    assert not compare([line(wire_bytes=26.0), accepted], NOISE)[0].has_fallen
    for value, has_fallen in ((40.1, False), (41.0, True)):
        [found] = compare([line(wire_bytes=26.0), accepted, line(wire_bytes=value)], NOISE)
        assert (found.before, found.has_fallen) == (40.0, has_fallen)


def test_a_figure_that_a_line_lacks_is_left_out():
    lines = [line(timelines_chat=5.0), line(wire_bytes=26.0)]
    assert [found.figure.name for found in compare(lines, NOISE)] == ["wire_bytes"]
    assert compare(lines, NOISE)[0].before is None


def test_times_and_rates_are_in_units_of_the_reference():
    assert convert(BY_NAME["demo_time"], 100.0, 0.2) == pytest.approx(500.0)
    assert convert(BY_NAME["collector_rate"], 1000.0, 0.2) == pytest.approx(200.0)
    assert convert(BY_NAME["wire_bytes"], 26.0, 0.2) == 26.0


def test_noise_is_a_share_except_for_rewards():
    assert measure_noise(BY_NAME["wire_bytes"], [9.0, 10.0, 11.0]) == pytest.approx(0.1)
    assert measure_noise(BY_NAME["demo_reward"], [0.8, 0.9, 1.0]) == pytest.approx(0.1)


def test_a_line_is_read_as_it_was_written(tmp_path):
    lines = [line(wire_bytes=26.0), line(faults_lost=0.0)]
    for one in lines:
        append_line(one, tmp_path / "track.jsonl")
    assert read_lines(tmp_path / "track.jsonl") == lines
    assert read_lines(tmp_path / "missing.jsonl") == []


def test_the_gate_names_what_has_fallen(capsys):
    assert gate([line(faults_lost=0.0), line(faults_lost=0.0)]) == 0
    assert gate([line(faults_lost=0.0), line(faults_lost=2.0)]) == 1
    assert "FALLEN" in capsys.readouterr().out


def test_every_tracked_figure_comes_from_a_benchmark_of_the_set():
    assert {figure.benchmark for figure in FIGURES} == {part.benchmark for part in PARTS}
    assert set(read_noise()) <= set(BY_NAME)


def test_the_record_of_this_checkout_passes():
    lines = read_lines()
    assert lines, "run `make track`"
    assert [found.figure.name for found in compare(lines, read_noise()) if found.has_fallen] == []
    assert set(lines[-1].figures) <= set(BY_NAME)


def test_messages_are_no_longer_than_the_record_says(tmp_path):
    [wire] = [part for part in PARTS if part.benchmark == "wire"]
    figures = {"wire_bytes": run_part(wire, tmp_path)["bytes_per_sampled_token_20"]}
    known = [one for one in read_lines() if "wire_bytes" in one.figures]
    newest = msgspec.structs.replace(known[-1], figures=figures)
    [found] = compare([*known, newest], read_noise())
    assert not found.has_fallen, f"{found.newest} bytes for a sampled token, before {found.before}"
