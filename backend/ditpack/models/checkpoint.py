"""Opening a checkpoint directory: what is wrong with it is found here, before any weight is read.

Nothing in this file needs torch: ``prepare`` opens checkpoints too, and only for their numbers and their tokenizer.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ditpack.models.config_rules import CheckpointError, Config, check_autoencoder_kl, check_fit
from ditpack.models.editing import EDITING_FAMILIES, Editing, read_editing
from ditpack.models.mammoth_config import MODEL_TYPE, MammothModa2Config
from ditpack.request import Limits

EMBEDDED = Path(__file__).resolve().parent.parent / "data" / "embedded"
ENVIRONMENT_VARIABLE = "DITPACK_CHECKPOINT"
WEIGHTS_VARIABLE = "DITPACK_WEIGHTS"
WEIGHTS = ("stored", "random")

_QWEN_IMAGE = {
    "scheduler": ("FlowMatchEulerDiscreteScheduler",),
    "text_encoder": ("Qwen2_5_VLForConditionalGeneration",),
    "tokenizer": ("Qwen2Tokenizer", "Qwen2TokenizerFast"),
    "transformer": ("QwenImageTransformer2DModel",),
    "vae": ("AutoencoderKLQwenImage",),
}
# Pipeline class → component folder → the classes that may stand in model_index.json for it.
FAMILIES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "QwenImagePipeline": _QWEN_IMAGE,
    **{name: {**_QWEN_IMAGE, "processor": ("Qwen2VLProcessor", "Qwen2_5_VLProcessor")} for name in EDITING_FAMILIES},
}

__all__ = [
    "EMBEDDED",
    "ENVIRONMENT_VARIABLE",
    "WEIGHTS",
    "WEIGHTS_VARIABLE",
    "Checkpoint",
    "CheckpointError",
    "GenerationSettings",
    "find_weights",
    "open_checkpoint",
]


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """The sizes in pixels that a checkpoint was made for: its ditpack.json, a file that it need not have.

    ``condition_side`` and ``reference_side`` are those of ``Editing``; None is what the pipeline has.
    """

    default_width: int = 1024
    default_height: int = 1024
    min_size: int = 64
    condition_side: int | None = None
    reference_side: int = 1024


@dataclass(frozen=True)
class Checkpoint:
    """A directory that was looked through and fits together.

    ``family`` is the pipeline class of its model_index.json, or the model_type of its config.json, in which case that
    file is its ``transformer_config``. The configs are json objects as they are. ``vae_scale_factor`` is the number of
    pixels per latent pixel along each side. ``editing`` is None when it does not edit images. ``weights``: whether its
    models get the stored weights or random ones.
    """

    path: Path
    family: str
    transformer_config: dict[str, Any]
    scheduler_config: dict[str, Any]
    vae_config: dict[str, Any]
    text_encoder_config: dict[str, Any]
    vae_scale_factor: int
    settings: GenerationSettings
    editing: Editing | None
    weights: str = "stored"

    @property
    def text_config(self) -> dict[str, Any]:
        """The language model's part of the text encoder's config (flat in files of older transformers)."""
        return text_part(self.text_encoder_config)

    def limits(self, max_pixels: int) -> Limits:
        """What a deployment of this checkpoint allows when it caps an image at ``max_pixels``.

        Raises:
            CheckpointError: when the checkpoint's own default size is above the cap.
        """
        width, height = self.settings.default_width, self.settings.default_height
        if width * height > max_pixels:
            raise CheckpointError(
                f"{self.path}: the default size {width}x{height} exceeds max_pixels = {max_pixels}; "
                f"allow at least {width * height} or set a smaller default in ditpack.json"
            )
        return Limits(
            default_width=width,
            default_height=height,
            size_multiple=2 * self.vae_scale_factor,
            min_size=self.settings.min_size,
            max_pixels=max_pixels,
            max_references=self.editing.max_references if self.editing else 0,
        )


def open_checkpoint(location: str | Path | None = "auto", weights: str = "auto") -> Checkpoint:
    """Look through a checkpoint directory and return its configs.

    ``location``: "auto" or None = ``$DITPACK_CHECKPOINT`` if that is set, else "embedded"; "embedded" = the small model
    inside this package; anything else is a directory. ``weights``: "stored"; "random" = made up on the device, so that
    the directory needs no more than configs and tokenizer; "auto" = ``$DITPACK_WEIGHTS`` if set, else "stored".

    Raises:
        CheckpointError: naming the file, the key, its value and what is allowed.
    """
    if location is None or location == "auto":
        location = os.environ.get(ENVIRONMENT_VARIABLE) or "embedded"
    path = EMBEDDED if location == "embedded" else Path(location).expanduser().resolve()
    if not path.is_dir():
        raise CheckpointError(
            f"{path}: no such directory; a checkpoint is a local directory in diffusers' layout (nothing is downloaded)"
        )

    if weights == "auto":
        weights = os.environ.get(WEIGHTS_VARIABLE) or "stored"
    if weights not in WEIGHTS:
        raise CheckpointError(f"weights = {weights!r}: must be one of {', '.join(WEIGHTS)}")
    if not (path / "model_index.json").exists() and (path / "config.json").exists():
        return _open_mammoth_moda2(path, weights)
    return _open_pipeline(path, weights)


def _open_pipeline(path: Path, weights: str) -> Checkpoint:
    index = Config.read(path / "model_index.json")
    family = index.one_of("_class_name", tuple(FAMILIES))
    for component, classes in FAMILIES[family].items():
        pair = index.get(component)
        if not (isinstance(pair, list) and len(pair) == 2 and pair[1] in classes):
            raise index.error(component, f'must be ["library", {" or ".join(repr(name) for name in classes)}]')
        if not (path / component).is_dir():
            raise CheckpointError(f"{path / component}: missing folder; {index.file} lists the component {component!r}")

    transformer = Config.read(path / "transformer" / "config.json")
    scheduler = Config.read(path / "scheduler" / "scheduler_config.json")
    vae = Config.read(path / "vae" / "config.json")
    text_encoder = Config.read(path / "text_encoder" / "config.json")
    check_fit(transformer, scheduler, vae, text_encoder, Config(text_encoder.file, text_part(text_encoder.values)))
    if weights == "stored":
        for component in ("transformer", "vae", "text_encoder"):
            find_weights(path / component)
    _check_tokenizer(path / "tokenizer")

    scale_factor = 2 ** len(vae["temperal_downsample"])  # sic; its length counts
    settings = _settings(path / "ditpack.json", size_multiple=2 * scale_factor)
    return Checkpoint(
        path=path,
        family=family,
        transformer_config=transformer.values,
        scheduler_config=scheduler.values,
        vae_config=vae.values,
        text_encoder_config=text_encoder.values,
        vae_scale_factor=scale_factor,
        settings=settings,
        editing=read_editing(path, family, text_encoder, settings.condition_side, settings.reference_side),
        weights=weights,
    )


def _open_mammoth_moda2(path: Path, weights: str) -> Checkpoint:
    root = Config.read(path / "config.json")
    config = MammothModa2Config.read(root)
    vae = Config(root.file.with_name("config.json: gen_vae_config"), root["gen_vae_config"])
    check_autoencoder_kl(vae, config.in_channels)
    if weights == "stored":
        find_weights(path)
    scale_factor = 2 ** (len(vae["block_out_channels"]) - 1)
    return Checkpoint(
        path=path,
        family=MODEL_TYPE,
        transformer_config=root.values,
        scheduler_config={},
        vae_config=vae.values,
        text_encoder_config=root["llm_config"],
        vae_scale_factor=scale_factor,
        settings=_settings(path / "ditpack.json", size_multiple=2 * scale_factor),
        editing=None,
        weights=weights,
    )


def text_part(text_encoder_config: dict[str, Any]) -> dict[str, Any]:
    nested = text_encoder_config.get("text_config")
    return nested if isinstance(nested, dict) else text_encoder_config


def find_weights(directory: Path) -> list[Path]:
    """The safetensors files of one component folder, in order: one file, or the shards its index lists.

    Raises:
        CheckpointError: when there are none, when a shard is missing, or when a stale single file lies beside an index.
    """
    indices = sorted(directory.glob("*.safetensors.index.json"))
    if len(indices) > 1:
        raise CheckpointError(
            f"{directory}: more than one index ({', '.join(file.name for file in indices)}); keep one"
        )
    if not indices:
        files = sorted(directory.glob("*.safetensors"))
        if len(files) != 1:
            found = ", ".join(file.name for file in files) or "none"
            raise CheckpointError(
                f"{directory}: must hold one *.safetensors file, or an index and its shards; found {found}"
            )
        return files

    index = Config.read(indices[0])
    shards = index.get("weight_map")
    if not (isinstance(shards, dict) and shards and all(isinstance(name, str) for name in shards.values())):
        raise index.error("weight_map", "must map every weight's name to a file name")
    stale = directory / indices[0].name.removesuffix(".index.json")
    if stale.exists():
        raise CheckpointError(f"{directory}: both {stale.name} and {indices[0].name} exist; delete the stale one")
    names = sorted(set(shards.values()))
    for name in names:
        if name != Path(name).name or not (directory / name).is_file():
            raise CheckpointError(f"{directory / name}: missing file; {indices[0].name} lists it as a shard")
    return [directory / name for name in names]


def _check_tokenizer(directory: Path) -> None:
    if not (directory / "tokenizer.json").is_file():
        for name in ("vocab.json", "merges.txt"):
            if not (directory / name).is_file():
                raise CheckpointError(
                    f"{directory / name}: missing file; must hold tokenizer.json, or vocab.json and merges.txt"
                )
    if not (directory / "tokenizer_config.json").is_file():
        raise CheckpointError(f"{directory / 'tokenizer_config.json'}: missing file")


def _settings(file: Path, size_multiple: int) -> GenerationSettings:
    if not file.exists():
        return GenerationSettings()
    config = Config.read(file)
    known = GenerationSettings.__slots__
    for key, value in config.values.items():
        if key not in known:
            raise config.error(key, f"unknown key; known are {', '.join(known)}")
        if type(value) is not int or value < size_multiple or value % size_multiple:
            raise config.error(key, f"must be a positive multiple of {size_multiple}")
    settings = GenerationSettings(**config.values)
    for key in ("default_width", "default_height"):
        if getattr(settings, key) < settings.min_size:
            raise config.error(key, f"must be at least min_size = {settings.min_size}")
    return settings
