"""The folder of a trial with changed files."""

import threading
from concurrent.futures import ThreadPoolExecutor

from swarmq.studies.changed_files import lay_over
from swarmq.studies.ledger import StudyFolder


def test_workers_that_start_trials_of_one_arm_at_once_share_one_whole_folder(tmp_path):
    for name in ("package/one.py", "package/two.py", "studies/other/ledger.jsonl", "work.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("old")
    folder, changed = StudyFolder(tmp_path / "study.toml", "first"), {"package/one.py": "new"}
    together = threading.Barrier(8)

    def start(_):
        together.wait()
        over = lay_over(folder, changed)
        return over, {name: (over / name).read_text() for name in ("package/one.py", "package/two.py", "work.py")}

    with ThreadPoolExecutor(8) as workers:
        starts = [*workers.map(start, range(8))]
    assert len({over for over, _ in starts}) == 1
    assert all(content == {"package/one.py": "new", "package/two.py": "old", "work.py": "old"} for _, content in starts)
    assert [*starts[0][0].parent.iterdir()] == [starts[0][0]], "nothing is left over"
    assert not (starts[0][0] / "studies").exists()
    assert lay_over(folder, {}) == tmp_path
