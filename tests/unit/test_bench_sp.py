"""The benchmark of several GPUs runs on the CPU, at the smallest size, and says how far from one device each way is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[1] / "bench" / "sp.py"
IMPLS = ["single", "segment", "unmasked", "rows"]


def test_it_runs(tmp_path: Path) -> None:
    out = tmp_path / "sp.json"
    options = ["--quick", "--sizes", "64x80", "--guidance", "on", "--impls", *IMPLS, "--image-sizes", "64x80"]
    options += ["--image-steps", "2", "--no-embedded", "--out", str(out)]
    done = subprocess.run(
        [sys.executable, str(BENCH), *options], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert {"hardware", "versions", "commit", "date", "command"} <= set(found["meta"])
    records = {record["impl"]: record for record in found["records"]}
    assert list(records) == IMPLS
    assert records["segment"]["padding"] == 1
    images = {record["impl"]: record for record in found["images"]}
    for impl in ("segment", "rows"):
        assert records[impl]["rel_err"] < 1e-5
        assert images[impl]["rel_err"] < 1e-5
    assert records["unmasked"]["rel_err"] > 1e-4
    assert images["unmasked"]["psnr_db"] < images["segment"]["psnr_db"]
