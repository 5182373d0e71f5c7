"""An ssh server of the test's own, for its own user, on a port of this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from swarmq.runtime.processes import find_free_port, is_port_free

SERVER = "/usr/sbin/sshd"
SETTINGS = """
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin yes
"""


def why_not() -> str:
    """Return why there can be no ssh server here, or ""."""
    if not Path(SERVER).exists() or shutil.which("ssh") is None:
        return "no sshd: apt-get install openssh-server"
    return "" if os.geteuid() == 0 else "sshd needs root"


@contextmanager
def ssh_server(folder: Path) -> Iterator[tuple[int, str]]:
    """Provide the server's port, and the ssh command with a key for it."""
    for name in ("host_key", "key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    port = find_free_port()
    settings = folder / "sshd_config"
    settings.write_text(SETTINGS.format(port=port, folder=folder))
    Path("/run/sshd").mkdir(exist_ok=True)  # where sshd drops its rights
    with (folder / "sshd.log").open("wb") as log:
        server = subprocess.Popen([SERVER, "-D", "-e", "-f", str(settings)], stderr=log)
    try:
        while is_port_free(port):
            assert server.poll() is None, (folder / "sshd.log").read_text()
        options = {"StrictHostKeyChecking": "no", "UserKnownHostsFile": "/dev/null", "LogLevel": "ERROR"}
        words = [f"-o {name}={value}" for name, value in options.items()]
        yield port, " ".join(["ssh", "-F", "none", "-i", str(folder / "key"), *words])
    finally:
        server.terminate()
        server.wait()
