"""Reading of transcripts: whole, resumed, while segments are rewritten, and damaged."""

from structlog.testing import capture_logs

from support.transcripts import frame_of, make_transcript, write_segment
from swarmq.transcripts.format import Position, segment_path
from swarmq.transcripts.read import generations, read, scan, scan_segment

EPISODES = [make_transcript(f"e{number}") for number in range(6)]


def write_two(folder):
    write_segment(folder, 1, [frame_of(one) for one in EPISODES[:3]])
    write_segment(folder, 2, [frame_of(one) for one in EPISODES[3:]])


def names(folder, after=None):
    return [meta.episode_id for _, meta in scan(folder, after=after)]


def test_no_folder_is_empty(tmp_path):
    assert names(tmp_path / "none") == []
    assert read(tmp_path / "none", "e0") is None
    assert read(tmp_path / "none", Position(1, 0, 20, 0)) is None


def test_every_transcript_is_found_and_read_back_exactly(tmp_path):
    write_two(tmp_path)
    found = list(scan(tmp_path))
    assert [meta for _, meta in found] == [one.meta for one in EPISODES]
    assert [read(tmp_path, position) for position, _ in found] == EPISODES
    assert read(tmp_path, "e4") == EPISODES[4]
    assert read(tmp_path, "e9") is None


def test_received_calls_are_those_that_the_end_names(tmp_path):
    assert EPISODES[0].received == {"c0", "c1"}


def test_a_scan_goes_on_after_any_position(tmp_path):
    write_two(tmp_path)
    for number, (position, _) in enumerate(scan(tmp_path)):
        assert names(tmp_path, after=position) == [f"e{n}" for n in range(number + 1, 6)]


def test_positions_outlive_a_rewrite_that_moved_them(tmp_path):
    write_two(tmp_path)
    positions = [position for position, _ in scan(tmp_path)]
    write_segment(tmp_path, 1, [frame_of(one, with_body=one is not EPISODES[0]) for one in EPISODES[:3]], generation=1)
    assert generations(tmp_path) == {1: 1, 2: 0}
    assert names(tmp_path, after=positions[1]) == ["e2", "e3", "e4", "e5"]
    assert read(tmp_path, positions[0]) is None
    assert read(tmp_path, positions[2]) == EPISODES[2]
    assert [meta.body_bytes for _, meta in scan_segment(tmp_path, 1)] == [0, 7, 7]


def test_a_scan_survives_the_removal_of_its_segment(tmp_path):
    write_two(tmp_path)
    first = next(scan(tmp_path))[0]
    segment_path(tmp_path, 1).unlink()
    assert names(tmp_path, after=first) == ["e3", "e4", "e5"]
    assert read(tmp_path, first) is None


def test_a_damaged_body_is_no_transcript_and_is_named(tmp_path):
    path = write_segment(tmp_path, 1, [frame_of(one) for one in EPISODES[:2]])
    position = next(scan(tmp_path))[0]
    data = bytearray(path.read_bytes())
    data[position.offset + len(frame_of(EPISODES[0])) - 5] ^= 1
    path.write_bytes(data)
    with capture_logs() as logs:
        assert read(tmp_path, position) is None
    assert [(entry["event"], entry["episode_id"]) for entry in logs] == [("transcript_damaged", "e0")]
    assert read(tmp_path, "e1") == EPISODES[1]


def test_a_file_that_is_no_segment_is_skipped_with_a_warning(tmp_path):
    write_two(tmp_path)
    segment_path(tmp_path, 1).write_bytes(b"rubbish that is no segment")
    with capture_logs() as logs:
        assert names(tmp_path) == ["e3", "e4", "e5"]
    assert [entry["event"] for entry in logs] == ["transcript_damaged"]
