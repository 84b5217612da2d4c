"""One denoising step of a mix of requests: ours against diffusers, on the same weights, in one run.

    python tests/bench/step.py --out tests/bench/results/step.h200.json        # full-size Qwen-Image, random weights
    python tests/bench/step.py --layers 2 --heads 4 --mixes small8 --quick     # anywhere

Prints ms, ratios, TFLOP/s by the rows' own lengths squared, the share of the floor, memory, and the relative error
against diffusers accumulated in fp32 (without guidance, which would only amplify it).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine
import torch
from diffusers import QwenImageTransformer2DModel
from step_impls import (
    TEXT_TOKENS,
    Case,
    bucket_loop,
    buckets,
    ditpack,
    exact,
    make_cases,
    pairs,
    serial,
    share_weights,
)
from torch import Tensor

from ditpack.attention import Attention, select_attention
from ditpack.models.quantized import quantize_blocks
from ditpack.models.qwen_image import QwenImageConfig, QwenImageTransformer
from ditpack.models.weights import fill_random
from ditpack.packing.layout import Row, build_layout
from ditpack.sampling.flow_match import FlowMatchSchedule
from ditpack.sampling.qwen_image import QwenImageSampler

CASE_B = [(1024, 1024), (1024, 768), (768, 1024), (512, 512)]
OFFICIAL = [(1328, 1328), (1664, 928), (928, 1664), (1472, 1104), (1104, 1472), (1584, 1056), (1056, 1584)]
MIXES: dict[str, list[tuple[int, int]]] = {
    "caseB": CASE_B,
    "s0": [size for size in CASE_B for _ in range(2)],
    "official": OFFICIAL,
    "small8": [(256, 256)] * 8,
    "thumbs8": [(512, 512)] * 8,
    "solo256": [(256, 256)],
    "solo512": [(512, 512)],
    "solo1024": [(1024, 1024)],
    "solo1328": [(1328, 1328)],
    "solo2048": [(2048, 2048)],
}
IMPLS = ("serial", "compiled", "compiled_pairs", "buckets", "bucket_loop", "ditpack", "ditpack-fp8")
OURS = ("bucket_loop", "ditpack", "ditpack-fp8")
COMPILED = ("compiled", "compiled_pairs")  # the second only with guidance: both branches in one batch
THEIRS = {"serial": serial, "compiled": serial, "compiled_pairs": pairs, "buckets": buckets}


def main() -> None:
    options = parse()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.backends.cuda.matmul.allow_tf32 = False
    config = QwenImageConfig(num_layers=options.layers, num_attention_heads=options.heads)
    theirs = build_reference(config, device, dtype)
    heads = (config.num_attention_heads, config.attention_head_dim)
    attention = select_attention(options.attention, device, dtype, *heads)
    samplers = {"ditpack": build_sampler(config, theirs, attention, options)}
    if "ditpack-fp8" in options.impls:
        samplers["ditpack-fp8"] = build_sampler(config, theirs, attention, options)
        quantize_blocks(samplers["ditpack-fp8"].transformer.transformer_blocks)

    ceilings = machine.ceilings(attention, *heads, device)
    meta = machine.meta() | {"attention": attention.name, "layers": options.layers, "ceilings": ceilings}
    meta["attention_tflops"] = {
        mix: packed_and_dense(attention, MIXES[mix], heads, device) for mix in options.mixes if len(MIXES[mix]) > 1
    }
    print(json.dumps(meta, indent=1), flush=True)

    records: list[dict[str, Any]] = []
    # Compiled last: it changes the reference model for good.
    for impl_set in (("serial", "buckets", *OURS), COMPILED):
        wanted = [impl for impl in impl_set if impl in options.impls]
        if not wanted:
            continue
        if wanted[0] in COMPILED:
            torch._dynamo.config.recompile_limit = 1024
            theirs.compile_repeated_blocks()
        for mix in options.mixes:
            for guided in options.guidance:
                cases = make_cases(MIXES[mix], guided, config, device, dtype)
                reference = exact(theirs, cases) if options.exact and not guided and "ditpack" in wanted else None
                for impl in wanted:
                    if impl == "compiled_pairs" and not guided:
                        continue
                    record = {"mix": mix, "guidance": 4.0 if guided else 1.0, "impl": impl}
                    call = implementation(impl, theirs, samplers, cases)
                    warmup = 1 if impl in ("serial", "buckets") else 4  # graphs are captured, blocks compiled
                    record |= measure(call, cases, config, ceilings, options, reference, warmup)
                    records.append(record)
                    compare(records)
                    print(line(record), flush=True)
                if options.out:
                    options.out.parent.mkdir(parents=True, exist_ok=True)
                    options.out.write_text(json.dumps({"meta": meta, "records": records}, indent=1) + "\n")
        if options.profile:
            profile(implementation(wanted[-1], theirs, samplers, cases))
    graphs = samplers["ditpack"].graphs
    print(f"graph replays {graphs.replays}, eager steps {graphs.eager_steps}")


def packed_and_dense(
    attention: Attention, sizes: list[tuple[int, int]], heads: tuple[int, int], device: torch.device
) -> dict[str, float]:
    """TFLOP/s of the attention kernel on a mix, and on as many rows of one length with the same FLOP."""
    rows = [Row(TEXT_TOKENS, ((height // 16, width // 16),)) for width, height in sizes]
    length = round((sum(row.tokens**2 for row in rows) / len(rows)) ** 0.5)
    dense = [Row(TEXT_TOKENS, ((1, length - TEXT_TOKENS),))] * len(rows)
    kinds = {"packed": rows, "dense": dense}
    return {
        kind: round(machine.attention_ceiling(attention, build_layout(those, device), *heads, device), 1)
        for kind, those in kinds.items()
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=60)
    parser.add_argument("--heads", type=int, default=24)
    parser.add_argument("--mixes", nargs="+", choices=MIXES, default=list(MIXES))
    parser.add_argument("--impls", nargs="+", choices=IMPLS, default=list(IMPLS))
    parser.add_argument(
        "--guidance", nargs="+", type=lambda text: text == "on", default=[False, True], metavar="off|on"
    )
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--exact", action=argparse.BooleanOptionalAction, default=True, help="measure the error too, without guidance"
    )
    parser.add_argument(
        "--graphs", action=argparse.BooleanOptionalAction, default=True, help="CUDA graphs for small packs"
    )
    parser.add_argument("--profile", action="store_true", help="print the kernels of the last mix and implementation")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def build_reference(config: QwenImageConfig, device: torch.device, dtype: torch.dtype) -> QwenImageTransformer2DModel:
    """diffusers' transformer with random weights."""
    with torch.device("meta"):
        theirs = QwenImageTransformer2DModel(
            num_layers=config.num_layers, num_attention_heads=config.num_attention_heads
        ).to(dtype)
    rope = type(theirs.pos_embed)(theta=10000, axes_dim=list(config.axes_dims_rope), scale_rope=True)
    theirs.pos_embed = rope.to(device)  # plain tensors that the meta device left without values
    fill_random(theirs, Path("random"), device, dtype)
    return theirs.eval().requires_grad_(False)


