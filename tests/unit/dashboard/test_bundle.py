"""The dashboard's built front end is committed: it must be what web/ makes, small, and free of anything inline."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
WEB = ROOT / "web"
STATIC = ROOT / "src" / "swarmq" / "dashboard" / "static"
LOADED = ("index.html", "app.js", "app.css")
"""What the browser loads."""
MAX_BYTES_GZIP = 250_000


def digest_sources() -> str:
    """Compute what `digest` of web/build.mjs computes."""
    paths = [WEB / "build.mjs", WEB / "package.json", WEB / "package-lock.json"]
    paths += [path for path in (WEB / "src").rglob("*") if path.is_file()]
    named = sorted((path.relative_to(WEB).as_posix().encode(), path) for path in paths)
    digest = hashlib.sha256()
    for name, path in named:
        digest.update(name + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def test_the_committed_bundle_was_built_from_the_sources() -> None:
    page = (STATIC / "index.html").read_text()
    recorded = re.search(r'name="swarmq-sources" content="([0-9a-f]{64})"', page)
    assert recorded is not None
    assert recorded[1] == digest_sources(), "web/ changed after the last build: cd web && npm ci && npm run build"


def test_a_build_makes_the_committed_bytes(tmp_path: Path) -> None:
    if shutil.which("node") is None or not (WEB / "node_modules" / "esbuild").exists():
        pytest.skip("needs node and the front end's packages: cd web && npm ci")
    copy = tmp_path / "web"
    shutil.copytree(WEB, copy, ignore=shutil.ignore_patterns("node_modules"))
    (copy / "node_modules").symlink_to(WEB / "node_modules")
    subprocess.run(["node", "build.mjs"], cwd=copy, check=True, capture_output=True)
    built = tmp_path / "src" / "swarmq" / "dashboard" / "static"
    assert sorted(path.name for path in built.iterdir()) == sorted(path.name for path in STATIC.iterdir())
    for path in built.iterdir():
        assert path.read_bytes() == (STATIC / path.name).read_bytes(), f"{path.name} is not what `npm run build` makes"


def test_the_browser_loads_less_than_250_kb() -> None:
    sizes = {name: len(gzip.compress((STATIC / name).read_bytes(), mtime=0)) for name in LOADED}
    assert sum(sizes.values()) < MAX_BYTES_GZIP, sizes


def test_the_page_has_nothing_inline_and_loads_nothing_from_elsewhere() -> None:
    page = (STATIC / "index.html").read_text()
    assert re.findall(r"<script(?![^>]*\bsrc=)", page) == []
    assert re.findall(r"<style|\sstyle=|\son[a-z]+=", page) == []
    assert sorted(re.findall(r'(?:src|href)="([^"]+)"', page))[:2] == ["app.css", "app.js"]
    assert re.findall(r'(?:src|href)="(?:https?:)?//', page) == []
    assert re.findall(r"@import|url\((?!data:)", (STATIC / "app.css").read_text()) == []


@pytest.mark.parametrize("forbidden", ["dangerouslySetInnerHTML", "innerHTML", 'style="', "eval("])
def test_sources_make_no_html_from_text(forbidden: str) -> None:
    guilty = [path.name for path in (WEB / "src").rglob("*.ts*") if forbidden in path.read_text()]
    assert guilty == []


def test_all_bundled_packages_have_their_licence_beside_them() -> None:
    licences = (STATIC / "LICENSES.txt").read_text()
    package = json.loads((WEB / "package.json").read_text())
    for name, version in package["dependencies"].items():
        assert f"{name} {version} (MIT)" in licences
    assert licences.count("Permission is hereby granted") == len(package["dependencies"])


def test_versions_are_pinned() -> None:
    package = json.loads((WEB / "package.json").read_text())
    lock = json.loads((WEB / "package-lock.json").read_text())
    for name, version in {**package["dependencies"], **package["devDependencies"]}.items():
        assert re.fullmatch(r"\d+\.\d+\.\d+", version), f"{name} {version}"
        assert lock["packages"][f"node_modules/{name}"]["version"] == version
