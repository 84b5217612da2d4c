"""Findings for people and for CI."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from ditpack.tritonserver.check.findings import Finding


def as_text(findings: Sequence[Finding]) -> str:
    """Two lines a finding, the first one in the form that editors and CI turn into a link."""
    return "\n".join(
        f"{_place(finding)}: {finding.severity}: {finding.message} [{finding.rule}]\n    {finding.fix}"
        for finding in findings
    )


def as_json(repository: Path, findings: Sequence[Finding]) -> str:
    """One object: the repository, the counts, and each finding with the fields of ``Finding``."""
    document = {
        "repository": str(repository),
        "errors": count(findings, "error"),
        "warnings": count(findings, "warning"),
        "findings": [
            {
                "file": _shown(finding.file),
                "line": finding.line,
                "column": finding.column,
                "severity": finding.severity,
                "rule": finding.rule,
                "message": finding.message,
                "fix": finding.fix,
            }
            for finding in findings
        ],
    }
    return json.dumps(document, indent=2, ensure_ascii=False)


def count(findings: Sequence[Finding], severity: str) -> int:
    return sum(finding.severity == severity for finding in findings)


def _place(finding: Finding) -> str:
    shown = _shown(finding.file)
    return f"{shown}:{finding.line}:{finding.column}" if finding.line else shown


def _shown(file: Path) -> str:
    """Relative where that is shorter to read."""
    relative = os.path.relpath(file)
    return str(file) if relative.startswith("..") else relative
