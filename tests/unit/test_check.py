"""``ditpack check``: every mistake is found at its line with a usable fix, and nothing else is."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from mistakes import Mistake, copied_repository
from mistakes_ensembles import DITPACK, ENSEMBLES
from mistakes_models import MODELS, SYNTAX
from valid_edits import vary

from ditpack.tritonserver.check import check_repository
from ditpack.tritonserver.launch.repository import find_repository

MISTAKES = [*SYNTAX, *MODELS, *ENSEMBLES, *DITPACK]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return copied_repository(tmp_path / "model_repository")


def line_of(text: str, marker: str) -> int:
    assert marker in text
    return text.count("\n", 0, text.index(marker)) + 1


def test_the_committed_repository_is_clean() -> None:
    assert check_repository(find_repository(None)) == []


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_is_found_at_its_line_and_nothing_else(repository: Path, mistake: Mistake) -> None:
    text = mistake.make(repository / mistake.model)
    (found,) = check_repository(repository)
    says = mistake.says
    assert (found.rule, found.severity) == (says.rule, says.severity), found
    assert found.file == repository / mistake.model / mistake.file
    assert (found.line, found.column > 0) == (line_of(text, says.at), True), found
    assert says.fix in found.fix, found


@pytest.mark.parametrize("seed", range(12))
def test_random_valid_edits_are_clean(repository: Path, seed: int) -> None:
    vary(repository, seed)
    # Queue policies are valid, and warned of because of what Triton makes of them.
    assert [finding for finding in check_repository(repository) if finding.rule != "queue-policy"] == []


@pytest.mark.parametrize("seed", range(60))
def test_no_text_makes_the_linter_itself_fail(repository: Path, seed: int) -> None:
    """Pieces cut out, doubled and moved: it may say anything, and must say it."""
    draw = random.Random(seed)
    for file in repository.glob("*/config.pbtxt"):
        text = file.read_text()
        for _ in range(draw.randint(1, 3)):
            start = draw.randrange(len(text))
            piece = text[start : start + draw.choice([1, 5, 30, 300])]
            into = draw.randrange(len(text))
            text = draw.choice([text.replace(piece, "", 1), text[:into] + piece + text[into:]])
        file.write_text(text)
    for finding in check_repository(repository):
        assert finding.message
        assert finding.fix
