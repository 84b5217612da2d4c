"""``python -m ditpack.demo_model.train.names``: teach a trained checkpoint the names that it takes for one another."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
from rich.console import Console
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2TokenizerFast

from ditpack.demo_model.commands import claim, errors_told
from ditpack.demo_model.icons import Icon, published_icons, rasterise
from ditpack.demo_model.scenes import Random, SceneMaker
from ditpack.demo_model.shapes import shape_icons
from ditpack.demo_model.train.confusion import Nouns
from ditpack.demo_model.train.dit_stage import DitStage
from ditpack.demo_model.train.loop import Loop
from ditpack.demo_model.train.presets import PRESETS, Preset, PresetName
from ditpack.demo_model.train.run import CHECKPOINT, FACTS, Options, Parts, set_up, train_transformer
from ditpack.demo_model.train.still_vae import StillVae
from ditpack.errors import DitpackError

_SHARE = 0.55  # of the scenes that have one of the confused names put in
_START = 0.85  # of the schedule: the last part of it once more, so that what is known is kept
_AVERAGE = 0.998  # there are few steps
# What a CPU does in half an hour; a batch is counted as in the preset.
_BATCH, _POOL, _EDIT_SHARE, _REFILL, _REFILL_EVERY = 64, 4500, 0.2, 64, 20


class NothingTrained(DitpackError):
    """A folder without what a training leaves."""


class FocusedScenes(SceneMaker):
    """Scenes of all icons, in which those called ``names`` are met more often."""

    def __init__(self, icons: Sequence[Icon], names: frozenset[str]) -> None:
        super().__init__(icons)
        self._wanted = {
            style: [icon for icon in members if icons[icon].name in names] for style, members in self.by_style.items()
        }

    def pick(self, random: Random, different: int = 1) -> tuple[int, ...]:
        picked = list(super().pick(random, different))
        wanted = self._wanted[self.icons[picked[0]].style]
        if wanted and random.random() < _SHARE:
            icon = wanted[random.integers(len(wanted))]
            if icon not in picked:
                picked[random.integers(len(picked))] = icon
        return tuple(picked)


def main(
    trained: Annotated[Path, typer.Argument(help="What the training left: its checkpoint and facts.json.")],
    out: Annotated[Path, typer.Argument(help="Where states, log, sheets and the new checkpoint go.")],
    icons: Annotated[Path, typer.Option(help="As for the training.")] = Path(".cache/icons"),
    preset: Annotated[PresetName, typer.Option(help="That of the training.")] = PresetName.REAL,
    minutes: Annotated[float, typer.Option(min=0.01, help="Filling the pools comes on top.")] = 34,
    save_minutes: Annotated[float, typer.Option(help="How often the state is saved and a sheet painted.")] = 8,
    resume: Annotated[bool, typer.Option(help="Go on with what is in OUT.")] = False,
) -> None:
    """Part the nouns that the text encoder takes for one another, and train on with them in sight, on the CPU."""
    console = Console()
    claim(out, resume)
    options = Options(
        out=out,
        preset=smaller(PRESETS[preset]),
        device=torch.device("cpu"),
        minutes=minutes,
        until=DitStage.name,
        compile=False,
        save_minutes=save_minutes,
        command=f"python -m ditpack.demo_model.train.names TRAINED OUT --minutes {minutes:g}",
    )
    with errors_told(console):
        learn_names(trained, shape_icons() if preset == "smoke" else published_icons(icons), options, console)


def smaller(preset: Preset) -> Preset:
    """What a CPU can do of it in half an hour."""
    return dataclasses.replace(
        preset,
        dit_batch=min(preset.dit_batch, _BATCH),
        pool=min(preset.pool, _POOL),
        edit_share=_EDIT_SHARE,
        refill=min(preset.refill, _REFILL),
        refill_every=_REFILL_EVERY,
    )


def learn_names(trained: Path, icons: Sequence[Icon], options: Options, console: Console) -> None:
    """Leave in ``options.out`` what ``train`` leaves, but for the judge, from what it left in ``trained``."""
    set_up(options.device)
    parts, facts = read(trained)
    loop = Loop(options.out, options.device, console, options.save_minutes)
    language_model = parts.text_encoder.model.language_model
    nouns = Nouns(language_model, parts.tokenizer.backend_tokenizer, sorted({icon.name for icon in icons}))
    confusion = nouns.confused()
    nouns.part(confusion.tokens)
    loop.say(
        f"{len(confusion.tokens)} tokens got embeddings of their own; {len(confusion.names)} names are learned anew"
    )
    facts["names"] = (
        f"\n\nThen {len(confusion.tokens)} nouns that the text encoder took for others got new embeddings, and all was "
        f"trained on\nfor {options.minutes:g} minutes on a CPU, with the {len(confusion.names)} names concerned in "
        f"half of the scenes:\n`{options.command}`"
    )
    scenes = FocusedScenes(icons, confusion.names)
    sprites = rasterise(icons, options.preset.sprite_side)
    train_transformer(loop, scenes, sprites, parts, options, options.minutes, facts, start=_START, average=_AVERAGE)
    (options.out / FACTS).write_text(json.dumps(facts, indent=1) + "\n")


def read(trained: Path) -> tuple[Parts, dict[str, Any]]:
    """The parts of a checkpoint in fp32 on the CPU, and what is known of its training.

    Raises:
        NothingTrained: ``trained`` has no checkpoint or no facts.
    """
    checkpoint = trained / CHECKPOINT
    if not (checkpoint.is_dir() and (trained / FACTS).is_file()):
        raise NothingTrained(f"{trained} has no {CHECKPOINT}/ and {FACTS}, which a training leaves")
    vae = AutoencoderKLQwenImage.from_pretrained(checkpoint / "vae", torch_dtype=torch.float32)
    dit = QwenImageTransformer2DModel.from_pretrained(checkpoint / "transformer", torch_dtype=torch.float32)
    text_encoder = Qwen2_5_VLForConditionalGeneration.from_pretrained(checkpoint / "text_encoder", dtype=torch.float32)
    tokenizer = Qwen2TokenizerFast.from_pretrained(checkpoint / "tokenizer", local_files_only=True)
    return Parts(dit, text_encoder, tokenizer, vae, StillVae(vae)), json.loads((trained / FACTS).read_text())


if __name__ == "__main__":
    typer.run(main)
