"""docker/grafana and docker/prometheus: they parse, and ask for series and labels that exist."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ditpack.tritonserver.errors import OUTCOMES
from ditpack.tritonserver.series import SERIES

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "tools"))

import triton_series  # noqa: E402

OURS = {sample: series.label for name, series in SERIES.items() for sample in series.samples(name)}
TRITONS = {*triton_series.INFERENCE, *triton_series.GPU}
SCRAPED = {"job", "instance"}  # the labels that Prometheus adds
VALUES = {"outcome": set(OUTCOMES), "stage": {"encode", "queue", "denoise", "decode"}}
RULES = yaml.safe_load((ROOT / "docker/prometheus/alerts.yaml").read_text())["groups"][0]["rules"]
DASHBOARD = json.loads((ROOT / "docker/grafana/dashboard.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def _queries() -> Iterator[tuple[str, str]]:
    """(where, PromQL), Grafana's variables filled in."""
    for rule in RULES:
        yield f"alert {rule['alert']}", rule["expr"]
    for panel in PANELS:
        for target in panel["targets"]:
            expression = target["expr"].replace("$__rate_interval", "5m")
            yield f"panel {panel['title']}", expression.replace("$job", ".*").replace("$instance", ".*")


QUERIES = list(_queries())


def mistakes(expression: str) -> list[str]:
    """What it names that does not exist. A plain search, so that it runs without a PromQL parser."""
    found = [
        f"no series {name}"
        for name in re.findall(r"\b(?:ditpack|nv)_\w+", expression)
        if name not in OURS and name not in TRITONS
    ]
    for name, written in re.findall(r"\b(ditpack_\w+)\{(.*?)\}", expression):
        for label, value in re.findall(r'(\w+)\s*[!=]=?~?\s*"(.*?)"', written):
            if label not in {*SCRAPED, OURS.get(name), "le"}:
                found.append(f"{name} has no label {label}")
            found += [
                f"{label} is never {one}" for one in value.split("|") if label in VALUES and one not in VALUES[label]
            ]
    return found


@pytest.mark.parametrize(("where", "expression"), QUERIES)
def test_queries_name_what_exists(where: str, expression: str) -> None:
    assert mistakes(expression) == []
    assert re.search(r"\b(?:ditpack|nv)_\w+", expression)


@pytest.mark.parametrize(
    "expression",
    [
        "rate(ditpack_step_total[5m])",
        "nv_inference_pending_requests",
        "ditpack_step_seconds",  # a histogram has only _bucket, _sum and _count
        'ditpack_steps_total{outcome="ok"}',
        'ditpack_requests_total{outcome=~"ok|rejected"}',
    ],
)
def test_a_mistake_is_seen(expression: str) -> None:
    assert mistakes(expression)


@pytest.mark.parametrize(("where", "expression"), QUERIES)
def test_queries_are_promql(where: str, expression: str) -> None:
    promql = pytest.importorskip("promql_parser", reason="the dev extra brings promql-parser on x86_64")
    promql.parse(expression)  # raises for what is none, unknown functions and wrong types too


def test_alerts() -> None:
    names = [rule["alert"] for rule in RULES]
    assert len(set(names)) == len(names)
    for rule in RULES:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert re.fullmatch(r"\d+m", rule["for"])
        assert set(rule["annotations"]) == {"summary", "description"}
        kept = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        grouped = re.search(r"by \((.*?)\)", rule["expr"])
        assert kept <= ({*grouped[1].split(", ")} if grouped else {*SCRAPED, "engine"}), "a label that is summed away"


def test_the_dashboard_shows_every_series_of_ours() -> None:
    shown = " ".join(expression for where, expression in QUERIES if where.startswith("panel"))
    for name, series in SERIES.items():
        assert any(re.search(rf"\b{sample}\b", shown) for sample in series.samples(name)), name


def test_the_dashboard_is_laid_out() -> None:
    everything = DASHBOARD["panels"]
    assert len({panel["id"] for panel in everything}) == len(everything)
    assert len({panel["title"] for panel in everything}) == len(everything)
    places: list[dict[str, Any]] = [panel["gridPos"] for panel in everything]
    for one, other in itertools.combinations(places, 2):
        apart = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        assert apart or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"], (one, other)
    assert all(place["x"] + place["w"] <= 24 for place in places)
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(?!__)(\w+)", json.dumps(DASHBOARD)))
    assert used == variables


def test_every_series_is_explained() -> None:
    page = (ROOT / "docs" / "operators.md").read_text()
    assert [name for name in SERIES if f"`{name}" not in page] == []
