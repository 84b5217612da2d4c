"""Two hundred random mixes in a row: does the step settle, and what does the host spend beside the device?

    python tests/bench/steady.py --out tests/bench/results/steady.h200.json    # full-size Qwen-Image, random weights
    python tests/bench/steady.py --layers 2 --heads 4 --mixes 20 --pixels 0.0625      # anywhere

Every mix has sizes, guidance and prompt lengths of its own, up to the token budget, and takes a few steps. Printed for
each tenth of them: time over the floor, graph captures and replays, memory. Then the host's own times.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine
import torch
from step import build_reference, build_sampler
from step_impls import image_request

from ditpack.attention import select_attention
from ditpack.models.qwen_image import QwenImageConfig
from ditpack.packing.layout import build_layout
from ditpack.sampling.qwen_image import Conditioning, Denoising, QwenImageSampler

SIDES = (256, 384, 512, 640, 768, 1024)


def main() -> None:
    options = parse()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = QwenImageConfig(num_layers=options.layers, num_attention_heads=options.heads)
    attention = select_attention("auto", device, dtype, config.num_attention_heads, config.attention_head_dim)
    options.graphs = True
    sampler = build_sampler(config, build_reference(config, device, dtype), attention, options)
    chance = random.Random(0)
    blocks: list[dict[str, Any]] = []
    size = max(1, options.mixes // 10)
    for start in range(0, options.mixes, size):
        blocks.append(block(sampler, [random_mix(chance, options) for _ in range(size)], options.steps))
        print(f"mixes {start:3} …", json.dumps(blocks[-1]), flush=True)
    host = host_times(sampler, options)
    print(json.dumps(host, indent=1))
    if options.out:
        meta = machine.meta() | {"attention": attention.name, "steps": options.steps, "budget": options.budget}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({"meta": meta, "blocks": blocks, "host": host}, indent=1) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=60)
    parser.add_argument("--heads", type=int, default=24)
    parser.add_argument("--mixes", type=int, default=200)
    parser.add_argument("--steps", type=int, default=4, help="steps that each mix takes")
    parser.add_argument("--budget", type=int, default=4096, help="tokens")
    parser.add_argument("--pixels", type=float, default=1.0, help="scale the sizes' area, for small machines")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def random_mix(chance: random.Random, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Requests within the budget, or a single one of any size."""
    mix: list[dict[str, Any]] = []
    tokens = 0
    while len(mix) < 16:
        width, height = (int(chance.choice(SIDES) * options.pixels**0.5) // 16 * 16 for _ in range(2))
        guided, text = chance.random() < 0.5, chance.randint(5, 120)
        more = (1 + guided) * (width * height // 256 + text)
        if mix and tokens + more > options.budget:
            break
        mix.append({"width": width, "height": height, "guided": guided, "text": text, "steps": options.steps})
        tokens += more
    return mix


def begin(sampler: QwenImageSampler, one: dict[str, Any], seed: int) -> Denoising:
    scale = 4.0 if one["guided"] else 1.0
    request = image_request(one["width"], one["height"], one["steps"], scale, seed)
    features = torch.randn(one["text"], sampler.transformer.config.joint_attention_dim)
    return sampler.begin(request, Conditioning(features, features[:5] if one["guided"] else None))


def block(sampler: QwenImageSampler, mixes: list[list[dict[str, Any]]], steps: int) -> dict[str, Any]:
    """Run ``mixes`` one after the other, each to its end, as fast as they go."""
    before = (sampler.graphs.replays, sampler.graphs.eager_steps, sampler.graphs.captures)
    tokens, slowest = 0, 0.0
    begun = time.perf_counter()
    for mix in mixes:
        members = [begin(sampler, one, seed) for seed, one in enumerate(mix)]
        pack = sampler.pack(members)
        for _ in range(steps):
            started = time.perf_counter()
            sampler.step(pack)
            sampler.throttle()
            slowest = max(slowest, time.perf_counter() - started)
            tokens += pack.layout.tokens
    sampler.check_device()
    seconds = time.perf_counter() - begun
    cuda = sampler.device.type == "cuda"
    return {
        "tokens_per_s": round(tokens / seconds),
        "slowest_step_ms": round(1000 * slowest, 1),
        "graph_replays": sampler.graphs.replays - before[0],
        "eager_steps": sampler.graphs.eager_steps - before[1],
        "captures": sampler.graphs.captures - before[2],
        "allocated_gib": round(torch.cuda.memory_allocated() / 2**30, 2) if cuda else None,
        "reserved_gib": round(torch.cuda.memory_reserved() / 2**30, 2) if cuda else None,
    }


def host_times(sampler: QwenImageSampler, options: argparse.Namespace) -> dict[str, float]:
    """Milliseconds that the host is busy, device not waited for: the median of many."""
    one = {"width": SIDES[0], "height": SIDES[0], "guided": True, "text": 40, "steps": 50}
    members = [begin(sampler, one, seed) for seed in range(16)]
    rows = [row for member in members for row in member.rows]  # 32
    small = sampler.pack(members[:1])
    pack = sampler.pack(members)
    # Steps beyond the transformer's forward, which is replaced by an empty one of the same shapes.
    forward = sampler.graphs.run
    result = {
        "layout_of_32_rows_ms": busy(lambda: build_layout(rows, sampler.device), sampler),
        "pack_of_32_rows_ms": busy(lambda: sampler.pack(members), sampler),
    }
    for name, which in (("256², guided", small), ("16 x 256², guided", pack)):
        result[f"step_ms, {name}"] = busy(lambda which=which: again(sampler, which), sampler)
        velocity = torch.zeros(which.layout.image.rows.shape[0], 64, dtype=sampler.dtype, device=sampler.device)
        sampler.graphs.run = lambda *_args, velocity=velocity, **_kwargs: velocity
        result[f"step_without_forward_ms, {name}"] = busy(lambda which=which: again(sampler, which), sampler)
        sampler.graphs.run = forward
    return result


def again(sampler: QwenImageSampler, pack: Any) -> None:
    pack.next = 0
    sampler.step(pack)


def busy(call: Callable[[], Any], sampler: QwenImageSampler) -> float:
    times = []
    for _ in range(25):
        sampler.check_device()
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return round(1000 * sorted(times[5:])[10], 3)


if __name__ == "__main__":
    main()
