"""The writer: what it is offered can be read, whatever happens to it and to the disk."""

import errno
import os
import stat

import msgspec
import pytest
from structlog.testing import capture_logs

from support.transcripts import make_closed as close
from support.transcripts import make_transcript
from swarmq.messages import encode
from swarmq.transcripts import writer as writer_module
from swarmq.transcripts.format import find_segments, segment_path
from swarmq.transcripts.read import read, scan
from swarmq.transcripts.retention import KEPT
from swarmq.transcripts.writer import ClosedEpisode, Segments, TranscriptWriter, describe

DAY = 86400.0


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def record(folder, *episodes, size_bytes=10**9, age_s=30 * DAY, **options):
    """Write all episodes with one writer, and return it, closed."""
    made = TranscriptWriter(folder, size_bytes=size_bytes, age_s=age_s, clock=Clock(), **options)
    made.offer(list(episodes))
    made.close()
    return made


def names(folder, *, with_body=False):
    return [meta.episode_id for _, meta in scan(folder) if meta.body_bytes or not with_body]


def test_the_meta_says_what_became_of_the_episode():
    closed = close()
    expected = make_transcript()
    meta, body = describe(closed)
    assert (meta.episode_id, meta.state, meta.status, meta.rewards) == ("e0", "trained", "finished", {"main": 0.5})
    assert (meta.slot, meta.task_id, meta.group_id) == ("task-e0/0/0", "task-e0", "task-e0/0")
    assert (meta.began_at, meta.ended_at, meta.closed_at) == (1.0, 2.0, 3.0)
    assert meta.turns == 3
    assert meta.sampled_tokens == sum(turn.num_sampled for turn in expected.turns)
    assert meta.prompt_tokens == sum(turn.num_prompt for turn in expected.turns)
    assert meta.versions == (2, 2)
    assert meta.outcomes == {"main": ("trained", 7, "")}
    assert meta.orphan_turns == 1
    assert meta.body_bytes == len(body)


def test_routed_experts_take_no_room():
    closed = close()
    turns = [encode(msgspec.structs.replace(turn, routed_experts=bytes(64))) for turn in make_transcript().turns]
    assert describe(msgspec.structs.replace(closed, turns=turns))[1] == describe(closed)[1]


def test_an_episode_without_end_or_turns_has_a_meta():
    closed = close("e", state="dropped", reason="silent", with_end=False)
    meta, _ = describe(closed)
    assert (meta.status, meta.rewards, meta.success, meta.orphan_turns) == ("", {}, None, 0)
    bare = ClosedEpisode(
        **{name: getattr(closed, name) for name in closed.__struct_fields__ if name != "turns"}, turns=[]
    )
    meta, _ = describe(bare)
    assert (meta.turns, meta.sampled_tokens, meta.versions) == (0, 0, None)


def test_what_was_offered_is_read_back_exactly(tmp_path):
    made = record(tmp_path / "t", close("a"), close("b", state="dropped", reason="silent", with_end=False))
    assert made.lost == 0
    first, second = (read(tmp_path / "t", position) for position, _ in scan(tmp_path / "t"))
    expected = make_transcript("a")
    assert (first.begin, first.end, first.turns) == (expected.begin, expected.end, expected.turns)
    assert first.received == {"c0", "c1"}
    assert second.end is None
    assert second.turns == make_transcript("b").turns
    assert second.received is None


def test_files_are_private(tmp_path):
    record(tmp_path / "t", close())
    assert stat.S_IMODE((tmp_path / "t").stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "t").iterdir()} == {0o600}


def test_a_new_segment_begins_after_a_number_of_bytes_and_the_next_writer_goes_on_with_the_last(tmp_path):
    for number in range(3):
        record(tmp_path, close(f"a{number}", padding=600), segment_bytes=2000)
    assert find_segments(tmp_path) == [1, 2]
    assert names(tmp_path) == ["a0", "a1", "a2"]


