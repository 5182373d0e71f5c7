"""A writer that is killed (SIGKILL) while it appends and rewrites all the time."""

import random
import subprocess
import sys
from pathlib import Path

from swarmq.transcripts.read import generations, read, scan

ROUNDS = 6
WRITER = """
import itertools, sys
from pathlib import Path
from support.transcripts import make_closed
from swarmq.transcripts.writer import TranscriptWriter
writer = TranscriptWriter(Path(sys.argv[1]), size_bytes=300_000, age_s=1e9, segment_bytes=20_000, clock=lambda: 4.0)
for number in itertools.count(int(sys.argv[2])):
    writer.offer([make_closed(f"e{number}", padding=3000)])
    with writer._changed:
        writer._changed.wait_for(lambda: not writer._queued_bytes)
    print(number, flush=True)
"""


def test_a_kill_loses_nothing_that_was_written_and_leaves_everything_readable(tmp_path):
    rng = random.Random(5)
    folder, written = tmp_path / "transcripts", 0
    for _ in range(ROUNDS):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder), str(written)],
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        )
        until = written + rng.randint(20, 60)
        with process:
            for line in process.stdout:
                written = int(line) + 1
                if written >= until:
                    process.kill()
                    break
        names = [meta.episode_id for _, meta in scan(folder)]
        assert names == [f"e{number}" for number in range(len(names))]
        assert len(names) >= written  # the last may have been written and not announced any more
        written = len(names)
        for position, meta in scan(folder):
            assert (read(folder, position) is not None) == bool(meta.body_bytes)
    assert max(generations(folder).values()) > 0
    assert any(not meta.body_bytes for _, meta in scan(folder))
