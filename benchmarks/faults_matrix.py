"""The fault run on the RabbitMQ of this machine and on newer ones: `python -m benchmarks.faults_matrix --injections 100`.

Newer ones come from Debian's packages in scratch roots (4.0 from trixie, 4.3 from forky), made once with mmdebstrap and
kept in the cache; nothing of the system changes. Needs root and Linux: a node runs in its root by `chroot`, behind
scripts that stand where a private node looks for a server, and sees this machine's /tmp, where the run's folder is.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.report import parser
from swarmq.broker.install import HOME_VARIABLE

SUITES = {"trixie": "4.0", "forky": "4.3"}
HERE = "here"
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
    failed = []
    for suite in given.suite or (HERE, *SUITES):
        with contextlib.ExitStack() as stack:
            environment = dict(os.environ)
            if suite != HERE:
                environment[HOME_VARIABLE] = str(stack.enter_context(server(made(suite, frozen=given.frozen_mirror))))
            print(f"== RabbitMQ {SUITES.get(suite, 'of this machine')}", flush=True)
            name = f"faults_{suite}"
            command = [sys.executable, "-m", "benchmarks.faults", "--name", name, "--seed", str(given.seed)]
            command += ["--injections", str(given.injections), *(["--out", str(given.out)] if given.out else [])]
            if subprocess.run(command, env=environment, check=False).returncode:
                failed.append(suite)
    sys.exit(f"failed on: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
