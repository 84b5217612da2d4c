"""``ditpack bench``: sweep a running server's load with perf_analyzer."""

from __future__ import annotations

import json
import math
import re
import time
from pathlib import Path
from typing import Annotated, Any

import tritonclient.grpc
import tritonclient.http
import typer
from rich.console import Console
from tritonclient.utils import InferenceServerException

from ditpack_client.address import Address, parse_address
from ditpack_client.bench import inputs, perf
from ditpack_client.bench.report import Row, save, table
from ditpack_client.metrics import read_metrics

_SIZE = re.compile(r"(\d+)x(\d+)")
_LEAST = 16  # requests of a level: fewer say nothing of a p95


def bench(
    server: Annotated[str, typer.Option(help="http://host:port, or grpc://host:port.")] = "localhost:8000",
    model: Annotated[
        str, typer.Option(help="The ensemble; one with an input IMAGES gets pictures to edit.")
    ] = "qwen_image",
    sizes: Annotated[
        str, typer.Option(help="official (Qwen-Image's seven), or a list: 512x512,1024x768.")
    ] = "official",
    steps: Annotated[int, typer.Option(min=1, help="Denoising steps of each request.")] = 20,
    guidance: Annotated[float | None, typer.Option(help="TRUE_CFG_SCALE; left out: the server's default.")] = None,
    concurrency: Annotated[str, typer.Option(help="Requests in flight, a level each.")] = "1,2,4,8",
    rates: Annotated[
        str | None,
        typer.Option(help="Instead: requests that arrive a second, Poisson, a level each.", show_default=False),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Requests a level; left out: 8 for each in flight.")
    ] = None,
    metrics: Annotated[
        str | None, typer.Option(help="The server's metrics; left out: its host, port 8002.", show_default=False)
    ] = None,
    perf_analyzer: Annotated[
        Path | None, typer.Option(help="The binary, if it is not on PATH.", show_default=False)
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Directory for the input file and the results.")] = Path(
        "bench"
    ),
) -> None:
    """Load-test a running server with perf_analyzer: mixed sizes, prompts and seeds, one level of load after the other.

    Writes results.csv, results.json and results.png (with matplotlib), perf_analyzer's own exports beside them.
    """
    console = Console()
    try:
        rows, setting, grown = _sweep(
            console,
            server,
            model,
            sizes,
            steps,
            guidance,
            _levels(concurrency, rates),
            requests,
            metrics,
            perf_analyzer,
            out,
        )
        for file in save(out, rows, setting, grown):
            console.print(f"wrote {file}", highlight=False)
    except perf.BenchError as error:
        Console(stderr=True).print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    console.print(table(rows))


def _sweep(
    console: Console,
    server: str,
    model: str,
    sizes: str,
    steps: int,
    guidance: float | None,
    levels: list[perf.Load],
    requests: int | None,
    metrics: str | None,
    perf_analyzer: Path | None,
    out: Path,
) -> tuple[list[Row], dict[str, Any], list[dict[str, float]]]:
    binary = perf.find(perf_analyzer)
    address = _address(server)
    pixels = _sizes(sizes)
    out.mkdir(parents=True, exist_ok=True)
    data = out / "input.json"
    data.write_text(json.dumps(inputs.requests(pixels, steps, guidance, _input_names(address, model))))
    where = metrics or f"http://{address.server.rpartition(':')[0]}:8002"
    options = {
        "address": address.server,
        "protocol": address.protocol,
        "model": model,
        "data": data,
        "directory": out,
    }
    # Also what warms every size up.
    alone = perf.run(binary, load=perf.Load(1), count=len(pixels), timeout=3600, **options)  # type: ignore[arg-type]
    solo = alone.percentile(1)
    console.print(f"one at a time: {alone.percentile(0.5):.2f} s, the slowest size {solo:.2f} s", highlight=False)
    rows, grown = [], []
    for load in levels:
        at_once = load.concurrency or max(1, math.ceil((load.rate or 0) * solo))
        count = requests or max(_LEAST, len(pixels), 8 * at_once)
        before, began = read_metrics(where), time.monotonic()
        # Were nothing gained by packing, they would take as long as one after the other; a level gets twice that.
        timing = perf.run(
            binary,
            load=load,
            count=count,
            timeout=60 + 2 * solo * count + count / (load.rate or math.inf),
            **options,  # type: ignore[arg-type]
        )
        after = read_metrics(where)
        grown.append({name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name)})
        rows.append(_row(load, timing, grown[-1]))
        console.print(f"{load}: {rows[-1].throughput:.3f} images/s ({time.monotonic() - began:.0f} s)", highlight=False)
    setting = {
        "server": server,
        "model": model,
        "sizes": sizes,
        "steps": steps,
        "guidance": guidance,
        "solo_seconds": solo,
        "perf_analyzer": str(binary),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    return rows, setting, grown


def _row(load: perf.Load, timing: perf.Timing, grown: dict[str, float]) -> Row:
    steps = grown.get("ditpack_steps_total", 0)
    done = len(timing.sent)
    return Row(
        load=str(load),
        requests=done,
        arrived=timing.arrived,
        throughput=timing.throughput,
        mean=sum(timing.latencies) / done,
        p50=timing.percentile(0.5),
        p95=timing.percentile(0.95),
        slowest=timing.percentile(1),
        queued=grown.get("nv_inference_queue_duration_us", 0) / 1e6 / done,
        steps=int(steps),
        pack=grown.get("ditpack_step_requests_total", 0) / steps if steps else 0.0,
        tokens=grown.get("ditpack_step_tokens_total", 0) / steps if steps else 0.0,
    )


def _address(server: str) -> Address:
    try:
        address = parse_address(server, None)
    except ValueError as error:
        raise typer.BadParameter(f"--server: {error}") from None
    if address.secure:
        raise typer.BadParameter("--server: perf_analyzer is run without TLS; name the server behind the gateway")
    return address


def _input_names(address: Address, model: str) -> list[str]:
    """The model's inputs, by its own metadata."""
    url = address.server
    try:
        if address.protocol == "grpc":
            with tritonclient.grpc.InferenceServerClient(url) as client:
                return [tensor.name for tensor in client.get_model_metadata(model, client_timeout=10).inputs]
        with tritonclient.http.InferenceServerClient(url, connection_timeout=10, network_timeout=10) as client:
            return [tensor["name"] for tensor in client.get_model_metadata(model)["inputs"]]
    except (InferenceServerException, OSError) as error:
        raise perf.BenchError(f"{url} does not serve {model}: {error}") from None


def _levels(concurrency: str, rates: str | None) -> list[perf.Load]:
    try:
        if rates is not None:
            return [perf.Load(rate=_positive(float(rate))) for rate in rates.split(",")]
        return [perf.Load(concurrency=int(_positive(int(level)))) for level in concurrency.split(",")]
    except ValueError:
        what = f"--rates {rates}" if rates is not None else f"--concurrency {concurrency}"
        raise typer.BadParameter(f"{what}: must be positive numbers with commas between them") from None


def _positive(number: float) -> float:
    if not (number > 0 and math.isfinite(number)):
        raise ValueError
    return number


def _sizes(text: str) -> list[tuple[int, int]]:
    if text == "official":
        return list(inputs.OFFICIAL_SIZES)
    matches = [_SIZE.fullmatch(part.strip()) for part in text.split(",")]
    if not all(matches):
        raise typer.BadParameter(f"--sizes {text}: must be official, or WIDTHxHEIGHT with commas between them")
    return [(int(match[1]), int(match[2])) for match in matches if match]
