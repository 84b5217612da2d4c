"""README and docs/: the wire reference is what the resolvers' tables make of it, and links lead somewhere."""

from __future__ import annotations

import re
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
