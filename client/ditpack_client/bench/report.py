"""What a load test found: a table, CSV, JSON, and a plot of throughput against latency."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table


@dataclass(frozen=True, slots=True)
class Row:
    """One level of load. Times in seconds; ``arrived`` is what perf_analyzer sent a second, ``queued`` the mean time of
    an image in Triton's queues, all models together, ``pack`` and ``tokens`` the means of a step; 0 without metrics."""

    load: str
    requests: int
    arrived: float
    throughput: float
    mean: float
    p50: float
    p95: float
    slowest: float
    queued: float
    steps: int
    pack: float
    tokens: float


_COLUMNS = (
    ("load", "load", "{}"),
    ("requests", "images", "{}"),
    ("arrived", "sent/s", "{:.2f}"),
    ("throughput", "images/s", "{:.2f}"),
    ("p50", "p50 s", "{:.2f}"),
    ("p95", "p95 s", "{:.2f}"),
    ("slowest", "max s", "{:.2f}"),
    ("queued", "queued s", "{:.2f}"),
    ("pack", "pack", "{:.1f}"),
    ("tokens", "tokens", "{:.0f}"),
)


def table(rows: Sequence[Row]) -> Table:
    made = Table(padding=(0, 0))
    for _, title, _ in _COLUMNS:
        made.add_column(title, justify="left" if title == "load" else "right", no_wrap=True)
    for row in rows:
        made.add_row(*(form.format(getattr(row, name)) for name, _, form in _COLUMNS))
    return made


def save(
    directory: Path, rows: Sequence[Row], setting: dict[str, Any], metrics: Sequence[dict[str, float]]
) -> list[Path]:
    """results.csv, results.json and, with matplotlib, results.png.

    The JSON has ``setting``, what was asked of whom, and by how much each of the server's counters grew in each row.
    """
    written = [directory / "results.csv", directory / "results.json"]
    with written[0].open("w", newline="") as file:
        writer = csv.DictWriter(file, [*Row.__slots__])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    levels = [{**asdict(row), "metrics": grown} for row, grown in zip(rows, metrics, strict=True)]
    document = {"setting": setting, "rows": levels}
    written[1].write_text(json.dumps(document, indent=2) + "\n")
    with suppress(ModuleNotFoundError):  # the table and the files have it all
        written.append(_plot(directory / "results.png", rows, setting))
    return written


def _plot(file: Path, rows: Sequence[Row], setting: dict[str, Any]) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    axes = figure.subplots()
    throughput = [row.throughput for row in rows]
    for name, colour, marker in (("p95", "#b2182b", "s"), ("p50", "#2166ac", "o")):
        axes.plot(throughput, [getattr(row, name) for row in rows], marker=marker, color=colour, label=name)
    for row in rows:
        axes.annotate(row.load, (row.throughput, row.p50), xytext=(6, -12), textcoords="offset points", fontsize=8)
    axes.set_xlabel("images a second")
    axes.set_ylabel("latency, seconds")
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, 1.2 * max(throughput))  # room for the last label
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    axes.set_title(f"{setting['model']}, {setting['sizes']}, {setting['steps']} steps", fontsize=10)
    figure.savefig(file)
    return file
