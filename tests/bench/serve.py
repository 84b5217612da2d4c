"""The engine under traffic: shortest-first against first-come, processor sharing, equal sizes only, and one by one.

    python tests/bench/serve.py --out tests/bench/results/serve.h200.json      # full-size Qwen-Image, random weights
    python tests/bench/serve.py --layers 2 --heads 4 --pixels 0.0625           # anywhere

Every policy drives the same sampler through the same traces in real time. The token budget of the packing policies is
the measured knee of this machine, printed first.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import machine
import torch
from step import build_reference, build_sampler
from step_impls import TEXT_TOKENS, image_request
from traffic import Arrival, burst, judge, poisson, staggered

from ditpack.attention import select_attention
from ditpack.models.qwen_image import QwenImageConfig
from ditpack.packing.batcher import VarlenSequenceBatcher
from ditpack.sampling.knee import measure_knee
from ditpack.sampling.qwen_image import Conditioning, Denoising, Pack, QwenImageSampler


class Serial:
    """One request at a time, in the order they came: what serving without batching does."""

    def select(self, flights: Sequence[Flight]) -> list[Flight]:
        return list(flights[:1])


class FirstCome:
    """Packs within the budget, in the order they came, each to its end."""

    def __init__(self, budget: int) -> None:
        self.budget = budget

    def select(self, flights: Sequence[Flight]) -> list[Flight]:
        chosen: list[Flight] = []
        for flight in flights:
            if chosen and sum(f.tokens for f in chosen) + flight.tokens > self.budget:
                break
            chosen.append(flight)
        return chosen


class EqualSizes:
    """Packs only what has the size of the oldest request: what dense batching can do."""

    def __init__(self, budget: int) -> None:
        self.first_come = FirstCome(budget)

    def select(self, flights: Sequence[Flight]) -> list[Flight]:
        return self.first_come.select([flight for flight in flights if flight.arrival.size == flights[0].arrival.size])


class Flight:
    """A request of a trace in the loop below."""

    def __init__(self, arrival: Arrival, member: Denoising) -> None:
        self.arrival, self.member = arrival, member
        self.skipped, self.priority = 0, 2

    @property
    def tokens(self) -> int:
        return self.member.tokens

    @property
    def steps(self) -> int:
        return self.arrival.steps

    @property
    def steps_left(self) -> int:
        return self.member.steps_left


def main() -> None:
    options = parse()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = QwenImageConfig(num_layers=options.layers, num_attention_heads=options.heads)
    attention = select_attention(
        options.attention, device, dtype, config.num_attention_heads, config.attention_head_dim
    )
    reference = build_reference(config, device, dtype)
    sampler = build_sampler(config, reference, attention, options)
    del reference

    knee = measure_knee(sampler)
    print(f"knee {knee.tokens} tokens; tokens/s by pack size: {knee.rates}", flush=True)
    budget = knee.tokens
    policies: dict[str, Any] = {
        "serial": Serial(),
        "equal_sizes": EqualSizes(budget),
        "first_come": FirstCome(budget),
        "processor_sharing": FirstCome(2**30),
        "ditpack": VarlenSequenceBatcher(budget),
    }
    solo = {size: run(sampler, Serial(), [Arrival(0.0, size, options.steps)], options)[0] for size in sizes()}
    mean_solo = sum(solo.values()) / len(solo)
    traces = {"s0": burst(options.steps), "s1": staggered(options.steps, mean_solo / 2)}
    for load in options.loads:
        traces[f"poisson{load:g}"] = poisson(options.steps, load / mean_solo, options.count)
    print("seconds alone:", {f"{w}x{h}": round(s, 3) for (w, h), s in solo.items()}, flush=True)

    records = []
    for trace, arrivals in traces.items():
        for name, policy in policies.items():
            record = {"trace": trace, "policy": name} | judge(arrivals, run(sampler, policy, arrivals, options), solo)
            records.append(record)
            print(json.dumps(record), flush=True)
            if options.out:
                meta = machine.meta() | {"attention": attention.name, "steps": options.steps, "guidance": options.cfg}
                meta |= {"knee_tokens": knee.tokens, "tokens_per_s": knee.rates, "pixels": options.pixels}
                meta["solo_s"] = {f"{w}x{h}": round(s, 3) for (w, h), s in solo.items()}
                options.out.parent.mkdir(parents=True, exist_ok=True)
                options.out.write_text(json.dumps({"meta": meta, "records": records}, indent=1) + "\n")


def sizes() -> list[tuple[int, int]]:
    return list(dict.fromkeys(arrival.size for arrival in burst(1)))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=60)
    parser.add_argument("--heads", type=int, default=24)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--graphs", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--cfg", type=float, default=4.0)
    parser.add_argument("--count", type=int, default=24, help="requests of each Poisson trace")
    parser.add_argument(
        "--loads", nargs="+", type=float, default=[0.7, 1.0, 1.3], help="offered load, 1 = serial capacity"
    )
    parser.add_argument("--pixels", type=float, default=1.0, help="scale the sizes' area, for small machines")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def begin(sampler: QwenImageSampler, arrival: Arrival, options: argparse.Namespace, seed: int) -> Denoising:
    width, height = (max(64, int(side * options.pixels**0.5) // 16 * 16) for side in arrival.size)
    request = image_request(width, height, arrival.steps, options.cfg, seed)
    dim = sampler.transformer.config.joint_attention_dim
    prompt, negative = torch.randn(2, TEXT_TOKENS, dim, generator=torch.Generator().manual_seed(seed))
    return sampler.begin(request, Conditioning(prompt, negative[:6] if options.cfg > 1 else None))


def run(sampler: QwenImageSampler, policy: Any, arrivals: list[Arrival], options: argparse.Namespace) -> list[float]:
    """Play ``arrivals`` in real time; the engine's own loop without its threads. Seconds at which each was done."""
    members = [begin(sampler, arrival, options, seed) for seed, arrival in enumerate(arrivals)]
    waiting = [Flight(arrival, member) for arrival, member in zip(arrivals, members, strict=True)]
    flights: list[Flight] = []
    finished: dict[int, float] = {}
    pack: Pack | None = None
    packed: list[Flight] = []
    started = time.monotonic()
    while waiting or flights:
        now = time.monotonic() - started
        while waiting and waiting[0].arrival.at <= now:
            flights.append(waiting.pop(0))
        if not flights:
            time.sleep(max(0.0, waiting[0].arrival.at - now))
            continue
        chosen = policy.select(flights)
        if pack is None or chosen != packed or not pack.steps_left:
            pack, packed = sampler.pack([flight.member for flight in chosen]), chosen
        sampler.step(pack)
        sampler.throttle()
        done = [flight for flight in chosen if not flight.steps_left]
        if done and sampler.device.type == "cuda":
            torch.cuda.synchronize()
        for flight in done:
            flights.remove(flight)
            finished[id(flight.member)] = time.monotonic() - started
    return [finished[id(member)] for member in members]


if __name__ == "__main__":
    main()
