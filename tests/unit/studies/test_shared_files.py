"""Files of a study reach a worker that has an invite alone, whole and as the leader has them, or the worker says why not."""

import asyncio
import contextlib

import msgspec
import pytest

from support.studies import study_of
from swarmq.errors import MessageError, StudyError
from swarmq.studies import shared_files
from swarmq.studies.identity import TrialMaker, hash_file
from swarmq.studies.reports import KIND, FileWanted, inbox, pack, run_of, unpack
from swarmq.studies.shared_files import PIECE_BYTES, FileServer, Listing, SharedFile, fetch
from swarmq.testing import MemoryBroker

LARGE = bytes(range(256)) * (3 * PIECE_BYTES // 256) + b"end"


class Sender:
    """A leader that does nothing but send files, and notes what was asked for."""

    def __init__(self, root):
        self.root, self.broker, self.asked = root, MemoryBroker(), []
        (root / "work.py").write_text("def trial(attempt): ...\n")
        (root / "large").write_bytes(LARGE)
        (root / "secret").write_text("not for workers")
        self.study = study_of(trial={"function": "work:trial", "max_seconds": 9, "code": ["large"]})
        self.before_answer = lambda _wanted: None
        self.maker = maker = TrialMaker(self.study, root)
        self.trials = [maker.make(name, arm, 0) for name, arm in self.study.arms.items()]
        self.server = FileServer(maker)

    @contextlib.asynccontextmanager
    async def at_work(self):
        await self.broker.declare(run_of(self.study.name), policies=[], kinds=[KIND])
        sending = asyncio.create_task(self.send())
        try:
            yield self
        finally:
            sending.cancel()

    async def send(self):
        async with self.broker.consume(inbox(self.study.name), prefetch=9) as deliveries:
            async for delivery in deliveries:
                wanted = unpack(delivery.message)
                self.asked.append(wanted.path)
                self.before_answer(wanted)
                await self.broker.emit(self.server.answer(wanted, self.study, self.trials))
                await delivery.ack()

    async def fetch(self, here, **how):
        return await fetch(self.broker, self.study.name, here, report_silence=lambda _: None, **how)


@pytest.fixture
def sender(tmp_path):
    (tmp_path / "leader").mkdir()
    return Sender(tmp_path / "leader")


async def test_a_worker_gets_the_study_and_the_files_that_its_trials_depend_on(sender, tmp_path):
    async with sender.at_work():
        study, folder = await sender.fetch(tmp_path / "here")
        assert study == sender.study
        assert {path.name: path.read_bytes() for path in folder.root.iterdir()} == {
            "work.py": (sender.root / "work.py").read_bytes(),
            "large": LARGE,
        }
        lineage = TrialMaker(study, folder.root).find_lineage(sender.trials[0])
        assert lineage == sender.trials[0].lineage
        sender.asked.clear()
        await sender.fetch(tmp_path / "here")
        assert sender.asked == [""], "no file is sent twice"


async def test_only_listed_files_are_sent(sender):
    for path in ("secret", "../leader/secret", "/etc/hostname"):
        event = sender.server.answer(FileWanted(reader="r", path=path), sender.study, sender.trials)
        assert "no file that the study's trials depend on" in event.fields["refused"]
        assert "data" not in event.fields


async def test_a_study_file_that_is_named_by_way_of_a_parent_folder_has_the_same_files(sender, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    maker = TrialMaker(sender.study, tmp_path / "elsewhere" / ".." / "leader")
    assert {*maker.list_files(sender.trials)} == {*sender.maker.list_files(sender.trials)} == {"work.py", "large"}


@pytest.mark.parametrize("path", ["../outside", "{root}/outside", "a/../../outside"])
async def test_no_file_is_written_outside_the_folder_of_the_files(sender, tmp_path, path):
    file = SharedFile(path=path.format(root=tmp_path), size_bytes=0, sha256=hash_file(sender.root / "secret"))
    listing = Listing(study=sender.study, files=(file,), swarmq=shared_files.__version__)
    sender.server._list = lambda *_: msgspec.json.encode(listing)
    async with sender.at_work():
        with pytest.raises(StudyError, match="is no path below the study's folder, so no file was written"):
            await sender.fetch(tmp_path / "here")
    assert not (tmp_path / "here").exists()


async def test_two_workers_of_a_host_may_fetch_at_the_same_time(sender, tmp_path):
    async with sender.at_work():
        both = await asyncio.gather(*(sender.fetch(tmp_path / "here") for _ in range(2)))
    for _, folder in both:
        assert (folder.root / "large").read_bytes() == LARGE
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["files"]


async def test_files_of_one_size_that_come_at_once_are_told_apart(sender, tmp_path, monkeypatch):
    stamp = shared_files.hash_file.__globals__["_stamp"]
    monkeypatch.setitem(shared_files.hash_file.__globals__, "_stamp", lambda path: (0, stamp(path)[1]))
    (sender.root / "work.py").write_bytes(LARGE[::-1])
    async with sender.at_work():
        _, folder = await sender.fetch(tmp_path / "here")
    assert (folder.root / "work.py").read_bytes() == LARGE[::-1]
    assert (folder.root / "large").read_bytes() == LARGE


@pytest.mark.parametrize(
    "wanted",
    [FileWanted(reader="files-0", path="large", offset=-1), FileWanted(reader="files-0", path="large", offset=2**63),
     FileWanted(reader="study", path=""), FileWanted(reader="files-0.study", path="")],
)  # fmt: skip
def test_a_request_that_no_worker_makes_is_refused(wanted):
    with pytest.raises(MessageError):
        unpack(pack("first", wanted))


async def test_a_leader_that_follows_another_one_sends_what_that_one_has_listed(sender):
    for path in ("work.py", "large"):
        event = FileServer(sender.maker).answer(FileWanted(reader="r", path=path), sender.study, sender.trials)
        assert event.fields["data"] == (sender.root / path).read_bytes()[:PIECE_BYTES]


async def test_a_file_that_changes_while_it_is_sent_is_refused(sender, tmp_path):
    def change(wanted):
        if wanted.path == "large" and wanted.offset:
            (sender.root / "large").write_bytes(LARGE[::-1])

    sender.before_answer = change
    async with sender.at_work():
        with pytest.raises(StudyError, match="large: it changed on the leader's host while it was sent"):
            await sender.fetch(tmp_path / "here")


async def test_another_version_of_swarmq_is_refused_before_any_file_is_sent(sender, tmp_path, monkeypatch):
    async with sender.at_work():
        monkeypatch.setattr(shared_files, "__version__", "9.9")
        listing = sender.server.answer(FileWanted(reader="r", path=""), sender.study, sender.trials).fields["data"]
        monkeypatch.undo()
        sender.server._list = lambda *_: listing
        with pytest.raises(
            StudyError, match=r"the leader of study first has swarmq 9.9, this host .*: install the same"
        ):
            await sender.fetch(tmp_path / "here")
    assert sender.asked == [""]


async def test_a_lost_answer_is_asked_for_again_and_a_silent_leader_is_reported(sender, tmp_path):
    silent = []
    await sender.broker.declare(run_of(sender.study.name), policies=[], kinds=[KIND])
    fetching = asyncio.create_task(
        fetch(sender.broker, sender.study.name, tmp_path / "here", ask_s=0.02, report_silence=silent.append)
    )
    while not silent:  # noqa: ASYNC110 - a list
        await asyncio.sleep(0.01)
    async with sender.at_work():
        study, _ = await fetching
    assert study == sender.study
    assert silent[0] >= 0.02


async def test_a_full_disk_is_one_clear_line(sender, tmp_path):
    (tmp_path / "here").write_text("a file where the folder belongs")
    async with sender.at_work():
        with pytest.raises(StudyError, match="the study's files cannot be written there .*make room"):
            await sender.fetch(tmp_path / "here")
