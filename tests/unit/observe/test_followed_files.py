"""Files that grow are read once, and then only what was appended; another file in their place is read anew."""

import pytest

from swarmq.observe import followed_files
from swarmq.observe.followed_files import MAX_SAMPLES, EventFile, SampleFile


def event(name, number):
    return b'{"type":"event","schema":1,"run":"r","source":"s","name":"%s","at":1.0,"fields":{"n":%d}}\n' % (
        name,
        number,
    )


def numbers(file, *names):
    return [one.fields["n"] for one in file.read(names)]


def test_only_what_was_appended_is_read(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(event(b"step", 1) + event(b"episode", 2) + event(b"control", 3))
    file = EventFile(path)
    assert numbers(file, "step", "control") == [1, 3]
    size = path.stat().st_size
    assert numbers(file, "step") == [1]
    assert file.bytes_read == size
    line = event(b"step", 4)
    with path.open("ab") as out:
        out.write(b"{torn\n" + line[:20])
    assert numbers(file, "step") == [1]
    with path.open("ab") as out:
        out.write(line[20:])
    assert numbers(file, "step") == [1, 4]
    with pytest.raises(ValueError, match="episode"):
        numbers(file, "episode")


def test_a_last_line_without_a_line_break_counts(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(event(b"step", 1) + event(b"step", 2).rstrip())
    file = EventFile(path)
    assert numbers(file, "step") == numbers(file, "step") == [1, 2]


@pytest.mark.parametrize("kind", ["shorter", "other", "other of the same size"])
def test_another_file_in_its_place_is_read_anew(tmp_path, kind):
    path = tmp_path / "events.jsonl"
    path.write_bytes(event(b"step", 1) * 3)
    file = EventFile(path)
    assert numbers(file, "step") == [1, 1, 1]
    if kind == "shorter":
        path.write_bytes(event(b"step", 1))
    elif kind == "other":
        path.write_bytes(event(b"step", 7) * 4)
    else:
        (tmp_path / "new").write_bytes(event(b"step", 7) * 3)
        (tmp_path / "new").rename(path)
    assert numbers(file, "step") == {"shorter": [1], "other": [7] * 4, "other of the same size": [7] * 3}[kind]


def test_a_file_larger_than_a_portion_is_read_whole(tmp_path):
    path = tmp_path / "events.jsonl"
    wide = event(b"step", 1).replace(b'"n":1', b'"n":1,"text":"%s"' % (b"x" * 3_000_000))
    path.write_bytes(wide * 4)
    assert path.stat().st_size > followed_files.CHUNK_BYTES
    assert numbers(EventFile(path), "step") == [1] * 4


def test_samples_become_series_that_are_thinned_as_they_grow(tmp_path):
    path = tmp_path / "samples.jsonl"
    file = SampleFile(path)
    assert file.read() == {}
    with path.open("wb") as out:
        for at in range(2 * MAX_SAMPLES + 100):
            out.write(
                b'{"at": %d, "queues": {"in": %d}, "engines": {"e": {"kv": 0.5}}, "tokens_per_s": 3}\n' % (at, at)
            )
    found = file.read()
    assert found.keys() == {"in/messages", "e/kv", "tokens per second"}
    points = found["in/messages"]
    assert MAX_SAMPLES / 2 <= len(points) <= MAX_SAMPLES
    assert points[:3] == [(0, 0), (4, 4), (8, 8)]
    read = file.bytes_read
    with path.open("ab") as out:
        out.write(b'{"at": 9e9, "queues": {"in": 1}}\n' * 4)
    assert (9e9, 1) in file.read()["in/messages"]
    assert file.bytes_read - read < 200
