"""What is appended stays; what a crash tore is cut; what was damaged is refused."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.disk import Disk
from support.episodes import make_group
from support.images import make_image, make_turn
from swarmq.config import Train
from swarmq.errors import LearnerError
from swarmq.learner.store import batch_log
from swarmq.learner.store.batch_log import BatchLog, SegmentHeader, scan_log
from swarmq.learner.store.records import SCHEMA, BatchIndex, BatchRecord, RunIdentity

OURS = RunIdentity(run="r", policy="main", model="m")


def batch(record: int, version: int | None = None) -> BatchRecord:
    group = make_group(f"g{record}")
    index = BatchIndex(record=record, version=version or record, trained=tuple(e.episode_id for e in group))
    return BatchRecord(index=index, episodes=tuple(group), settings=Train(learning_rate=0.5))


def drops(record: int, version: int) -> BatchRecord:
    return BatchRecord(index=BatchIndex(record=record, version=version, dropped={f"d{record}": "stale"}))


def filled(folder: Path, count: int, **options: int) -> list[BatchRecord]:
    log = BatchLog(folder, OURS, **options)
    written = [batch(number) for number in range(1, count + 1)]
    for record in written:
        log.append(record)
    log.close()
    return written


def only_segment(folder: Path) -> Path:
    (segment,) = folder.glob("*.log")
    return segment


def test_what_was_appended_is_read_again_with_its_settings(tmp_path: Path) -> None:
    assert list(batch_log.read_records(tmp_path / "log")) == []
    written = filled(tmp_path / "log", 3)
    assert list(batch_log.read_records(tmp_path / "log")) == written
    assert list(BatchLog(tmp_path / "log", OURS).after(1)) == written[1:]


def test_what_was_appended_outlives_a_crash_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    log = BatchLog(tmp_path, OURS, segment_bytes=1)  # every record begins a segment
    for number in (1, 2):
        log.append(batch(number))
        assert all(disk.keeps(segment) for segment in tmp_path.glob("*.log"))
    log.close()
    log = BatchLog(tmp_path / "one", OURS)
    for number in (1, 2):
        log.append(batch(number))
        assert disk.keeps(only_segment(tmp_path / "one"))


def test_what_its_writer_was_killed_over_before_it_was_synced_is_on_disk_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who reads it there acknowledges it to the broker."""

    class KilledError(BaseException):
        pass

    log = BatchLog(tmp_path, OURS)
    log.append(batch(1))
    with monkeypatch.context() as killing:
        killing.setattr(os, "fsync", mock.Mock(side_effect=KilledError))
        with pytest.raises(KilledError):
            log.append(batch(2))
    disk = Disk(monkeypatch)
    again = BatchLog(tmp_path, OURS)
    assert [index.record for index in again.indices] == [1, 2]
    assert disk.keeps(only_segment(tmp_path))


def test_replay_leaves_out_records_of_drops(tmp_path: Path) -> None:
    log = BatchLog(tmp_path, OURS)
    for record in (drops(1, 0), batch(2, 1), drops(3, 1), drops(4, 1), batch(5, 2)):
        log.append(record)
    assert [r.index.record for r in log.after(0)] == [2, 5]
    assert [i.record for i in log.step(2)[1]] == [4, 3]
    assert [i.record for i in log.step(1)[1]] == [1]


@given(cut=st.integers(min_value=1, max_value=400), garbage=st.binary(max_size=40))
def test_a_torn_tail_is_cut_wherever_it_tore(
    tmp_path_factory: pytest.TempPathFactory, cut: int, garbage: bytes
) -> None:
    folder = tmp_path_factory.mktemp("log")
    written = filled(folder, 3)
    segment, places = only_segment(folder), scan_log(folder)
    torn = segment.read_bytes()[: places[2].offset + min(cut, places[2].size - 1)]
    segment.write_bytes(torn + garbage)
    log = BatchLog(folder, OURS)
    assert [place.index.record for place in log.places] == [1, 2]
    assert segment.stat().st_size == places[2].offset
    log.append(written[2])
    assert list(batch_log.read_records(folder)) == written


