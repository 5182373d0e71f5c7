"""A receiver takes whole files and differences, keeps the newest complete file, and has room for no more than that and the next."""

from __future__ import annotations

import os

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmq.weights.format import scratch
from swarmq.weights.format.chunks import CHUNK_BYTES as LARGEST_CHUNK
from swarmq.weights.format.chunks import Progress, WeightFileManifest, describe_file, encode_chunk
from swarmq.weights.receiver.store import UploadRefusedError, WeightStore

CHUNK_BYTES = 4096


@pytest.fixture
def store(tmp_path):
    store = WeightStore(tmp_path)
    yield store
    store.close()
    assert not list(tmp_path.iterdir()), "nothing stays in shared memory"


def weights(seed: int, size_bytes: int = 1000):
    return np.random.default_rng(seed).integers(0, 256, size_bytes).astype(np.uint8)


def describe(data, base: str | None = None) -> WeightFileManifest:
    return msgspec.structs.replace(describe_file(data, word_bytes=2, chunk_bytes=CHUNK_BYTES), base=base)


def send(store: WeightStore, data, base=None) -> str:
    """The path of the complete file."""
    before = describe(base).name if base is not None else None
    manifest = describe(data, before)
    for index in store.begin(manifest).missing:
        part = manifest.get_chunk(base, index) if base is not None else None
        store.write(manifest.name, index, encode_chunk(manifest.get_chunk(data, index), part, 2), before)
    progress = store.begin(manifest)
    assert progress.missing == []
    assert progress.path is not None
    return progress.path


def read(path: str) -> bytes:
    with open(path, "rb") as file:  # noqa: PTH123
        return file.read()


def test_whole_weights_and_then_a_difference_arrive_and_the_file_before_goes(store):
    first, second = weights(1), weights(2)
    before = send(store, first)
    assert read(before) == first.tobytes()
    after = send(store, second, base=first)
    assert read(after) == second.tobytes()
    assert not os.path.exists(before)  # noqa: PTH110


def test_what_has_arrived_is_not_asked_for_again(store):
    data = weights(1, 2 * CHUNK_BYTES + 5)
    manifest = describe(data)
    assert store.begin(manifest).missing == [0, 1, 2]
    store.write(manifest.name, 1, encode_chunk(manifest.get_chunk(data, 1), None, 2), None)
    assert store.begin(manifest) == Progress(missing=[0, 2])
    assert read(send(store, data)) == data.tobytes()


def test_a_difference_from_a_file_that_is_not_there_is_refused_and_the_newest_file_stays(store):
    first = weights(1)
    path = send(store, first)
    for other in (weights(3), weights(3, 400)):
        with pytest.raises(
            UploadRefusedError, match="does not have the base file .*: send the whole weights"
        ) as caught:
            send(store, first[::-1].copy(), base=other)
        assert caught.value.status == 409
    assert read(path) == first.tobytes()


def test_a_damaged_chunk_is_refused_and_asked_for_again(store):
    data, other = weights(1), weights(2)
    manifest = describe(data)
    store.begin(manifest)
    for damaged in (encode_chunk(other, None, 2), b"no zstd", encode_chunk(data, None, 2)[:-9]):
        with pytest.raises(UploadRefusedError, match="chunk 0 is damaged") as caught:
            store.write(manifest.name, 0, damaged, None)
        assert caught.value.status == 422
        assert store.begin(manifest).missing == [0]


def test_another_file_takes_the_place_of_one_of_which_a_part_has_arrived(store, tmp_path):
    data, other = weights(1, CHUNK_BYTES + 1), weights(2)
    late = describe(data)
    store.begin(late)
    store.write(late.name, 0, encode_chunk(late.get_chunk(data, 0), None, 2), None)
    send(store, other)
    assert len(list(tmp_path.glob("*/*"))) == 1, "the part is gone"
    with pytest.raises(UploadRefusedError, match="is another learner sending other weights") as caught:
        store.write(late.name, 1, encode_chunk(late.get_chunk(data, 1), None, 2), None)
    assert caught.value.status == 410


def test_without_room_for_two_files_the_newest_goes_when_whole_weights_come(tmp_path):
    store = WeightStore(tmp_path, has_room=lambda folder, size_bytes: not list(folder.iterdir()))
    first, second = weights(1), weights(2)
    send(store, first)
    with pytest.raises(UploadRefusedError, match="no room for 0 MiB of weights") as caught:
        send(store, second, base=first)
    assert caught.value.status == 507
    assert read(send(store, second)) == second.tobytes()


def test_without_room_for_one_file_nothing_is_left(tmp_path):
    store = WeightStore(tmp_path, has_room=lambda folder, size_bytes: False)
    with pytest.raises(UploadRefusedError, match=f"in {tmp_path}: free space there"):
        send(store, weights(1))
    assert not list(tmp_path.glob("*/*"))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"size_bytes": 0, "digests": []}, "does not have a digest for every chunk"),
        ({"digests": ["a", "b"]}, "does not have a digest for every chunk"),
        ({"word_bytes": 3}, "word_bytes: must be 2 or 4 \\(got 3\\)"),
        ({"chunk_bytes": LARGEST_CHUNK + 1}, "chunk_bytes: must be 1 to 16777216 \\(got 16777217\\)"),
    ],
)
def test_a_manifest_that_describes_no_file_is_refused(store, fields, reason):
    manifest = msgspec.structs.replace(describe(weights(1, 5)), **fields)
    with pytest.raises(UploadRefusedError, match=reason):
        store.begin(manifest)


def test_the_files_of_a_killed_receiver_are_removed_by_the_next(tmp_path):
    dead = tmp_path / f"{scratch.FOLDER_PREFIX}4194305-x"  # above the kernel's largest pid
    dead.mkdir()
    (dead / "half.safetensors").touch()
    WeightStore(tmp_path).close()
    assert not dead.exists()


@given(order=st.lists(st.sampled_from([0, 1, 2]), max_size=8), turn=st.lists(st.booleans(), min_size=1, max_size=6))
def test_whatever_order_learners_send_in_a_complete_file_is_whole(tmp_path_factory, order, turn):
    """`turn`: whether a difference is tried before whole weights, as a learner does."""
    store = WeightStore(tmp_path_factory.mktemp("store"))
    before = None
    for number, which in enumerate(order):
        data = weights(which)
        try:
            path = send(store, data, base=before if turn[number % len(turn)] else None)
        except UploadRefusedError:
            path = send(store, data)
        assert read(path) == data.tobytes()
        before = weights(which) if number % 2 else weights(2)
    store.close()
