"""control's door: cancels and questions by any protocol, without an engine of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_triton import Answer, FakeModel

from ditpack.engine import channel


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Two engines, of which the second has every request; what they were asked."""
    monkeypatch.setenv(channel.DIRECTORY_VARIABLE, str(tmp_path))
    for name in ("dit_0_0", "dit_0_1"):
        (tmp_path / f"{name}.sock").touch()
    commands: list[tuple[Path, dict[str, Any]]] = []

    def ask(path: Path, command: dict[str, Any]) -> dict[str, Any] | None:
        commands.append((path, command))
        second = path.stem == "dit_0_1"
        if command["do"] == "cancel":
            return {"found": second}
        return {"healthy": True, "refusal": None, "active": 2, "waiting": 1} if second else None

    monkeypatch.setattr(channel, "ask", ask)
    return commands


def control(*requests: dict[str, str]) -> list[Answer]:
    model = FakeModel("control")
    made = [{name: np.array([value.encode()], np.object_) for name, value in each.items()} for each in requests]
    return model.infer(*map(model.request, made))


def test_every_engine_is_told_of_a_cancel(asked: list[tuple[Path, dict[str, Any]]]) -> None:
    (answer,) = control({"ACTION": "cancel", "ID": "0123456789abcdef"})
    assert json.loads(answer.outputs["ANSWER"][0]) == {"found": True}
    assert [(path.stem, command["id"]) for path, command in asked] == [
        ("dit_0_0", "0123456789abcdef"),
        ("dit_0_1", "0123456789abcdef"),
    ]


def test_status_names_the_silent(asked: list[tuple[Path, dict[str, Any]]]) -> None:
    (answer,) = control({"ACTION": "status"})
    silent, well = json.loads(answer.outputs["ANSWER"][0])["engines"]
    assert silent == {
        "name": "dit_0_0",
        "healthy": False,
        "refusal": "its process does not answer",
        "active": 0,
        "waiting": 0,
    }
    assert well == {"name": "dit_0_1", "healthy": True, "refusal": None, "active": 2, "waiting": 1}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"ACTION": "cancel", "ID": "12"}, "ID = '12': must have at least 16 characters"),
        ({"ACTION": "cancel"}, "ID = '': must have at least 16"),
        ({"ACTION": "drain"}, "ACTION = 'drain': must be one of cancel, status"),
        ({"ACTION": ""}, "ACTION = ''"),
    ],
)
def test_what_it_refuses_it_tells_no_engine(
    asked: list[tuple[Path, dict[str, Any]]], values: dict[str, str], message: str
) -> None:
    (answer,) = control(values)
    assert answer.code == "INVALID_ARG"
    assert message in answer.message
    assert not asked


def test_a_bad_request_costs_its_neighbours_nothing(asked: list[tuple[Path, dict[str, Any]]]) -> None:
    model = FakeModel("control")
    bad = model.request({"ACTION": np.array([b"\xff\xfe"], np.object_)})
    good = model.request({"ACTION": np.array([b"status"], np.object_)})
    model._execute([bad, good])
    assert [model.answer(request).code for request in (bad, good)] == ["INVALID_ARG", None]