def test_a_damaged_tail_that_a_checkpoint_needs_is_named_and_stays(tmp_path: Path) -> None:
    """It was read and trained: what is damaged now was whole once, and may be brought back."""
    folder = tmp_path / "log"
    filled(folder, 3)
    segment, places = only_segment(folder), scan_log(folder)
    damaged = bytearray(segment.read_bytes())
    damaged[places[2].offset + places[2].size - 1] ^= 0xFF
    segment.write_bytes(damaged)
    with pytest.raises(LearnerError, match=r"intact up to version 2, but a checkpoint is of version 3"):
        BatchLog(folder, OURS, needed=3)
    assert segment.read_bytes() == damaged, "nothing was cut"
    log = BatchLog(folder, OURS, needed=2)
    log.close()
    [aside] = folder.glob("*.torn")
    assert segment.read_bytes() + aside.read_bytes() == damaged, "and what is cut is kept"
    assert [place.index.version for place in scan_log(folder)] == [1, 2]


def test_a_reader_does_not_touch_a_torn_tail(tmp_path: Path) -> None:
    filled(tmp_path, 2)
    segment = only_segment(tmp_path)
    segment.write_bytes(torn := segment.read_bytes()[:-5])
    assert len(list(batch_log.read_records(tmp_path))) == 1
    assert segment.read_bytes() == torn


@pytest.mark.parametrize("where", ["header", "index", "body"])
def test_damage_in_the_middle_is_refused_not_cut(tmp_path: Path, where: str) -> None:
    filled(tmp_path, 3)
    segment, place = only_segment(tmp_path), scan_log(tmp_path)[1]
    at = place.offset + {"header": 6, "index": batch_log.RECORD.size + 3, "body": place.size - 9}[where]
    data = bytearray(segment.read_bytes())
    data[at] ^= 0x40
    segment.write_bytes(data)
    with pytest.raises(LearnerError, match=f"damaged at byte {place.offset}"):
        BatchLog(tmp_path, OURS)
    assert segment.read_bytes() == data


def test_damage_in_an_older_segment_is_found_when_it_is_read(tmp_path: Path) -> None:
    filled(tmp_path, 3, segment_bytes=1)
    first = scan_log(tmp_path)[0]
    data = bytearray(first.segment.read_bytes())
    data[-3] ^= 1
    first.segment.write_bytes(data)
    log = BatchLog(tmp_path, OURS)
    with pytest.raises(LearnerError, match="wrong checksum"):
        list(log.after(0))


def test_a_missing_segment_is_noticed(tmp_path: Path) -> None:
    filled(tmp_path, 3, segment_bytes=1)
    (tmp_path / f"{2:012d}.log").unlink()
    with pytest.raises(LearnerError, match="record 3 follows 1"):
        BatchLog(tmp_path, OURS)


@pytest.mark.parametrize("field", ["run", "policy", "model"])
def test_a_log_of_something_else_is_refused_and_left_alone(tmp_path: Path, field: str) -> None:
    filled(tmp_path, 1)
    before = only_segment(tmp_path).read_bytes()
    with pytest.raises(LearnerError, match=f"{field} is '{getattr(OURS, field)}' there and 'other' here"):
        BatchLog(tmp_path, msgspec.structs.replace(OURS, **{field: "other"}))
    assert only_segment(tmp_path).read_bytes() == before


def test_a_log_of_a_newer_schema_is_refused(tmp_path: Path) -> None:
    import zlib

    head = msgspec.msgpack.encode(SegmentHeader(schema=SCHEMA + 1, identity=OURS))
    packed = batch_log.SEGMENT.pack(batch_log.SEGMENT_MAGIC, len(head), zlib.crc32(head)) + head
    (tmp_path / f"{1:012d}.log").write_bytes(packed)
    with pytest.raises(LearnerError, match="newer swarmq"):
        BatchLog(tmp_path, OURS)


