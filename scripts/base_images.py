"""Make the images that Dockerfile and docker-compose.yml begin with from Debian's packages, for hosts that reach no image
registry: `python scripts/base_images.py`, as root, with mmdebstrap and docker. Where images can be pulled, none of this is needed.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

CACHE = Path(__file__).resolve().parent.parent / ".cache" / "base-images"
MIRROR = "http://deb.debian.org/debian"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    suite: str
    packages: str
    hook: str
    """Shell command that runs in the new root's folder, $1, at the end."""
    changes: tuple[str, ...]
    """Dockerfile instructions."""


IMAGES = {
    "python:3.11-slim-bookworm": Recipe(
        suite="bookworm",
        packages="python3,python3-venv,python3-pip,python3-dev,ca-certificates",
        hook='ln -s python3 "$1/usr/bin/python"',
        changes=('CMD ["python3"]',),
    ),
    "rabbitmq:4-management": Recipe(
        suite="trixie",
        packages="rabbitmq-server",
        hook='echo "[rabbitmq_management]." > "$1/etc/rabbitmq/enabled_plugins"',
        changes=('CMD ["rabbitmq-server"]', "VOLUME /var/lib/rabbitmq"),
    ),
}


def main() -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor() as pool:
        for name, archive in zip(IMAGES, pool.map(make_archive, IMAGES.values()), strict=True):
            changes = [word for change in IMAGES[name].changes for word in ("--change", change)]
            subprocess.run(["docker", "import", *changes, str(archive), name], check=True, stdout=sys.stderr)
            print(name)


def make_archive(recipe: Recipe) -> Path:
    """Return the archive of the recipe's root, making it unless it is in the cache."""
    archive = CACHE / f"{recipe.suite}-{hashlib.sha256(repr(recipe).encode()).hexdigest()[:12]}.tar"
    if not archive.exists():
        draft = archive.with_suffix(".new.tar")
        command = ["mmdebstrap", "--mode=root", "--variant=apt", f"--include={recipe.packages}"]
        subprocess.run(
            [*command, f"--customize-hook={recipe.hook}", recipe.suite, str(draft), MIRROR],
            check=True,
            stdout=sys.stderr,
        )
        draft.rename(archive)
    return archive


if __name__ == "__main__":
    main()
