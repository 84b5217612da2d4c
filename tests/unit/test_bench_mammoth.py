"""MammothModa2's benchmark runs on the CPU at toy size, and its padded batch computes what the packed step does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[1] / "bench" / "mammoth.py"


def test_it_runs(tmp_path: Path) -> None:
    out = tmp_path / "mammoth.json"
    options = ["--toy", "--repeats", "1", "--out", str(out)]
    done = subprocess.run(
        [sys.executable, str(BENCH), *options], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert {"hardware", "versions", "commit", "date", "command"} <= set(found["meta"])
    assert [record["requests"] for record in found["records"]] == [1, 8, 1, 8, 8]
    assert all(record["rel_err"] < 1e-5 for record in found["records"])
