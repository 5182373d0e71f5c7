"""vLLM's modules run as with `python -m`, but what their imports make is never scanned for garbage, also in spawned processes."""

from __future__ import annotations

import subprocess
import sys

from swarmq.weights.vllm_plugin.plugin import START

CORE = """
import gc

assert not gc.isenabled(), "collects while it is imported"
loop = []
loop.append(loop)
"""
SERVER = """
import gc
import multiprocessing
import sys

from vllm.v1.engine import core

def report(who):
    is_scanned = any(one is core.loop for one in gc.get_objects())
    print(who, "enabled" if gc.isenabled() else "disabled", "scans" if is_scanned else "spares", flush=True)

if __name__ == "__main__":
    from vllm import server

    print(sys.argv, flush=True)
    report("server")
    spawned = multiprocessing.get_context("spawn").Process(target=server.report, args=("spawned",))
    spawned.start()
    spawned.join()
    sys.exit(3)
"""


def test_imports_are_spared_by_collections_which_go_on_afterwards(tmp_path):
    engine = tmp_path / "vllm" / "v1" / "engine"
    engine.mkdir(parents=True)
    for folder in (tmp_path / "vllm", engine.parent, engine):
        (folder / "__init__.py").touch()
    (engine / "core.py").write_text(CORE)
    (tmp_path / "vllm" / "server.py").write_text(SERVER)
    argv = [sys.executable, "-m", START, "vllm.server", "--port", "80"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines() == [
        "['vllm.server', '--port', '80']",
        "server enabled spares",
        "spawned enabled spares",
    ], done.stderr
    assert done.returncode == 3