@pytest.mark.parametrize("torn", [1, 10, 30, 500])
def test_a_writer_that_was_killed_in_an_append_loses_that_frame_alone(tmp_path, torn):
    record(tmp_path, close("a"), close("b", padding=600))
    path = segment_path(tmp_path, 1)
    os.truncate(path, path.stat().st_size - torn)
    assert names(tmp_path) == ["a"]
    record(tmp_path, close("c"))
    assert names(tmp_path) == ["a", "c"]
    assert read(tmp_path, "c").turns == make_transcript("c").turns
    assert find_segments(tmp_path) == [1]


def test_a_writer_that_was_killed_in_a_rewrite_leaves_the_segment_as_it_was(tmp_path):
    record(tmp_path, close("a"))
    segment_path(tmp_path, 1).with_suffix(".part").write_bytes(b"half of it")
    record(tmp_path, close("b"))
    assert names(tmp_path) == ["a", "b"]
    assert [path.name for path in tmp_path.iterdir()] == [segment_path(tmp_path, 1).name]


def test_under_the_size_cap_dull_conversations_go_and_all_metas_stay(tmp_path):
    failed = [close(f"f{n}", state="dropped", reason="failed", padding=2000, at=n) for n in range(60)]
    trained = [close(f"t{n}", padding=2000, at=100 + n) for n in range(100)]
    made = TranscriptWriter(tmp_path, size_bytes=400_000, age_s=1e9, segment_bytes=20_000, clock=Clock())
    for episode in [*failed, *trained]:
        made.offer([episode])
    made.close()
    assert names(tmp_path) == [one.episode_id for one in [*failed, *trained]]
    left = names(tmp_path, with_body=True)
    assert left[:60] == [one.episode_id for one in failed]
    assert left[60:] == [one.episode_id for one in trained][-len(left[60:]) :]
    assert KEPT <= len(left[60:]) < 100
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 400_000
    assert all(read(tmp_path, position) for position, meta in scan(tmp_path) if meta.body_bytes)


def test_of_every_kind_and_reason_the_newest_stay_beyond_the_cap(tmp_path):
    episodes = [
        close(f"{kind}-{reason}-{n}", state="dropped", reason=reason, kind=kind, padding=1000, at=n)
        for n in range(KEPT + 8)
        for kind in ("a", "b")
        for reason in ("equal_rewards", "failed")
    ]
    made = TranscriptWriter(tmp_path, size_bytes=20_000, age_s=1e9, clock=Clock())
    for episode in episodes:
        made.offer([episode])
    made.close()
    assert set(names(tmp_path, with_body=True)) >= {one.episode_id for one in episodes[-4 * KEPT :]}


def test_what_is_out_of_age_goes_with_its_segment_but_for_the_newest_of_its_kind(tmp_path):
    old = [close(f"o{n}", at=DAY + n) for n in range(KEPT + 5)]
    segments = Segments(tmp_path, size_bytes=10**9, age_s=10 * DAY)
    segments.open()
    append(segments, old)
    append(segments, [close("rare", state="dropped", reason="failed", at=5 * DAY)])
    append(segments, [close(f"n{n}", at=12 * DAY + n) for n in range(KEPT)])
    assert find_segments(tmp_path) == [1, 2, 3]
    segments.expire(20 * DAY)
    assert names(tmp_path) == ["rare", *(f"n{n}" for n in range(KEPT))]
    segments.expire(20 * DAY)
    segments.close()
    assert find_segments(tmp_path) == [2, 3]
    assert read(tmp_path, "rare") is not None


def append(segments, episodes):
    import zstandard

    described = [describe(one) for one in episodes]
    segments.append([meta for meta, _ in described], [zstandard.compress(body) for _, body in described])


def test_a_position_from_before_a_rewrite_still_finds_its_transcript(tmp_path):
    segments = Segments(tmp_path, size_bytes=10**9, age_s=1e9)
    segments.open()
    append(segments, [close(f"e{n}", padding=500) for n in range(40)])
    places = dict(scan(tmp_path))
    segments._size_bytes = segments._limit = 10_000
    segments.make_room()
    segments.close()
    kept = [read(tmp_path, place) for place in places]
    assert [one.meta.episode_id for one in kept if one] == [f"e{n}" for n in range(8, 40)]


