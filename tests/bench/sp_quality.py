"""How far images of several GPUs are from those of one: SSIM, PSNR, relative error and bit equality."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ditpack.models.checkpoint import open_checkpoint
from ditpack.parallel.rows import share_rows
from ditpack.parallel.ulysses import Ulysses
from ditpack.request import ImageRequest, Limits, resolve
from ditpack.sampling.qwen_image import Conditioning, Denoising, QwenImageSampler, load_sampler

PROMPTS = ("a red apple on a blue background", "two pink hearts", "a sun above a cloud")
SIZE = "128x96"
STEPS = 20


def image_request(prompt: str, size: str, steps: int, guided: bool) -> ImageRequest:
    """``size``: WxH in pixels."""
    width, height = map(int, size.split("x"))
    scale = 4.0 if guided else 1.0
    values = {"PROMPT": prompt, "WIDTH": width, "HEIGHT": height, "NUM_INFERENCE_STEPS": steps, "SEED": 1}
    return resolve(values | {"TRUE_CFG_SCALE": scale}, Limits(width, height))


def difference(ours: Tensor, single: Tensor) -> dict[str, Any]:
    ours, single = ours.double(), single.double()
    relative = float((ours - single).norm() / single.norm())
    return {"rel_err": float(f"{relative:.3g}"), "bit_equal": torch.equal(ours, single)}


def compare(ours: Tensor, single: Tensor) -> dict[str, Any]:
    """Of two images [channels, h, w]; their range is that of ``single``, or 255 for bytes."""
    span = 255.0 if single.dtype == torch.uint8 else float(single.max() - single.min())
    a, b = ours.double(), single.double()
    mse = float((a - b).square().mean())
    psnr = None if mse == 0 else round(20 * math.log10(span) - 10 * math.log10(mse), 2)
    return difference(ours, single) | {"psnr_db": psnr, "ssim": round(ssim(a, b, span), 6)}


def ssim(a: Tensor, b: Tensor, span: float) -> float:
    """Mean structural similarity (Wang et al. 2004) over 7 x 7 windows, of fp64 [channels, h, w]."""

    def mean(x: Tensor) -> Tensor:
        return F.avg_pool2d(x[None], 7, stride=1)[0]

    c1, c2 = (0.01 * span) ** 2, (0.03 * span) ** 2
    mean_a, mean_b = mean(a), mean(b)
    correction = 49 / 48  # the sample covariance
    var_a, var_b = (correction * (mean(x * x) - m * m) for x, m in ((a, mean_a), (b, mean_b)))
    covariance = correction * (mean(a * b) - mean_a * mean_b)
    numerator = (2 * mean_a * mean_b + c1) * (2 * covariance + c2)
    return float((numerator / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2))).mean())


def denoise(sampler: QwenImageSampler, members: list[Denoising]) -> None:
    pack = sampler.pack(members)
    while pack.steps_left:
        sampler.step(pack)


def embedded(
    device: torch.device, dtype: torch.dtype, attention: str, prompts: Sequence[str] = PROMPTS, steps: int = STEPS
) -> Iterator[dict[str, Any]]:
    """A record for each prompt and way of sharding, of the embedded model; in this process group, on all its ranks."""
    if importlib.util.find_spec("diffusers") is None:
        print("no diffusers here, whose VAE makes the pictures: the embedded model is left out", flush=True)
        return
    from ditpack.models.prompt import PromptTokenizer
    from ditpack.models.text_encoder import load_text_encoder
    from ditpack.models.vae import load_vae_decoder

    group = dist.group.WORLD
    assert group is not None
    checkpoint = open_checkpoint("embedded")
    if checkpoint.transformer_config["num_attention_heads"] % dist.get_world_size(group):
        print("the embedded model is left out: its heads do not divide by the degree", flush=True)
        return
    tokenizer = PromptTokenizer(checkpoint)
    encoder = load_text_encoder(checkpoint, torch.device("cpu"), torch.float32)
    decoder = load_vae_decoder(checkpoint, device, torch.float32)
    ways = ("single", "segment", "unmasked", "rows")
    samplers = {way: load_sampler(checkpoint, device, dtype, attention, "none") for way in ways}
    for way, sampler in samplers.items():
        sampler.run_eagerly()
        if way == "rows":
            share_rows(sampler.transformer, group)
        elif way != "single":
            Ulysses(sampler.transformer, group, way)
    for prompt in prompts:
        request = image_request(prompt, SIZE, steps, guided=True)
        for ending in ("", ".", ", please"):  # one of these makes padding necessary
            ids = [tokenizer.encode(text, "PROMPT") for text in (prompt + ending, " ")]
            embeds, negative = encoder.encode(ids)
            tokens = samplers["single"].begin(request, Conditioning(embeds, negative)).tokens
            if tokens % dist.get_world_size(group):
                break
        pictures = {}
        for way, sampler in samplers.items():
            member = sampler.begin(request, Conditioning(embeds, negative))
            denoise(sampler, [member])
            pictures[way] = torch.from_numpy(decoder.decode([sampler.finish(member)()])[0]).permute(2, 0, 1)
        for way, picture in pictures.items():
            if way != "single":
                record = {"prompt": prompt, "size": SIZE, "impl": way, "steps": steps, "guidance": 4.0,
                          "tokens": tokens, "padding": -tokens % dist.get_world_size(group)}  # fmt: skip
                yield record | compare(picture, pictures["single"])
