"""One denoising step over several GPUs: tokens sharded in three padding modes, rows sharded, and one GPU alone.

    python tests/bench/sp.py --degree 2 --out tests/bench/results/sp.2xh200.json  # full-size Qwen-Image, random weights
    python tests/bench/sp.py --degree 2 --quick                                   # anywhere: gloo ranks on the CPU

Starts its own ranks, one a GPU. Every implementation takes the same step on the same weights; each pack is given text
of a length that the degree does not divide, so that there is padding. A time is the slowest rank's; repeats go round
the implementations in turn. Then whole images are compared with those of one GPU.

    single     the plain model on one GPU (all ranks at once, each for itself)
    segment    tokens sharded, padding as a segment of its own
    masked     tokens sharded, padding masked: unpad, attend, pad in every layer
    unmasked   tokens sharded, padding attended to
    divisible  segment, with as much text as makes padding superfluous
    local      segment without its collectives (results are wrong): what is left is computation
    rows       whole rows sharded
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import machine
import sp_quality
import torch
import torch.distributed as dist

from ditpack.attention import Attention, select_attention
from ditpack.models.quantized import quantize_blocks
from ditpack.models.qwen_image import QwenImageConfig, QwenImageTransformer
from ditpack.models.weights import fill_random
from ditpack.parallel.rows import share_rows
from ditpack.parallel.ulysses import Ulysses, check_degree
from ditpack.sampling.flow_match import FlowMatchSchedule
from ditpack.sampling.qwen_image import Conditioning, Denoising, Pack, QwenImageSampler

IMPLS = ("single", "segment", "masked", "unmasked", "divisible", "local", "rows")
SIZES = ("1328x1328", "1472x1104", "1584x1056", "2048x2048")
TEXT_TOKENS = {"off": (40,), "on": (40, 6)}  # the negative prompt is the shorter one, as in life
STEPS = 50
LIMIT = datetime.timedelta(minutes=5)  # for a collective: kernels may be compiled meanwhile


def main() -> None:
    options = parse()
    cuda = torch.cuda.is_available()
    for degree in options.degree:
        if cuda and degree > torch.cuda.device_count():
            raise SystemExit(f"--degree {degree}: this machine has {torch.cuda.device_count()} GPUs")
        check_degree(options.heads, degree)
    options.records, options.images = [], []
    for degree in options.degree:
        with tempfile.TemporaryDirectory() as directory:
            results = Path(directory) / "results.json"
            arguments = (degree, f"file://{directory}/store", results, options)
            torch.multiprocessing.spawn(run, args=arguments, nprocs=degree, join=True)
            found = json.loads(results.read_text())
            options.records, options.images = found["records"], found["images"]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--degree", type=int, nargs="+", default=[2], help="how many GPUs; several: one after the other"
    )
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), metavar="WxH")
    parser.add_argument("--guidance", nargs="+", choices=("off", "on"), default=["off", "on"])
    parser.add_argument("--impls", nargs="+", choices=IMPLS, default=list(IMPLS))
    parser.add_argument("--layers", type=int, default=60)
    parser.add_argument("--heads", type=int, default=24)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--fp8", action="store_true", help="8-bit linear layers in every implementation")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--image-sizes", nargs="*", default=["1328x1328"], metavar="WxH", help="whole images to compare"
    )
    parser.add_argument("--image-steps", type=int, default=8)
    parser.add_argument("--embedded", action=argparse.BooleanOptionalAction, default=True,
                        help="compare pictures of the embedded model too")  # fmt: skip
    parser.add_argument("--profile", action="store_true", help="print the kernels of one step of each implementation")
    parser.add_argument("--quick", action="store_true", help="2 layers, 4 heads, small images")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.quick:
        options.layers, options.heads, options.repeats = 2, 4, 3
        options.sizes, options.image_sizes = ["208x208", "256x256"], ["208x208"]
    return options


def run(rank: int, degree: int, store: str, results: Path, options: argparse.Namespace) -> None:
    """What each rank does; rank 0 prints and writes."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // degree))
    dist.init_process_group("nccl" if cuda else "gloo", init_method=store, rank=rank, world_size=degree, timeout=LIMIT,
                            device_id=device if cuda else None)  # fmt: skip
    try:
        bench = Bench(options, device, degree, results)
        for size in options.sizes:
            for guidance in options.guidance:
                bench.measure(size, guidance)
        for size in options.image_sizes:
            bench.compare_images(size)
        if options.embedded:
            bench.compare_pictures()
        dist.barrier()
    finally:
        dist.destroy_process_group()


