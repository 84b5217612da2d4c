"""README and docs/: the wire reference is up to date, the messages explained are ours, and links lead somewhere."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
import wire_reference

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_wire_reference_is_up_to_date() -> None:
    assert wire_reference.FILE.read_text() == wire_reference.wire_reference(), (
        "docs/wire.md is not what the tables say: run `python tests/tools/wire_reference.py`"
    )


def anchors(page: Path) -> set[str]:
    """GitHub's ids of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    for link in links:
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {link}"
        assert not anchor or anchor in anchors(target), f"{page.name} links to {link}"


@cache
def our_words() -> str:
    """Every string of the package, with … for what is filled in."""
    found = []
    for folder in ("backend", "client"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
                    found.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return "\n".join(found)


def explained_messages() -> list[str]:
    """The code of each first column in the sections about our own messages, Triton's left out."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    sections = re.split(r"^## ", page, flags=re.M)[1:]
    ours = [section for section in sections if not re.match("Triton's|A model|No message", section)]
    assert len(ours) == 5
    cells = [row.split(" | ")[0] for section in ours for row in section.splitlines() if row.startswith("| `")]
    spans = [span for cell in cells for span in re.findall(r"`([^`]+)`( \(Triton\))?", cell)]
    return [message for message, tritons in spans if not tritons]


@pytest.mark.parametrize("message", explained_messages())
def test_a_message_that_is_explained_is_one_of_ours(message: str) -> None:
    for part in re.split(r"…|'|\d+", message):
        words = part.strip(" :.,();=")
        assert len(words) < 8 or words in our_words(), words
