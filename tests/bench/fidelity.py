"""What packing, precision and quantisation do to pictures of a checkpoint: SSIM and PSNR, and what a judge says.

    python tests/bench/fidelity.py --judge judge.safetensors --icons .cache/icons --out fidelity.json

Every way paints the same held-out prompts from the same seeds. ``packed``, in the device's own precision, is what the
others are compared with. fp32 is exact, and so says how far half precision is from it; ``alone`` is one at a time.
Several GPUs are compared by ``sp.py``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import machine
import numpy as np
import sp_quality
import torch

from ditpack.demo_model.icons import published_icons
from ditpack.demo_model.judge.checks import Pixels
from ditpack.demo_model.judge.network import load_judge
from ditpack.demo_model.judge.score import Eyes, Task, prompts, score
from ditpack.demo_model.painter import Job, Painter, own_precision
from ditpack.demo_model.scenes import SceneMaker
from ditpack.demo_model.shapes import shape_icons

TOGETHER = 16
# Way → dtype (None: the device's own), quantisation, jobs in a pack.
WAYS: dict[str, tuple[torch.dtype | None, str, int]] = {
    "packed": (None, "none", TOGETHER),
    "alone": (None, "none", 1),
    "fp32": (torch.float32, "none", TOGETHER),
    "bf16": (torch.bfloat16, "none", TOGETHER),
    "fp8": (torch.bfloat16, "fp8", TOGETHER),
}


def main() -> None:
    options = parse()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    icons = shape_icons() if options.shapes else published_icons(options.icons)
    scenes = SceneMaker(icons)
    tasks = prompts(scenes, options.prompts)
    eyes = Eyes(load_judge(options.judge, device)[0], scenes) if options.judge else None
    reference: list[Pixels] = []
    records = []
    for way in options.ways:
        pictures = list(paint(options.checkpoint, device, way, tasks, options.steps))
        reference = reference or pictures
        record: dict[str, Any] = {"way": way, **against(pictures, reference)}
        if eyes:
            record["judge"] = score(eyes, zip(tasks, pictures, strict=True))
        records.append(record)
        print(json.dumps(record), flush=True)
    if options.out:
        result = {"meta": machine.meta(), "prompts": options.prompts, "steps": options.steps, "records": records}
        options.out.write_text(json.dumps(result, indent=1) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", default="embedded")
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="the first is compared with")
    parser.add_argument("--judge", type=Path, help="judge.safetensors; without it there are SSIM and PSNR alone")
    parser.add_argument("--icons", type=Path, default=Path(".cache/icons"))
    parser.add_argument("--shapes", action="store_true", help="a model of the smoke preset")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def paint(checkpoint: str, device: torch.device, way: str, tasks: list[Task], steps: int) -> Iterator[Pixels]:
    dtype, quantization, together = WAYS[way]
    painter = Painter(checkpoint, device, dtype or own_precision(device), quantization=quantization)
    jobs = [Job(task.text, task.scene.size, index) for index, task in enumerate(tasks)]
    for pictures in painter.paint(jobs, steps, together=together):
        yield from pictures


def against(pictures: list[Pixels], reference: list[Pixels]) -> dict[str, Any]:
    """Means over pictures; PSNR over those that differ at all."""
    found = [
        sp_quality.compare(*(torch.from_numpy(np.array(x)).permute(2, 0, 1) for x in pair))
        for pair in zip(pictures, reference, strict=True)
    ]
    psnr = [one["psnr_db"] for one in found if one["psnr_db"] is not None]
    return {
        "ssim": round(float(np.mean([one["ssim"] for one in found])), 5),
        "lowest_ssim": min(one["ssim"] for one in found),
        "psnr_db": round(float(np.mean(psnr)), 2) if psnr else None,
        "bit_equal": f"{sum(one['bit_equal'] for one in found)} of {len(found)}",
    }


if __name__ == "__main__":
    main()
