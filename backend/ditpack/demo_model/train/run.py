"""The whole training, stage after stage; each picks up where it was left."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.utils import logging as diffusers_logging
from rich.console import Console
from transformers.utils import logging as transformers_logging

from ditpack.demo_model.captions import Captions
from ditpack.demo_model.edits import KINDS, EditMaker
from ditpack.demo_model.icons import STYLES, Icon, Sprites, rasterise
from ditpack.demo_model.judge.network import Judge, save_judge
from ditpack.demo_model.judge.stage import SIZES, JudgeStage
from ditpack.demo_model.painter import Painter, own_precision
from ditpack.demo_model.scenes import SceneMaker
from ditpack.demo_model.train.dit_stage import DitStage
from ditpack.demo_model.train.export import export
from ditpack.demo_model.train.loop import Loop
from ditpack.demo_model.train.networks import build_text_encoder, build_tokenizer, build_transformer, build_vae
from ditpack.demo_model.train.pool import Pool
from ditpack.demo_model.train.presets import Preset
from ditpack.demo_model.train.sheets import paint_sheet
from ditpack.demo_model.train.still_vae import StillVae
from ditpack.demo_model.train.vae_stage import VaeStage

CHECKPOINT, JUDGE, FACTS = "checkpoint", "judge.safetensors", "facts.json"
_TEXTS_PER_NAME = 12  # that the tokenizer is trained on
_MEASURED = 16  # held-out scenes of each size that a figure is the mean of


@dataclass(frozen=True, slots=True)
class Options:
    """``command`` is what the card says the model was made with."""

    out: Path
    preset: Preset
    device: torch.device
    minutes: float
    until: str
    compile: bool
    save_minutes: float
    command: str


@dataclass(frozen=True, slots=True)
class Parts:
    """``vae`` as diffusers has it, on the CPU, the latents' statistics in its config; ``still`` is the same one."""

    dit: Any
    text_encoder: Any
    tokenizer: Any
    vae: Any
    still: StillVae


def train(icons: Sequence[Icon], options: Options, console: Console) -> None:
    """Train judge, VAE, and transformer with text encoder, and leave a checkpoint in ``options.out``.

    Raises:
        RuntimeError: the preset's vocabulary is too small for the templates.
    """
    set_up(options.device)
    preset, device = options.preset, options.device
    loop = Loop(options.out, device, console, options.save_minutes)
    began = time.monotonic()
    sprites = rasterise(icons, preset.sprite_side).to(device)
    scenes = SceneMaker(icons)
    loop.say(f"{len(icons)} icons, {len(scenes.names)} names, drawn in {time.monotonic() - began:.1f} s")
    judge_minutes, vae_minutes, dit_minutes = (share * options.minutes for share in preset.shares)

    accuracy = _judge(loop, scenes, sprites, options, judge_minutes)
    if options.until == JudgeStage.name:
        return

    # The usual sizes: the others would teach the VAE nothing more.
    sizes = list(preset.text_shapes)
    usual = [size for size in sizes if preset.text_shapes[size] >= 1]
    vae_stage = VaeStage(build_vae(preset), scenes, sprites, usual, preset.vae_batch)
    vae_minutes = loop.run(vae_stage, vae_minutes)  # a resumed one may have had another number
    psnr = vae_stage.quality(sizes, _MEASURED)
    statistics = vae_stage.statistics(sizes, 2 * _MEASURED)
    loop.say(f"vae: {psnr} dB on held-out scenes")
    if options.until == VaeStage.name:
        return
    facts = {
        "layers": preset.layers, "heads": preset.heads, "head_dim": preset.head_dim, "psnr": psnr,
        "judge_name": f"{accuracy['name']:.1%}", "judge_top5": f"{accuracy['name_top5']:.1%}",
        "judge_count": f"{accuracy['count']:.1%}", "command": options.command, "hardware": _hardware(device),
        "date": datetime.date.today().isoformat(), "vae_minutes": f"{vae_minutes:.1f}",
        "dit_minutes": f"{dit_minutes:.1f}", "names": "",
    }  # fmt: skip
    tokenizer = build_tokenizer(options.out / "tokenizer", _texts(scenes), preset)
    vae = vae_stage.still.restored()
    vae.register_to_config(latents_mean=statistics[0], latents_std=statistics[1])
    parts = Parts(
        dit=build_transformer(preset).to(device),
        text_encoder=build_text_encoder(preset, tokenizer).to(device),
        tokenizer=tokenizer,
        vae=vae,
        still=vae_stage.still,
    )
    train_transformer(loop, scenes, sprites, parts, options, dit_minutes, facts)
    (options.out / FACTS).write_text(json.dumps(facts | {"judge": accuracy}, indent=1) + "\n")