def test_a_checkpoint_beyond_the_log_or_before_its_beginning_is_refused(tmp_path: Path) -> None:
    filled(tmp_path, 4, segment_bytes=1)
    log = BatchLog(tmp_path, OURS)
    with pytest.raises(LearnerError, match="version 9, the log ends with 4"):
        log.after(9)
    assert log.prune(2, reported=4, spare=0) == 2
    assert [r.index.version for r in log.after(2)] == [3, 4]
    with pytest.raises(LearnerError, match="begins with version 3"):
        log.after(1)
    assert [p.index.record for p in BatchLog(tmp_path, OURS).places] == [3, 4]


def test_pruning_never_takes_what_a_checkpoint_still_needs(tmp_path: Path) -> None:
    log = BatchLog(tmp_path, OURS)
    for number in range(1, 5):
        log.append(batch(number))
    assert log.prune(3, reported=4, spare=0) == 0, "the only segment holds record 4"


@pytest.mark.parametrize(
    ("version", "reported", "spare", "left"),
    [
        (9, 9, 0, [9]),
        (5, 9, 0, [6, 7, 8, 9]),
        (9, 3, 0, [4, 5, 6, 7, 8, 9]),
        (9, 9, 3, [8, 9]),
        (9, 9, 99, [*range(1, 10)]),
    ],
)
def test_pruning_leaves_what_is_not_trained_not_reported_or_may_come_again(
    tmp_path: Path, version: int, reported: int, spare: int, left: list[int]
) -> None:
    filled(tmp_path, 9, segment_bytes=1)
    log = BatchLog(tmp_path, OURS)
    log.prune(version, reported=reported, spare=spare)
    assert [place.index.record for place in log.places] == left
    log.close()


def test_a_segment_ends_after_so_many_records_however_small(tmp_path: Path) -> None:
    filled(tmp_path, 7, segment_records=3)
    assert [path.stem.lstrip("0") for path in sorted(tmp_path.glob("*.log"))] == ["1", "4", "7"]
    assert [place.index.record for place in BatchLog(tmp_path, OURS).places] == [*range(1, 8)]


def test_a_full_disk_is_said_and_nothing_half_written_counts(tmp_path: Path) -> None:
    written = filled(tmp_path, 2)
    size = only_segment(tmp_path).stat().st_size
    code = (
        "import resource, signal, sys; from pathlib import Path; sys.path.insert(0, 'tests');"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({size + 100}, {size + 100}));"
        "import importlib.util as u; s = u.spec_from_file_location('t', sys.argv[1]); t = u.module_from_spec(s);"
        "s.loader.exec_module(t); log = t.BatchLog(Path(sys.argv[2]), t.OURS);"
        "log.append(t.batch(3))"
    )
    environment = {**os.environ, "PYTHONPATH": f"{Path(__file__).parents[3]}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        [
            sys.executable,
            "-B",
            "-c",
            code,
            __file__,
            str(tmp_path),
        ],  # -B: half a file of bytecode would outlive the test
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"DiskFullError: {tmp_path}: {os.strerror(errno.EFBIG)}" in done.stderr
    assert only_segment(tmp_path).stat().st_size == size
    assert list(batch_log.read_records(tmp_path)) == written


def test_a_group_s_images_are_stored_once_and_read_again(tmp_path: Path) -> None:
    cat = make_image(1, height=16, width=16)
    group = [
        msgspec.structs.replace(each, turns=(make_turn("c", [1, cat], [2], placeholder=7),))
        for each in make_group("g1")
    ]
    log = BatchLog(tmp_path / "log", OURS)
    index = BatchIndex(record=1, version=1, trained=tuple(each.episode_id for each in group))
    log.append(BatchRecord(index=index, episodes=tuple(group), settings=Train()))
    log.close()
    assert len(cat.patches) < only_segment(tmp_path / "log").stat().st_size < 2 * len(cat.patches)
    [read] = batch_log.read_records(tmp_path / "log")
    assert read.episodes == tuple(group)
    assert read.patches == {}