@dataclass
class Timed:
    sampler: QwenImageSampler
    members: list[Denoising]
    pack: Pack
    ms: list[float]

    def step(self) -> None:
        self.pack.next = 0
        self.sampler.step(self.pack)


class Bench:
    """One rank's samplers, on shared weights, and the records so far."""

    def __init__(self, options: argparse.Namespace, device: torch.device, degree: int, results: Path) -> None:
        self.options, self.device, self.degree, self.results = options, device, degree, results
        self.records, self.images = list(options.records), list(options.images)
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.config = QwenImageConfig(num_layers=options.layers, num_attention_heads=options.heads)
        heads = (self.config.num_attention_heads, self.config.attention_head_dim)
        self.attention: Attention = select_attention(options.attention, device, self.dtype, *heads)
        self.weights = self._weights()
        self.samplers = {impl: self._sampler(self._transform(impl)) for impl in IMPLS}
        self.meta = machine.meta() | {
            "attention": self.attention.name, "layers": options.layers, "heads": options.heads, "fp8": options.fp8,
            "gpus": torch.cuda.device_count(), "nccl": torch.cuda.nccl.version() if device.type == "cuda" else None,
        }  # fmt: skip
        self.say(json.dumps(self.meta, indent=1))

    def say(self, text: str) -> None:
        if dist.get_rank() == 0:
            print(text, flush=True)

    def write(self) -> None:
        if dist.get_rank() == 0:
            text = json.dumps({"meta": self.meta, "records": self.records, "images": self.images}, indent=1) + "\n"
            self.results.write_text(text)
            if self.options.out:
                self.options.out.parent.mkdir(parents=True, exist_ok=True)
                self.options.out.write_text(text)

    def _weights(self) -> QwenImageTransformer:
        """A plain transformer with random weights, the same on every rank."""
        with torch.device("meta"):
            model = QwenImageTransformer(self.config, self.attention)
        fill_random(model, Path("random"), self.device, self.dtype)
        model.requires_grad_(False).eval()
        if self.options.fp8:
            quantize_blocks(model.transformer_blocks)
        own = torch.stack([p.double().sum() for p in (model.img_in.weight, model.proj_out.weight)])
        sums = [torch.empty_like(own) for _ in range(self.degree)]
        dist.all_gather(sums, own)
        if not all(torch.equal(other, own) for other in sums):
            raise RuntimeError("the ranks drew different weights")
        return model

    def _transform(self, impl: str) -> Callable[[QwenImageTransformer], None] | None:
        group = dist.group.WORLD
        assert group is not None
        if impl == "single":
            return None
        if impl == "rows":
            return lambda model: share_rows(model, group)
        mode = impl if impl in ("masked", "unmasked") else "segment"

        def transform(model: QwenImageTransformer) -> None:
            exchange = Ulysses(model, group, mode).exchange
            if impl == "local":
                exchange.all_to_all = Stay()

        return transform

    def _sampler(self, transform: Callable[[QwenImageTransformer], None] | None) -> QwenImageSampler:
        """A sampler of its own on the tensors of ``self.weights``, transformed. All run eagerly, without graphs."""
        with torch.device("meta"):
            model = QwenImageTransformer(self.config, self.attention)
            if self.options.fp8:
                quantize_blocks(model.transformer_blocks)
        model.load_state_dict(self.weights.state_dict(), assign=True)
        model.requires_grad_(False).eval()
        if transform is not None:
            transform(model)
        return QwenImageSampler(model, FlowMatchSchedule(use_dynamic_shifting=True), 16, graphs=False)

    def begin(self, impl: str, size: str, guidance: str, steps: int, extra: int) -> Denoising:
        """A request of ``size`` whose prompt has ``extra`` tokens more than usual."""
        request = sp_quality.image_request("random", size, steps, guidance == "on")
        generator = torch.Generator().manual_seed(1)
        first, *rest = TEXT_TOKENS[guidance]
        texts = [torch.randn(n, self.config.joint_attention_dim, generator=generator) for n in (first + extra, *rest)]
        return self.samplers[impl].begin(request, Conditioning(texts[0], texts[1] if rest else None))

    def extra(self, impl: str, size: str, guidance: str) -> int:
        """One more token of text where the length would be divisible; for ``divisible``, as many as make it so."""
        tokens = self.begin("single", size, guidance, 1, 0).tokens
        extra = 0 if tokens % self.degree else 1
        return extra + -(tokens + extra) % self.degree if impl == "divisible" else extra

    def measure(self, size: str, guidance: str) -> None:
        impls = [impl for impl in self.options.impls if impl != "rows" or guidance == "on"]
        timed: dict[str, Timed] = {}
        changes: dict[str, torch.Tensor] = {}
        for impl in impls:
            sampler = self.samplers[impl]
            member = self.begin(impl, size, guidance, STEPS, self.extra(impl, size, guidance))
            noise = member.latents
            timed[impl] = Timed(sampler, [member], sampler.pack([member]), [])
            timed[impl].step()
            if impl not in ("divisible", "local"):  # other inputs; wrong by intention
                changes[impl] = member.latents - noise
            timed[impl].step()
        for _ in range(self.options.repeats):
            for impl in impls:
                timed[impl].ms.append(self.milliseconds(timed[impl].step))
        times = {impl: sorted(entry.ms)[len(entry.ms) // 2] for impl, entry in timed.items()}
        for impl in impls:
            tokens = timed[impl].members[0].tokens
            record: dict[str, Any] = {
                "degree": self.degree, "size": size, "guidance": 4.0 if guidance == "on" else 1.0, "impl": impl,
                "tokens": tokens, "padding": -tokens % self.degree if impl not in ("single", "rows") else 0,
                "ms": round(times[impl], 3), "ms_all": [round(ms, 3) for ms in timed[impl].ms],
            }  # fmt: skip
            for other in ("single", "masked", "divisible"):
                if other in times:
                    record[f"speedup_over_{other}"] = round(times[other] / times[impl], 4)
            if impl == "segment" and "local" in times:
                record["collectives_share"] = round(1 - times["local"] / times["segment"], 4)
            if impl in changes and "single" in changes:
                record |= sp_quality.difference(changes[impl], changes["single"])
            if self.device.type == "cuda" and impl in ("single", "segment", "masked", "rows"):
                record |= self.profile(impl, timed[impl].step)
            self.records.append(record)
            self.write()
            self.say("  ".join(f"{key} {value}" for key, value in record.items() if key != "ms_all"))

    def milliseconds(self, step: Callable[[], None]) -> float:
        """The time of the slowest rank; all start together."""
        self.meet()
        own = torch.tensor(machine.milliseconds(step, repeats=1, warmup=0), device=self.device)
        dist.all_reduce(own, dist.ReduceOp.MAX)
        return float(own)

    def meet(self) -> None:
        dist.all_reduce(torch.zeros(1, device=self.device))
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def profile(self, impl: str, step: Callable[[], None]) -> dict[str, float]:
        """Kernel time of a step on rank 0, and how much of it is NCCL's, the wait for the other ranks included."""
        self.meet()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            step()
            torch.cuda.synchronize()
        events = profiler.key_averages()
        total = sum(event.self_device_time_total for event in events)
        nccl = sum(event.self_device_time_total for event in events if "nccl" in event.key.lower())
        if self.options.profile:
            self.say(
                f"{impl}\n" + events.table(sort_by="self_device_time_total", row_limit=25, max_name_column_width=90)
            )
        return {"kernels_ms": round(total / 1000, 3), "nccl_ms": round(nccl / 1000, 3)}

    def compare_images(self, size: str) -> None:
        """Whole denoisings with guidance, from the same noise, against one GPU's."""
        latents: dict[str, torch.Tensor] = {}
        for impl in ("single", "segment", "masked", "unmasked", "rows"):
            if impl not in self.options.impls:
                continue
            sampler = self.samplers[impl]
            member = self.begin(impl, size, "on", self.options.image_steps, self.extra(impl, size, "on"))
            sp_quality.denoise(sampler, [member])
            latents[impl] = sampler.finish(member)()
        for impl, result in latents.items():
            if impl != "single" and "single" in latents:
                record = {"model": "random weights, latents", "degree": self.degree, "size": size, "impl": impl,
                          "steps": self.options.image_steps, "guidance": 4.0}  # fmt: skip
                self.images.append(record | sp_quality.compare(result, latents["single"]))
                self.write()
                self.say(json.dumps(self.images[-1]))

    def compare_pictures(self) -> None:
        """The embedded model's pictures against one GPU's."""
        for record in sp_quality.embedded(self.device, self.dtype, self.options.attention):
            self.images.append({"model": "embedded, pixels", "degree": self.degree} | record)
            self.write()
            self.say(json.dumps(self.images[-1]))


class Stay:
    """In place of an exchange: nothing, but at first sight of a buffer, so that no kernel works on flattering zeros."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def __call__(self, received: torch.Tensor, sent: torch.Tensor) -> Stay:
        if received.data_ptr() not in self._seen:
            received.copy_(sent)
            self._seen.add(received.data_ptr())
        return self

    def wait(self) -> None:
        pass


if __name__ == "__main__":
    main()
