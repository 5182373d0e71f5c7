"""The fault run, and the broker's tests, on the RabbitMQ of this machine and on newer ones:

    python -m benchmarks.faults_matrix --injections 100

Newer ones come from Debian's packages in scratch roots (4.0 from trixie, 4.3 from forky), made once with mmdebstrap and
kept in the cache; nothing of the system changes. Needs root and Linux: a node runs in its root by `chroot`, behind
scripts that stand where a private node looks for a server, and sees this machine's /tmp, where the run's folder is.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from benchmarks.report import parser, save, table
from swarmq.broker.node.install import HOME_VARIABLE

SUITES = {"trixie": "4.0", "forky": "4.3"}
HERE = "here"
TESTS = ("tests/contract", "tests/integration/broker")
PROMISED = ("lost", "twice", "hangs")
"""What is to be 0."""
CACHE = Path(".cache") / "rabbitmq-roots"
LIBRARY = Path("usr/lib/rabbitmq/lib")
SEEN = ("/proc", "/dev", "/tmp")
SCRIPT = """\
#!/bin/sh
exec chroot {root} {program} "$@"
"""


def made(suite: str, *, frozen: bool) -> Path:
    """The scratch root with RabbitMQ of a Debian suite. `frozen`: signed package lists may be past their date."""
    root = (CACHE / suite).resolve()
    if not root.is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        draft = root.with_suffix(".making")
        shutil.rmtree(draft, ignore_errors=True)
        command = ["mmdebstrap", "--variant=essential", "--include=rabbitmq-server", "--mode=root"]
        command += ['--aptopt=Acquire::Check-Valid-Until "false"'] if frozen else []
        command += [suite, str(draft)]
        print("making a scratch root:", *command)
        subprocess.run(command, check=True)
        shutil.copy("/etc/hosts", draft / "etc/hosts")  # Erlang looks localhost up
        draft.rename(root)
    return root


@contextlib.contextmanager
def server(root: Path) -> Iterator[Path]:
    """The home of a server that runs in `root`, in the shape of Debian's packages."""
    (real,) = (root / LIBRARY).glob("rabbitmq_server-*")
    with contextlib.ExitStack() as stack:
        shape = root.with_suffix(".home")  # not below /tmp: the root must not see these scripts in place of its own
        home, erlang = shape / LIBRARY / real.name, shape / "usr/lib/erlang/bin"
        programs = {
            home / "sbin" / name: f"/{LIBRARY}/{real.name}/sbin/{name}" for name in ("rabbitmq-server", "rabbitmqctl")
        }
        programs |= {erlang / name: f"/usr/bin/{name}" for name in ("erl", "epmd")}
        for script, program in programs.items():
            script.parent.mkdir(parents=True, exist_ok=True)
            script.write_text(SCRIPT.format(root=root, program=program))
            script.chmod(0o755)
        for seen in SEEN:
            subprocess.run(["mount", "--rbind", "--make-rslave", seen, f"{root}{seen}"], check=True)
            stack.callback(subprocess.run, ["umount", "-l", f"{root}{seen}"], check=False)
        yield home


def measured(given: argparse.Namespace, environment: dict[str, str]) -> dict[str, Any] | None:
    """The fault run and the broker's tests against the server that `environment` names; None when the run broke off."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.faults", "--out", folder, "--seed", str(given.seed)]
        subprocess.run([*command, "--injections", str(given.injections)], env=environment, check=False)
        if not (result := Path(folder) / "faults.json").exists():
            return None
        record = json.loads(result.read_text())
        report = Path(folder) / "tests.xml"
        tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *TESTS]
        subprocess.run(tests, env=environment, check=False)
        suite = ET.parse(report).getroot().find("testsuite")
        assert suite is not None
        count = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    failed = count["failures"] + count["errors"]
    return {
        "rabbitmq": record["detail"]["rabbitmq"],
        "figures": record["figures"],
        "rows": record["detail"]["verdict"]["rows"],
        "passed": count["tests"] - failed - count["skipped"],
        "failed": failed,
        "skipped": count["skipped"],
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--injections", type=int, default=100)
    options.add_argument("--seed", type=int, default=7)
    options.add_argument("--suite", action="append", choices=(HERE, *SUITES), help="repeatable; all without it")
    options.add_argument(
        "--frozen-mirror",
        action="store_true",
        help="the mirror is a frozen copy: take its signed lists past their date",
    )
    given = options.parse_args()
    runs, failed = [], []
    for suite in given.suite or (HERE, *SUITES):
        with contextlib.ExitStack() as stack:
            environment = dict(os.environ)
            environment.pop("SWARMQ_TEST_AMQP_URL", None)
            if suite != HERE:
                environment[HOME_VARIABLE] = str(stack.enter_context(server(made(suite, frozen=given.frozen_mirror))))
            print(f"== RabbitMQ {SUITES.get(suite, 'of this machine')}", flush=True)
            run = measured(given, environment)
        if run is not None:
            runs.append(run)
        if run is None or run["failed"] or any(run["figures"][name] for name in PROMISED):
            failed.append(suite)
    rows = [(run["rabbitmq"], *run["figures"].values(), run["passed"], run["failed"]) for run in runs]
    if runs:
        print(table(("rabbitmq", *runs[0]["figures"], "passed", "failed"), rows))
        figures = {
            name: sum(run["figures"][name] for run in runs) for name in ("injections", "episodes_ended", *PROMISED)
        }
        figures |= {name: sum(run[name] for run in runs) for name in ("passed", "failed")}
        save("faults_matrix", figures | {"versions": len(runs)}, detail={"runs": runs}, out=given.out)
    sys.exit(f"failed on: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