class FullDisk:
    """Fails every write of the writer while `full` says so, after writing a part of it."""

    def __init__(self, monkeypatch):
        self.full = True
        self.real = os.pwrite
        monkeypatch.setattr(writer_module.os, "pwrite", self.pwrite)

    def pwrite(self, descriptor, data, offset):
        if self.full:
            self.real(descriptor, bytes(data)[:10], offset)
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.real(descriptor, data, offset)


def test_a_full_disk_loses_transcripts_with_one_warning_until_there_is_room(tmp_path, monkeypatch):
    disk = FullDisk(monkeypatch)
    with capture_logs() as logs:
        made = TranscriptWriter(tmp_path, size_bytes=10**9, age_s=1e9, clock=Clock())
        made.offer([close("a"), close("b")])
        wait_until_idle(made)
        made.offer([close("c")])
        wait_until_idle(made)
        assert made.lost == 3
        disk.full = False
        made.offer([close("d")])
        made.close()
    assert made.lost == 3
    assert names(tmp_path) == ["d"]
    assert len(made.warnings()) == 1
    assert made.warnings() == []
    assert [entry["event"] for entry in logs] == ["transcripts_lost", "transcripts_recorded_again"]
    assert "No space left" in logs[0]["reason"]


def wait_until_idle(made):
    with made._changed:
        assert made._changed.wait_for(lambda: not made._queued_bytes, timeout=30)


def test_a_folder_that_cannot_be_made_loses_transcripts_until_it_can(tmp_path):
    folder = tmp_path / "file" / "transcripts"
    folder.parent.write_text("in the way")
    made = TranscriptWriter(folder, size_bytes=10**9, age_s=1e9)
    made.offer([close("a")])
    wait_until_idle(made)
    assert made.lost == 1
    folder.parent.unlink()
    made.offer([close("b")])
    made.close()
    assert names(folder) == ["b"]


def test_what_finds_no_room_in_the_queue_is_lost_and_counted(tmp_path):
    made = TranscriptWriter(tmp_path, size_bytes=10**9, age_s=1e9, queue_bytes=2500)
    made.offer([close("a"), close("b"), close("c")])
    made.close()
    assert made.lost == 1
    assert names(tmp_path) == ["a", "b"]
    assert "faster than they can be written" in made.warnings()[0]


def test_an_episode_that_cannot_be_described_does_not_keep_others_from_being_recorded(tmp_path):
    broken = ClosedEpisode(
        **{name: getattr(close("a"), name) for name in ClosedEpisode.__struct_fields__ if name != "begin"},
        begin=b"\xc1",
    )
    made = record(tmp_path, broken, close("b"))
    assert made.lost == 1
    assert names(tmp_path) == ["b"]


def test_a_segment_that_cannot_be_read_is_left_alone(tmp_path):
    segment_path(tmp_path, 1).write_bytes(b"rubbish")
    record(tmp_path, close("a"))
    assert segment_path(tmp_path, 1).read_bytes() == b"rubbish"
    with capture_logs():
        assert names(tmp_path) == ["a"]


def test_a_rewrite_for_which_there_is_no_room_leaves_everything_readable(tmp_path, monkeypatch):
    segments = Segments(tmp_path, size_bytes=10**9, age_s=1e9)
    segments.open()
    append(segments, [close(f"e{n}", padding=500) for n in range(40)])
    segments._size_bytes = segments._limit = 10_000

    def refuse(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(writer_module.os, "fsync", refuse)
        with pytest.raises(OSError, match="No space left"):
            segments.make_room()
        segments.make_room()  # not tried again at once
    assert [path.suffix for path in tmp_path.iterdir()] == [".seg"]
    append(segments, [close("more", padding=500)])
    assert len(names(tmp_path, with_body=True)) == 41
    append(segments, [close(f"f{n}", padding=500) for n in range(5)])
    segments.make_room()
    segments.close()
    assert names(tmp_path, with_body=True) == [f"e{n}" for n in range(14, 40)] + ["more"] + [f"f{n}" for n in range(5)]
