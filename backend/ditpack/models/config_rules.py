"""What the json files of a checkpoint must say, each alone and together, for this code to serve it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ditpack.errors import DitpackError, shorten

_ABSENT = object()


class CheckpointError(DitpackError):
    """A checkpoint cannot be served as it is. Names the file, the key or the weight at fault and what is allowed."""


@dataclass(frozen=True)
class Config:
    """One json file of a checkpoint. Every complaint names the file, the key, its value and what is allowed."""

    file: Path
    values: dict[str, Any]

    @classmethod
    def read(cls, file: Path) -> Config:
        """Raises CheckpointError when ``file`` is missing, unreadable or not a json object."""
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(f"{file}: missing file") from None
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{file}: cannot be read as json: {error}") from None
        if not isinstance(values, dict):
            raise CheckpointError(f"{file}: must hold a json object, not {shorten(values)}")
        return cls(file, values)

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, default)

    def __getitem__(self, key: str) -> Any:
        if key not in self.values:
            raise CheckpointError(f"{self.file}: {key}: missing key")
        return self.values[key]

    def error(self, key: str, allowed: str) -> CheckpointError:
        shown = shorten(self.values[key]) if key in self.values else "(absent)"
        return CheckpointError(f"{self.file}: {key} = {shown}: {allowed}")

    def one_of(self, key: str, allowed: tuple[Any, ...], default: Any = _ABSENT) -> Any:
        """The value, which must be one of ``allowed``; an absent key counts as ``default`` when one is given."""
        value = self.values.get(key, default)
        # True == 1 in Python, not in a config.
        if not any(type(value) is type(option) and value == option for option in allowed):
            raise self.error(key, f"must be {' or '.join(json.dumps(option) for option in allowed)}")
        return value

    def count(self, key: str) -> int:
        """The value, which must be a positive integer."""
        value = self[key]
        if type(value) is not int or value < 1:
            raise self.error(key, "must be a positive integer")
        return value

    def numbers(self, key: str, length: int | None = None, *, integers: bool = False) -> list[Any]:
        """The value, which must be a list of ``length`` finite numbers (or positive integers)."""
        value = self[key]
        kinds = (int,) if integers else (int, float)
        if not isinstance(value, list) or not all(type(item) in kinds and math.isfinite(item) for item in value):
            raise self.error(key, f"must be a list of {'integers' if integers else 'finite numbers'}")
        if integers and any(item < 1 for item in value):
            raise self.error(key, "must be positive throughout")
        if length is not None and len(value) != length:
            raise self.error(key, f"must have {length} entries, has {len(value)}")
        return value


def check_fit(transformer: Config, scheduler: Config, vae: Config, text_encoder: Config, text: Config) -> None:
    """Check the configs, each alone and against the others. ``text`` is the language model's part of ``text_encoder``.

    Raises:
        CheckpointError: naming file, key, value and what is allowed.
    """
    _check_vae(vae)
    _check_text_encoder(text_encoder, text)
    _check_scheduler(scheduler)
    _check_transformer(transformer, z_dim=vae["z_dim"], text_width=text["hidden_size"])


def _check_transformer(config: Config, z_dim: int, text_width: int) -> None:
    config.one_of("_class_name", ("QwenImageTransformer2DModel",))
    for key in ("num_layers", "num_attention_heads", "attention_head_dim", "joint_attention_dim"):
        config.count(key)
    config.one_of("patch_size", (2,))
    if config["in_channels"] != 4 * z_dim:
        raise config.error("in_channels", f"must be 4 * z_dim = {4 * z_dim} of vae/config.json")
    if config["out_channels"] != z_dim:
        raise config.error("out_channels", f"must be z_dim = {z_dim} of vae/config.json")
    if config["joint_attention_dim"] != text_width:
        raise config.error("joint_attention_dim", f"must be hidden_size = {text_width} of text_encoder/config.json")
    axes = config.numbers("axes_dims_rope", 3, integers=True)
    if any(axis % 2 for axis in axes):
        raise config.error("axes_dims_rope", "must be even throughout")
    if sum(axes) != config["attention_head_dim"]:
        raise config.error(
            "axes_dims_rope",
            f"must add up to attention_head_dim = {config['attention_head_dim']}, add up to {sum(axes)}",
        )
    config.one_of("zero_cond_t", (False, True), default=False)
    for key in ("guidance_embeds", "use_additional_t_cond", "use_layer3d_rope"):
        config.one_of(key, (False,), default=False)


def _check_vae(config: Config) -> None:
    config.one_of("_class_name", ("AutoencoderKLQwenImage",))
    for key in ("z_dim", "base_dim", "num_res_blocks"):
        config.count(key)
    config.one_of("input_channels", (3,), default=3)
    levels = config.numbers("dim_mult", integers=True)
    downsample = config["temperal_downsample"]
    if not isinstance(downsample, list) or not downsample or not all(type(item) is bool for item in downsample):
        raise config.error("temperal_downsample", "must be a list of true and false")
    if len(downsample) != len(levels) - 1:
        raise config.error(
            "temperal_downsample",
            f"must have {len(levels) - 1} entries, one fewer than dim_mult; has {len(downsample)}",
        )
    for key in ("latents_mean", "latents_std"):
        config.numbers(key, config["z_dim"])
    if any(value <= 0 for value in config["latents_std"]):
        raise config.error("latents_std", "must be positive throughout")


def check_autoencoder_kl(config: Config, latent_channels: int) -> None:
    """Check the config of an AutoencoderKL whose latents have ``latent_channels``. Raises as ``check_fit``."""
    if not isinstance(config.values, dict):
        raise CheckpointError(f"{config.file}: must be an object")
    config.one_of("_class_name", ("AutoencoderKL",), default="AutoencoderKL")
    config.numbers("block_out_channels", integers=True)
    if config["latent_channels"] != latent_channels:
        raise config.error("latent_channels", f"must be in_channels = {latent_channels} of gen_dit_config")
    for key in ("scaling_factor", "shift_factor"):
        value = config.get(key)
        if value is not None and not (type(value) in (int, float) and math.isfinite(value)):
            raise config.error(key, "must be null or a finite number")
    if config.get("scaling_factor") == 0:
        raise config.error("scaling_factor", "must not be 0")


def _check_text_encoder(config: Config, text: Config) -> None:
    config.one_of("model_type", ("qwen2_5_vl",))
    config.one_of("architectures", (["Qwen2_5_VLForConditionalGeneration"],))
    for key in ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"):
        text.count(key)


def _check_scheduler(config: Config) -> None:
    config.one_of("_class_name", ("FlowMatchEulerDiscreteScheduler",))
    # Other ways to place the sigmas, which no Qwen-Image checkpoint uses and the samplers here do not have.
    for key in (
        "use_karras_sigmas",
        "use_exponential_sigmas",
        "use_beta_sigmas",
        "invert_sigmas",
        "stochastic_sampling",
    ):
        config.one_of(key, (False, None), default=False)
    config.one_of("time_shift_type", ("exponential", "linear"), default="exponential")
    terminal = config.get("shift_terminal")
    if terminal is not None and not (type(terminal) in (int, float) and 0 < terminal < 1):
        raise config.error("shift_terminal", "must be null or between 0 and 1")