def set_up(device: torch.device) -> None:
    torch.manual_seed(0)
    for library in (diffusers_logging, transformers_logging):
        library.set_verbosity_error()  # saving warns of casts that are meant
        library.disable_progress_bar()
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True


def _judge(loop: Loop, scenes: SceneMaker, sprites: Sprites, options: Options, minutes: float) -> dict[str, float]:
    """Train the judge, keep it, and say how right it is."""
    judge = Judge(scenes.names, STYLES, options.preset.judge_width).to(options.device)
    stage = JudgeStage(judge, scenes, sprites, options.preset.judge_batch)
    loop.run(stage, minutes)
    accuracy = stage.accuracy(2 * len(SIZES))
    save_judge(judge, options.out / JUDGE, accuracy)
    loop.say(f"judge, on held-out scenes: {accuracy}")
    return accuracy


def train_transformer(
    loop: Loop,
    scenes: SceneMaker,
    sprites: Sprites,
    parts: Parts,
    options: Options,
    minutes: float,
    facts: dict[str, Any],
    start: float = 0.0,
    average: float = 0.9995,
) -> None:
    """Train transformer and text encoder on ``scenes``, and leave a checkpoint with each sheet.

    ``start`` and ``average`` are the stage's, ``facts`` the card's.
    """
    preset, device = options.preset, options.device
    statistics = (list(parts.vae.config.latents_mean), list(parts.vae.config.latents_std))
    began = time.monotonic()
    pool = Pool(preset, scenes, sprites, parts.still, statistics, parts.tokenizer, parts.text_encoder.config)
    loop.say(f"pools filled in {time.monotonic() - began:.0f} s")

    def paint(file: Path) -> None:
        checkpoint = options.out / CHECKPOINT
        export(checkpoint, preset, parts.vae, parts.dit, parts.text_encoder, parts.tokenizer, facts)
        edit_sizes = [size for size, references in preset.edit_shapes if references == 2]
        paint_sheet(
            Painter(checkpoint, device, own_precision(device)),
            scenes,
            sprites,
            list(preset.text_shapes),
            edit_sizes,
            file,
        )

    stage = DitStage(
        parts.dit,
        parts.text_encoder,
        pool,
        preset.dit_batch,
        preset.refill,
        preset.refill_every,
        options.compile,
        paint,
        start=start,
        average=average,
    )
    if stage.problem:
        loop.say(f"dit: not compiled: {stage.problem}")
    loop.run(stage, minutes)


def _texts(scenes: SceneMaker) -> list[str]:
    """Captions and instructions in which each name comes often."""
    random = np.random.default_rng(11)
    captions = Captions(scenes.icons)
    edits = EditMaker(scenes, captions)
    size = (128, 128)
    texts = [captions.caption(random, scenes.draw(random, size)) for _ in range(_TEXTS_PER_NAME * len(scenes.names))]
    texts += [edits.draw(random, KINDS[k % len(KINDS)], size, 2).instruction for k in range(len(texts) // 4)]
    nouns = Captions(scenes.icons, synonym_share=0.5)
    texts += [nouns.noun(random, icon) for icon in range(len(scenes.icons)) for _ in range(8)]
    return [" " + text for text in texts]


def _hardware(device: torch.device) -> str:
    return f"one {torch.cuda.get_device_name(device)}" if device.type == "cuda" else "CPU"