def build_sampler(
    config: QwenImageConfig, theirs: QwenImageTransformer2DModel, attention: Attention, options: argparse.Namespace
) -> QwenImageSampler:
    """Ours, on the tensors of ``theirs``."""
    with torch.device("meta"):
        ours = QwenImageTransformer(config, attention)
    share_weights(ours, theirs)
    graphs = options.graphs and theirs.device.type == "cuda" and attention.reads_cu_seqlens
    return QwenImageSampler(ours, FlowMatchSchedule(use_dynamic_shifting=True), 16, graphs=graphs)


@torch.inference_mode()
def profile(call: Callable[[], list[Tensor]]) -> None:
    with torch.profiler.profile() as profiler:
        call()
    print(profiler.key_averages().table(sort_by="self_device_time_total", row_limit=40, max_name_column_width=90))


def implementation(
    impl: str, theirs: QwenImageTransformer2DModel, samplers: dict[str, QwenImageSampler], cases: list[Case]
) -> Callable[[], list[Tensor]]:
    if impl in samplers:
        return ditpack(samplers[impl], cases)
    if impl == "bucket_loop":
        return bucket_loop(samplers["ditpack"], cases)
    return lambda: THEIRS[impl](theirs, cases)


@torch.inference_mode()
def measure(
    call: Callable[[], list[Tensor]],
    cases: list[Case],
    config: QwenImageConfig,
    ceilings: dict[str, float],
    options: argparse.Namespace,
    reference: list[Tensor] | None,
    warmup: int,
) -> dict[str, Any]:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    ms = machine.milliseconds(call, options.repeats, warmup)
    linear, attention = flops(cases, config)
    floor = linear / ceilings["matmul_tflops"] + attention / ceilings["attention_tflops"]
    error = None
    if reference is not None:
        error = max(float((o.float() - r).norm() / r.norm()) for o, r in zip(call(), reference, strict=True))
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
    return {
        "ms": round(ms, 3),
        "ratio_to_serial": None,
        "ratio_to_compiled": None,
        "tflops": round((linear + attention) / ms / 1e9, 1),
        "floor_share": round(floor / 1e9 / ms, 4),
        "rel_err": error and float(f"{error:.3g}"),
        "peak_gib": peak and round(peak, 2),
    }


def flops(cases: list[Case], config: QwenImageConfig) -> tuple[float, float]:
    """FLOP of one step's linear layers and of its attention, by each row's own length."""
    lengths = [len(case.image) + len(text) for case in cases for text in case.texts]
    linear = 2 * config.num_layers * 12 * config.inner_dim**2 * sum(lengths)
    attention = config.num_layers * 4 * config.inner_dim * sum(length**2 for length in lengths)
    return linear, attention


def compare(records: list[dict[str, Any]]) -> None:
    """Fill in the ratios: how many times faster than diffusers one by one, eager and compiled."""
    times = {(r["mix"], r["guidance"], r["impl"]): r["ms"] for r in records}
    for record in records:
        for impl in ("serial", "compiled"):
            if (base := times.get((record["mix"], record["guidance"], impl))) is not None:
                record[f"ratio_to_{impl}"] = round(base / record["ms"], 3)


def line(record: dict[str, Any]) -> str:
    shown = (
        f"{key} {record[key]}"
        for key in ("ms", "ratio_to_serial", "ratio_to_compiled", "tflops", "floor_share", "rel_err")
    )
    return f"{record['mix']:9} cfg {record['guidance']} {record['impl']:12} " + "  ".join(shown)


if __name__ == "__main__":
    main()
